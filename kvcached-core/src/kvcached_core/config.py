"""Every setting, typed, from the environment. Nothing else in kvcached reads ``os.environ``."""

from __future__ import annotations

import difflib
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, ValidationError

from kvcached_core.errors import ConfigError
from kvcached_core.sizes import ACCEPTED_FORM, Size, parse_size

ENABLE = "ENABLE_KVCACHED"
PREFIX = "KVCACHED_"

_SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,54}")


@dataclass(frozen=True)
class Accepted:
    """The form a setting's value takes, in words: what an error says and ``kvcached config`` prints."""

    form: str


def _read_size(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error  # pydantic collects ValueError only


def _read_switch(value: object) -> object:
    return _SWITCHES.get(value.lower(), value) if isinstance(value, str) else value


def _check_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("not a member name")
    return value


def _check_absolute(value: Path) -> Path:
    if not value.is_absolute():
        raise ValueError("engines started elsewhere would not find a relative path")
    return value


_Switch: TypeAlias = Annotated[bool, BeforeValidator(_read_switch), Accepted("1 or 0")]
_Size: TypeAlias = Annotated[InstanceOf[Size], BeforeValidator(_read_size)]
_SIZE = Accepted(ACCEPTED_FORM)


def default_runtime_dir() -> Path:
    """The directory of this user's ledgers: in memory, so that a reboot leaves nothing behind."""
    return Path(f"/dev/shm/kvcached-{os.geteuid()}")


def variable_of(field: str) -> str:
    """The environment variable that sets a field of :class:`Settings`."""
    return ENABLE if field == "enabled" else PREFIX + field.upper()


class Settings(BaseModel):
    """What the environment asks for. Immutable; a field not set in the environment has its default.

    A field's environment variable is :func:`variable_of` its name; its meaning is its description and its form the
    :class:`Accepted` of its metadata, for ``kvcached config``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=variable_of, populate_by_name=True)

    enabled: Annotated[_Switch, Field(description="Turn kvcached on.")] = False
    strict: Annotated[_Switch, Field(description="End the engine where it would otherwise run natively.")] = False
    allow_untested: Annotated[_Switch, Field(description="Try engine releases that are not in the table.")] = False
    name: Annotated[
        Annotated[str, AfterValidator(_check_name)] | None,
        Accepted("1 to 55 letters, digits, '.', '_' or '-', the first a letter or digit"),
        Field(description="This engine's name in the ledger; by default from its model."),
    ] = None
    floor: Annotated[
        _Size | None, _SIZE, Field(description="KV memory this engine gets back whenever it needs it.")
    ] = None
    ceiling: Annotated[_Size | None, _SIZE, Field(description="KV memory this engine never exceeds.")] = None
    weight: Annotated[
        float,
        Accepted("a number above 0, at most 1000"),
        Field(gt=0, le=1000, description="Share of the device under contention, relative to its neighbours'."),
    ] = 1.0
    page_size: Annotated[_Size | None, _SIZE, Field(description="Bytes of one page; by default from the model.")] = None
    layout: Annotated[
        Literal["auto", "layer-major", "token-major"],
        Accepted("auto, layer-major or token-major"),
        Field(
            description="How SGLang's KV cache lies in its addresses; token-major maps larger pages. "
            "vLLM has a setting of its own."
        ),
    ] = "auto"
    headroom: Annotated[
        _Size | None, _SIZE, Field(description="Left ungranted on the device; by default 1GiB on CUDA, 0 on the host.")
    ] = None
    cache_floor: Annotated[
        _Size, _SIZE, Field(description="Cached prefixes that are kept when neighbours need memory.")
    ] = Size(num_bytes=0)
    cache_ceiling: Annotated[
        _Size | None, _SIZE, Field(description="Cached prefixes that are kept when nobody needs memory.")
    ] = None
    host_budget: Annotated[
        _Size | None, _SIZE, Field(description="What the host backend's engines share; bytes, or % of this machine.")
    ] = None
    runtime_dir: Annotated[
        Annotated[Path, AfterValidator(_check_absolute)],
        Accepted("an absolute path, the same for all engines of a device"),
        Field(default_factory=default_runtime_dir, description="Where the ledgers are."),
    ]
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"],
        Accepted("DEBUG, INFO, WARNING or ERROR"),
        Field(description="Of kvcached's own log lines."),
    ] = "INFO"
    guard: Annotated[
        _Switch, Field(description="Back unmapped CUDA addresses with a read-only guard page; 0 makes strays fault.")
    ] = True
    engine_id: Annotated[
        str, Accepted("set by kvcached itself"), Field(description="Names one engine to the processes it starts.")
    ] = ""

    @classmethod
    def load(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the settings.

        An empty value counts as not set: that is what ``VAR=${VAR}`` leaves in a compose or unit file.

        Raises:
            ConfigError: A ``KVCACHED_*`` name that is no setting (with the nearest that is), or values out of their
                form (each with its value and the accepted form).
        """
        known = {variable_of(field): field for field in cls.model_fields}
        given = {name: value for name, value in environ.items() if name in known or name.startswith(PREFIX)}
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ConfigError("\n".join(_unknown(name, known) for name in sorted(unknown)))
        try:
            return cls.model_validate({name: value for name, value in given.items() if value})
        except ValidationError as error:
            raise ConfigError(_refused(error, known)) from error


def with_engine_id(settings: Settings) -> Settings:
    """The settings with an id for this engine, put into the environment for the processes that it starts.

    Ranks of one engine are one member by it, and an engine's ``/metrics`` shows its own members only.
    """
    if settings.engine_id:
        return settings
    engine_id = uuid.uuid4().hex[:16]
    os.environ[variable_of("engine_id")] = engine_id
    return settings.model_copy(update={"engine_id": engine_id})


def _unknown(name: str, known: Iterable[str]) -> str:
    by_words = {_words(variable): variable for variable in known}
    [nearest] = difflib.get_close_matches(_words(name), by_words, n=1, cutoff=0.0)
    return f"{name} is not a setting. Did you mean {by_words[nearest]}?"


def _words(variable: str) -> str:
    return "_".join(sorted(variable.upper().split("_")))  # KVCACHED_ENABLE is near ENABLE_KVCACHED


def _refused(error: ValidationError, known: Mapping[str, str]) -> str:
    lines = []
    for problem in error.errors():
        variable = str(problem["loc"][0])
        notes = Settings.model_fields[known[variable]].metadata
        form = next(note.form for note in notes if isinstance(note, Accepted))
        lines.append(f"{variable}={problem['input']!r} is refused. Accepted: {form}.")
    return "\n".join(lines)
