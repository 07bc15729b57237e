"""``kvcached top``: status with rates, again and again."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Literal

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvcached_core.cli.ledgers import Ledgers, Snapshots, Unreadable
from kvcached_core.cli.output import Device, ExitCode, Json, answer, fail
from kvcached_core.cli.status import headline, labelled, names_of, state_text, unreadable_line
from kvcached_core.cli.units import MIB, Unit
from kvcached_core.config import Settings
from kvcached_core.ledger_statistics import LedgerStatistics, MemberStatistics

BAR_CELLS = 60
COLUMNS = (
    "MEMBER", "ENGINE", "RESIDENT", "LEASE", "CEILING", "IN USE", "CACHED", "SHORT", "MAP MiB/s", "TRIM MiB/s", "STATE",
)  # fmt: skip
WORDS = {"MEMBER", "ENGINE", "STATE"}


@dataclass(frozen=True)
class Rates:
    """What a member did between two snapshots, per second.

    Attributes:
        mapped_bytes, unmapped_bytes: Growth and trimming.
        create_failures: Pages that the driver refused.
    """

    mapped_bytes: float = 0.0
    unmapped_bytes: float = 0.0
    create_failures: float = 0.0


@dataclass(frozen=True)
class DeviceFrame:
    """One device in a frame; ``rates`` are in the order of its members."""

    device: LedgerStatistics
    rates: tuple[Rates, ...]


@dataclass(frozen=True)
class Frame:
    """All devices at one moment, with what happened since the moment before.

    Attributes:
        interval_seconds: Between the two moments; 0 in a first frame, whose rates are 0.
    """

    interval_seconds: float
    devices: tuple[DeviceFrame, ...]
    unreadable: tuple[Unreadable, ...]
    device_names: Mapping[str, str]


class Sampler:
    """Makes frames of the ledgers' snapshots."""

    def __init__(self, ledgers: Ledgers) -> None:
        self.ledgers = ledgers
        self._names: dict[str, str] = {}
        self._last: dict[tuple[str, int, str], MemberStatistics] = {}
        self._last_at: float | None = None

    def frame(self) -> Frame:
        """The next frame.

        Raises:
            LedgerError: A device was asked for and has no ledger.
        """
        found, at = self.ledgers.snapshots(), time.monotonic()
        interval = 0.0 if self._last_at is None else at - self._last_at
        self._learn_names(found)
        frames = tuple(self._of_device(device, interval) for device in found.devices)
        self._last = {_key(device, member): member for device in found.devices for member in device.members}
        self._last_at = at
        return Frame(interval, frames, found.unreadable, {key: name for key, name in self._names.items() if name})

    def _learn_names(self, found: Snapshots) -> None:
        if any(device.device_id not in self._names for device in found.devices):
            self._names = dict.fromkeys((device.device_id for device in found.devices), "") | names_of(found)

    def _of_device(self, device: LedgerStatistics, interval: float) -> DeviceFrame:
        return DeviceFrame(
            device, tuple(_rates(self._last.get(_key(device, member)), member, interval) for member in device.members)
        )


def _key(device: LedgerStatistics, member: MemberStatistics) -> tuple[str, int, str]:
    return device.device_id, member.slot, member.member_id


def _rates(before: MemberStatistics | None, now: MemberStatistics, interval: float) -> Rates:
    if before is None or not interval:
        return Rates()
    return Rates(
        (now.mapped_bytes_total - before.mapped_bytes_total) / interval,
        (now.unmapped_bytes_total - before.unmapped_bytes_total) / interval,
        (now.create_failures_total - before.create_failures_total) / interval,
    )


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="From one frame to the next.")] = 1.0,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Watch the members live: q quits, l changes the selected member's limits. --json and --once: one frame."""
    with Ledgers(Settings.load().runtime_dir, device) as ledgers:
        sampler = Sampler(ledgers)
        if once or as_json:
            sampler.frame()
            time.sleep(interval)
            shown = sampler.frame()
            answer("top", shown, render(shown), as_json=as_json)
            return
        _watch(sampler, interval)


def _watch(sampler: Sampler, interval_seconds: float) -> None:
    if not sys.stdout.isatty():
        fail("top needs a terminal; kvcached top --once prints one frame", ExitCode.COULD_NOT_RUN, as_json=False)
    try:
        dashboard = import_module("kvcached_core.cli.dashboard")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "textual":
            raise
        message = (
            "the live view needs textual: pip install 'kvcached-core[top]'. Without it: watch -n1 kvcached top --once"
        )
        fail(message, ExitCode.COULD_NOT_RUN, as_json=False)
    dashboard.Dashboard(sampler, interval_seconds).run()


def render(frame: Frame) -> RenderableType:
    """A frame as text."""
    parts: list[RenderableType] = []
    for each in frame.devices:
        if parts:
            parts.append("")
        name = frame.device_names.get(each.device.device_id, "")
        parts += [headline(each.device, name), bar(each.device), _table(each)]
    parts += [unreadable_line(each) for each in frame.unreadable]
    return Group(*parts) if parts else Text("no ledger yet", style="dim")


def bar(device: LedgerStatistics, num_cells: int = BAR_CELLS) -> Text:
    """The device's memory as one bar: static leases, in use, cached, leased but idle, headroom."""
    parts = (
        ("static", "▓", "magenta", sum(m.static_lease_bytes for m in device.members)),
        ("in use", "█", "green", sum(m.in_use_bytes for m in device.members)),
        ("cached", "▒", "cyan", sum(m.cached_bytes for m in device.members)),
        ("idle", "░", "yellow", sum(m.lease_bytes - m.in_use_bytes - m.cached_bytes for m in device.members)),
    )
    unit = Unit.of(device.total_bytes)
    cells, legend, filled, total = Text("["), Text("  "), 0, 0
    for word, cell, style, num_bytes in parts:
        total += max(0, num_bytes)
        upto = min(num_cells, round(num_cells * total / device.total_bytes))
        cells.append(cell * (upto - filled), style=style)
        legend.append(cell, style=style).append(f" {word} {unit.bare(max(0, num_bytes))}  ")
        filled = upto
    return cells.append("·" * (num_cells - filled), style="dim").append("]").append_text(legend)


def _table(each: DeviceFrame) -> RenderableType:
    if not each.device.members:
        return Text("no members", style="dim")
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for heading in COLUMNS:
        table.add_column(heading, no_wrap=True, justify=justification(heading))
    for row in rows(each):
        table.add_row(*row)
    return table


def justification(heading: str) -> Literal["left", "right"]:
    """Numbers to the right, words to the left."""
    return "left" if heading in WORDS else "right"


def rows(each: DeviceFrame) -> list[tuple[Text, ...]]:
    """One line of cells for each member, under `COLUMNS`."""
    unit = Unit.of(each.device.total_bytes)
    return [
        (
            Text(label),
            Text(member.engine),
            Text(unit.full(member.resident_bytes)),
            *(
                Text(unit.bare(num_bytes))
                for num_bytes in (
                    member.lease_bytes,
                    member.ceiling_bytes,
                    member.in_use_bytes,
                    member.cached_bytes,
                    member.unmet_bytes + member.static_unmet_bytes,
                )
            ),
            Text(MIB.bare(int(rates.mapped_bytes))),
            Text(MIB.bare(int(rates.unmapped_bytes))),
            state_text(member, unit),
        )
        for (member, label), rates in zip(labelled(each.device), each.rates, strict=True)
    ]
