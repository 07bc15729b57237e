"""``kvcached limit``: change what a member may hold, wait until it does, and say what was reached."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import typer

from kvcached_core.cli.ledgers import Ledgers, ranks_of
from kvcached_core.cli.output import Device, ExitCode, Json, console, document
from kvcached_core.cli.status import short_id
from kvcached_core.cli.units import Unit
from kvcached_core.config import Settings
from kvcached_core.errors import ConfigError, LedgerError
from kvcached_core.ledger import Ledger
from kvcached_core.ledger_statistics import MemberStatistics
from kvcached_core.sizes import Size, parse_size

POLL_SECONDS = 0.02


class Outcome(str, Enum):
    """What became of a change.

    ``reached``: the member holds no more than it may. ``replaced``: another operator changed its limits meanwhile.
    ``timed_out``: it still holds more. ``left``: it has ended.
    """

    REACHED = "reached"
    REPLACED = "replaced"
    TIMED_OUT = "timed_out"
    LEFT = "left"


@dataclass(frozen=True)
class Wish:
    """The limits to change; None leaves one as it is."""

    floor: Size | None = None
    ceiling: Size | None = None
    weight: float | None = None


@dataclass(frozen=True)
class Limits:
    """What a member may hold on one device, all of its ranks there together."""

    floor_bytes: int
    ceiling_bytes: int
    weight: float


@dataclass(frozen=True)
class Holding:
    """A member on one device at one moment, all of its ranks there together."""

    limits: Limits
    revision: int
    resident_bytes: int
    lease_bytes: int
    in_use_bytes: int
    state: str
    silent_seconds: float

    @classmethod
    def of(cls, ranks: Sequence[MemberStatistics]) -> Holding:
        slowest = max(ranks, key=lambda rank: rank.heartbeat_age_seconds)
        return cls(
            limits=Limits(
                sum(rank.floor_bytes for rank in ranks),
                sum(rank.ceiling_bytes for rank in ranks),
                ranks[0].weight,
            ),
            revision=max(rank.limits_revision for rank in ranks),
            resident_bytes=sum(rank.resident_bytes for rank in ranks),
            lease_bytes=sum(rank.lease_bytes for rank in ranks),
            in_use_bytes=sum(rank.in_use_bytes for rank in ranks),
            state=slowest.state,
            silent_seconds=slowest.heartbeat_age_seconds,
        )

    @property
    def within_ceiling(self) -> bool:
        return self.lease_bytes <= self.limits.ceiling_bytes


@dataclass(frozen=True)
class Change:
    """Limits that were put in force on one device.

    Attributes:
        revision: One more than that of the last change by any operator on this device.
        asked: The limits that it put in force, those left alone included.
        before: The member when it was asked.
    """

    device_id: str
    capacity_bytes: int
    member: str
    revision: int
    asked: Limits
    before: Holding


@dataclass(frozen=True)
class Result:
    """What came of a change.

    Attributes:
        now: The member at the end of the wait; None if it has left.
        seconds: From the change to this.
    """

    outcome: Outcome
    now: Holding | None
    seconds: float


def limit(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The member, as in kvcached status.")],
    floor: Annotated[str | None, typer.Option(metavar="SIZE", help="What it gets back whenever it needs it.")] = None,
    ceiling: Annotated[str | None, typer.Option(metavar="SIZE", help="What it never exceeds.")] = None,
    weight: Annotated[float | None, typer.Option(help="Its share under contention, relative to others'.")] = None,
    timeout: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for the member.")] = 10.0,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Change a member's floor, ceiling or weight at once. Sizes: 512MiB, 20GiB, or 25% of the device."""
    wish = read_wish(floor, ceiling, weight)
    with Ledgers(Settings.load().runtime_dir, device) as ledgers:
        found = ledgers.of_member(name)
        began = time.monotonic()
        changes = [put_in_force(ledger, name, wish) for ledger in found]
        results = []
        for ledger, change in zip(found, changes, strict=True):
            if not as_json:
                console().print(opening(change, wish), end="", soft_wrap=True)
            results.append(wait(ledger, change, began, timeout))
            if not as_json:
                console().print(closing(change, results[-1]), soft_wrap=True)
    if as_json:
        print(document("limit", {"changes": [*map(plain, changes, results)]}))
    if any(result.outcome is not Outcome.REACHED for result in results):
        raise SystemExit(int(ExitCode.PROBLEM_FOUND))


def read_wish(floor: str | None, ceiling: str | None, weight: float | None) -> Wish:
    """The limits as they were written.

    Raises:
        ConfigError: None was given, or one is no size.
    """
    if floor is None and ceiling is None and weight is None:
        raise ConfigError("nothing to change: give --floor, --ceiling or --weight")
    return Wish(_read_size(floor), _read_size(ceiling), weight)


