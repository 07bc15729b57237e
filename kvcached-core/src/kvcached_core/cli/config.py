"""``kvcached config``: every setting, its value, where the value is from, and its accepted form."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rich.table import Table

from kvcached_core.cli.output import Json, answer
from kvcached_core.config import Accepted, Settings, variable_of


@dataclass(frozen=True)
class Setting:
    """One setting as it is now.

    Attributes:
        value: As one would write it; None where nothing is set and the default depends on the engine or the device.
        source: ``environment`` or ``default``.
    """

    variable: str
    value: str | None
    source: str
    accepted: str
    meaning: str


@dataclass(frozen=True)
class Configuration:
    """Every setting that a person may set."""

    settings: tuple[Setting, ...]


def configuration(environ: Mapping[str, str]) -> Configuration:
    """The settings under an environment.

    Raises:
        ConfigError: The environment has an unknown setting or a value out of its form.
    """
    settings = Settings.load(environ)
    return Configuration(
        tuple(_setting(settings, field, environ) for field in Settings.model_fields if field != "engine_id")
    )


def _setting(settings: Settings, field: str, environ: Mapping[str, str]) -> Setting:
    description = Settings.model_fields[field]
    return Setting(
        variable=variable_of(field),
        value=_written(getattr(settings, field)),
        source="environment" if environ.get(variable_of(field)) else "default",
        accepted=next(note.form for note in description.metadata if isinstance(note, Accepted)),
        meaning=description.description or "",
    )


def _written(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def config(as_json: Json = False) -> None:
    """Show every setting: its value here, where that is from, and what it accepts."""
    found = configuration(os.environ)
    answer("config", found, _table(found), as_json=as_json)


def _table(found: Configuration) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("SETTING", "VALUE", "SOURCE", "ACCEPTED", "MEANING"):
        table.add_column(heading, overflow="fold")
    for setting in found.settings:
        style = "bold" if setting.source == "environment" else None
        value = "-" if setting.value is None else setting.value
        table.add_row(setting.variable, value, setting.source, setting.accepted, setting.meaning, style=style)
    return table
