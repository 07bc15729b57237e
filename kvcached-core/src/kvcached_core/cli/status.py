"""``kvcached status``: who holds how much of each device, now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvcached_core.cli.ledgers import Ledgers, Snapshots, Unreadable
from kvcached_core.cli.output import Device, ExitCode, Json, answer
from kvcached_core.cli.units import Unit
from kvcached_core.config import Settings
from kvcached_core.devices import inventory
from kvcached_core.ledger_statistics import LedgerStatistics, MemberStatistics

HOST = "host"
STATE_STYLES = {"serving": "green", "stopped": "bold red", "waiting": "yellow", "loading": "yellow"}


@dataclass(frozen=True)
class Status:
    """What there is to say.

    Attributes:
        runtime_dir: Where the ledgers are.
        device_names: Of the devices that the driver knows, by UUID.
    """

    runtime_dir: Path
    devices: tuple[LedgerStatistics, ...]
    unreadable: tuple[Unreadable, ...]
    device_names: Mapping[str, str]


def status(device: Device = None, as_json: Json = False) -> None:
    """Show each device's members: resident, leased, floor, ceiling, cached, state."""
    settings = Settings.load()
    with Ledgers(settings.runtime_dir, device) as ledgers:
        found = ledgers.snapshots()
    shown = Status(settings.runtime_dir, found.devices, found.unreadable, names_of(found))
    answer("status", shown, render(shown), as_json=as_json)
    if found.unreadable:
        raise SystemExit(int(ExitCode.PROBLEM_FOUND))


def names_of(found: Snapshots) -> dict[str, str]:
    """The products behind the UUIDs. The driver is asked only if one of its devices is there."""
    wanted = {device.device_id for device in found.devices} - {HOST}
    if not wanted:
        return {}
    return {device.device_id: device.name for device in inventory().devices if device.device_id in wanted}


def render(shown: Status) -> RenderableType:
    """As people read it."""
    if not shown.devices and not shown.unreadable:
        return f"No ledger in {escape(str(shown.runtime_dir))}: no engine has used kvcached with this directory."
    parts: list[RenderableType] = []
    for device in shown.devices:
        if parts:
            parts.append("")
        parts += [headline(device, shown.device_names.get(device.device_id, "")), members_table(device)]
    parts += [unreadable_line(each) for each in shown.unreadable]
    return Group(*parts)


def headline(device: LedgerStatistics, product: str) -> Text:
    """The device in one line."""
    unit = Unit.of(device.total_bytes)
    name = product.removeprefix("NVIDIA ")
    return Text.assemble(
        (short_id(device.device_id), "bold"),
        f"  {name}   " if name else "   ",
        f"capacity {unit.full(device.total_bytes)}   headroom {unit.bare(device.headroom_bytes)}   ",
        f"unleased {unit.bare(device.unleased_bytes)}",
    )


def members_table(device: LedgerStatistics) -> RenderableType:
    """One line for each slot."""
    if not device.members:
        return Text("no members", style="dim")
    unit = Unit.of(device.total_bytes)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("MEMBER", "ENGINE", "RESIDENT", "LEASE", "FLOOR", "CEILING", "CACHED", "STATE"):
        table.add_column(heading, no_wrap=True)
    for member, label in labelled(device):
        amounts = (member.lease_bytes, member.floor_bytes, member.ceiling_bytes, member.cached_bytes)
        row = (label, member.engine, unit.full(member.resident_bytes), *map(unit.bare, amounts))
        table.add_row(*map(escape, row), state_text(member, unit))
    return table


def labelled(device: LedgerStatistics) -> list[tuple[MemberStatistics, str]]:
    """The members with names that tell the ranks of one engine apart."""
    num_ranks = Counter(member.name for member in device.members)
    return [
        (member, f"{member.name}[{member.rank}]" if num_ranks[member.name] > 1 else member.name)
        for member in device.members
    ]


def state_text(member: MemberStatistics, unit: Unit) -> Text:
    """What it does, and what it is short of or owes."""
    text = Text(member.state, style=STATE_STYLES.get(member.state, ""))
    if member.state == "stopped":
        text.append(f" for {member.heartbeat_age_seconds:.0f} s")
    short = member.unmet_bytes + member.static_unmet_bytes
    if short:
        text.append(f", short of {unit.bare(short)}", style="yellow")
    owed = max(member.lease_bytes - min(member.ceiling_bytes, member.target_bytes), member.trim_left_bytes)
    if owed > 0:
        text.append(f", trimming {unit.bare(owed)}", style="cyan")
    return text


def unreadable_line(each: Unreadable) -> Text:
    return Text.assemble((short_id(each.device_id), "bold"), "  ", (each.reason, "red"))


def short_id(device_id: str) -> str:
    """``GPU-3f1c0a7e`` for a whole UUID: enough to tell devices apart, and what ``--device`` takes."""
    return "-".join(device_id.split("-")[:2])