def _read_size(written: str | None) -> Size | None:
    return None if written is None else parse_size(written)


def put_in_force(ledger: Ledger, name: str, wish: Wish) -> Change:
    """Change the limits of a member on one device. Admission counts with them when this returns.

    Raises:
        ConfigError: They cannot work. Nothing has changed.
        LedgerError: The member has left, or another operator is in the way.
    """
    device = ledger.snapshot()
    ranks = ranks_of(device, name)
    if not ranks:
        raise LedgerError(f"{name} has left {device.device_id}")
    before = Holding.of(ranks)
    floor_bytes = None if wish.floor is None else wish.floor.resolve(device.total_bytes)
    ceiling_bytes = None if wish.ceiling is None else wish.ceiling.resolve(device.total_bytes)
    revision = ledger.set_limits(name, floor_bytes=floor_bytes, ceiling_bytes=ceiling_bytes, weight=wish.weight)
    asked = Limits(
        before.limits.floor_bytes if floor_bytes is None else floor_bytes,
        before.limits.ceiling_bytes if ceiling_bytes is None else ceiling_bytes,
        before.limits.weight if wish.weight is None else wish.weight,
    )
    return Change(device.device_id, device.total_bytes, name, revision, asked, before)


def wait(ledger: Ledger, change: Change, began: float, timeout_seconds: float) -> Result:
    """Follow a member until its lease is within its ceiling, and not longer than the timeout."""
    while True:
        ranks = ranks_of(ledger.snapshot(), change.member)
        now = Holding.of(ranks) if ranks else None
        outcome = _outcome(change, now)
        seconds = time.monotonic() - began
        if outcome is None and seconds >= timeout_seconds:
            outcome = Outcome.TIMED_OUT
        if outcome is not None:
            return Result(outcome, now, seconds)
        time.sleep(POLL_SECONDS)


def _outcome(change: Change, now: Holding | None) -> Outcome | None:
    if now is None:
        return Outcome.LEFT
    if now.revision > change.revision and now.limits != change.asked:
        return Outcome.REPLACED
    return Outcome.REACHED if now.within_ceiling else None


def opening(change: Change, wish: Wish) -> str:
    """What is asked: ``GPU-3f1c0a7e qwen3: ceiling 18.9 -> 6.0 GiB, resident 9.2 GiB``."""
    unit, before, asked = Unit.of(change.capacity_bytes), change.before.limits, change.asked
    parts = []
    if wish.floor is not None:
        parts.append(f"floor {unit.bare(before.floor_bytes)} -> {unit.full(asked.floor_bytes)}")
    if wish.ceiling is not None:
        parts.append(f"ceiling {unit.bare(before.ceiling_bytes)} -> {unit.full(asked.ceiling_bytes)}")
    if wish.weight is not None:
        parts.append(f"weight {before.weight:g} -> {asked.weight:g}")
    parts.append(f"resident {unit.full(change.before.resident_bytes)}")
    return f"{short_id(change.device_id)} {change.member}: {', '.join(parts)}"


def closing(change: Change, result: Result) -> str:
    """What was reached: ``, trimming … reached 6.0 GiB in 0.3 s (revision 7)``."""
    unit, now = Unit.of(change.capacity_bytes), result.now
    revision = f"(revision {change.revision})"
    if now is None:
        return f" … the member ended after {result.seconds:.1f} s {revision}"
    if result.outcome is Outcome.REPLACED:
        return (
            f" … REPLACED after {result.seconds:.1f} s by another operator: floor {unit.bare(now.limits.floor_bytes)}, "
            f"ceiling {unit.full(now.limits.ceiling_bytes)}, weight {now.limits.weight:g} "
            f"(revision {now.revision}, this was {change.revision})"
        )
    if result.outcome is Outcome.TIMED_OUT:
        return f", trimming … NOT reached in {result.seconds:.1f} s: {_obstacle(now, unit)} {revision}"
    if change.before.lease_bytes <= change.asked.ceiling_bytes:
        return f": in force {revision}"
    return f", trimming … reached {unit.full(now.resident_bytes)} in {result.seconds:.1f} s {revision}"


def _obstacle(now: Holding, unit: Unit) -> str:
    held = f"lease {unit.full(now.lease_bytes)}, resident {unit.full(now.resident_bytes)}"
    if now.state == "stopped":
        return f"{held}, and the member has been silent for {now.silent_seconds:.0f} s; it follows when it runs again"
    return f"{held}, of which {unit.full(now.in_use_bytes)} is in use by requests; it follows as they end"


def plain(change: Change, result: Result) -> dict[str, Any]:
    """For JSON: the change and what came of it as one object."""
    return {**dataclasses.asdict(change), **dataclasses.asdict(result), "outcome": result.outcome.value}
