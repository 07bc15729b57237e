"""``kvcached trim``: have a member give back free and cached memory now, though nobody needs it."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Annotated

import typer

from kvcached_core.cli.ledgers import Ledgers, ranks_of
from kvcached_core.cli.limit import POLL_SECONDS, Holding
from kvcached_core.cli.output import Device, ExitCode, Json, console, document
from kvcached_core.cli.status import short_id
from kvcached_core.cli.units import Unit
from kvcached_core.config import Settings
from kvcached_core.errors import LedgerError
from kvcached_core.ledger import Ledger
from kvcached_core.sizes import Size, parse_size

SETTLED_SECONDS = 1.0
"""A member that has trimmed nothing for this long has trimmed what it could."""


@dataclass(frozen=True)
class Trim:
    """What was asked of a member on one device and what came of it.

    Attributes:
        goal_bytes: Resident bytes that were asked for; None: as few as it can.
        before: The member when it was asked.
        now: The member at the end of the wait; None if it has left.
        heard: The member has seen the request.
        reached: It did what was asked.
        seconds: Until it did, or until the wait ended.
    """

    device_id: str
    capacity_bytes: int
    member: str
    revision: int
    goal_bytes: int | None
    before: Holding
    now: Holding | None
    heard: bool
    reached: bool
    seconds: float


def trim(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The member, as in kvcached status.")],
    to: Annotated[str | None, typer.Option(metavar="SIZE", help="Resident memory that it keeps.")] = None,
    timeout: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for the member.")] = 10.0,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Have a member give back free and cached memory; what requests use stays, and so do its limits."""
    goal = None if to is None else parse_size(to)
    with Ledgers(Settings.load().runtime_dir, device) as ledgers:
        trims = [run(ledger, name, goal, timeout) for ledger in ledgers.of_member(name)]
    if as_json:
        print(document("trim", {"trims": [*map(dataclasses.asdict, trims)]}))
    else:
        for each in trims:
            console().print(describe(each), soft_wrap=True)
    if not all(each.reached for each in trims):
        raise SystemExit(int(ExitCode.PROBLEM_FOUND))


def run(ledger: Ledger, name: str, goal: Size | None, timeout_seconds: float) -> Trim:
    """Ask a member on one device to trim and follow it until it has, has settled, or the timeout is over.

    Raises:
        LedgerError: The member has left, or another operator is in the way.
    """
    device = ledger.snapshot()
    ranks = ranks_of(device, name)
    if not ranks:
        raise LedgerError(f"{name} has left {device.device_id}")
    before = Holding.of(ranks)
    goal_bytes = None if goal is None else goal.resolve(device.total_bytes)
    began = changed_at = time.monotonic()
    surplus_bytes = max(0, before.resident_bytes - (goal_bytes or 0))
    revision = ledger.request_trim(name, surplus_bytes, deadline_seconds=timeout_seconds)
    last = before
    while True:
        ranks = ranks_of(ledger.snapshot(), name)
        now = Holding.of(ranks) if ranks else None
        heard = bool(ranks) and all(rank.trim_revision >= revision for rank in ranks)
        at = time.monotonic()
        if now is not None and now.resident_bytes < last.resident_bytes:
            last, changed_at = now, at
        settled = heard and at - changed_at >= SETTLED_SECONDS
        finished = heard and not any(rank.trim_left_bytes for rank in ranks)
        if now is None or finished or settled or at - began >= timeout_seconds:
            reached = now is not None and heard and (goal_bytes is None or finished or now.resident_bytes <= goal_bytes)
            seconds = (changed_at if settled else at) - began
            capacity_bytes = device.total_bytes
            return Trim(
                device.device_id, capacity_bytes, name, revision, goal_bytes, before, now, heard, reached, seconds
            )
        time.sleep(POLL_SECONDS)


def describe(each: Trim) -> str:
    """``GPU-3f1c0a7e qwen3: resident 9.2 -> 6.0 GiB in 0.3 s (revision 7)``"""
    unit, before, now = Unit.of(each.capacity_bytes), each.before, each.now
    member = f"{short_id(each.device_id)} {each.member}"
    if now is None:
        return f"{member}: the member ended after {each.seconds:.1f} s (revision {each.revision})"
    amounts = f"resident {unit.bare(before.resident_bytes)} -> {unit.full(now.resident_bytes)}"
    line = f"{member}: {amounts} in {each.seconds:.1f} s (revision {each.revision})"
    if each.reached:
        return line
    if not each.heard:
        return f"{line}. The member has not answered: silent for {now.silent_seconds:.0f} s, {now.state}"
    assert each.goal_bytes is not None
    return (
        f"{line}. NOT reached: {unit.full(each.goal_bytes)} was asked for, and {unit.full(now.in_use_bytes)} is in use "
        "by requests; kvcached limit --ceiling makes it preempt them"
    )
