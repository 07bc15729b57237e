"""Real processes on one ledger: really killed, really stopped, at every write and at random."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from kvcached_core.account import Account
from kvcached_core.errors import ConfigError, LedgerError
from kvcached_core.ledger import Ledger
from kvcached_core.ledger_file import STEAL_AFTER_SECONDS

from tests.core.member_program import MemberProcess, broken_identities, live, serve, watch

TOTAL = 2**30
MIB = 2**20
BUDGET = 256 * MIB  # of the members with real pages
CHAOS_SECONDS = float(os.environ.get("CHAOS_SECONDS", "30" if "CI" in os.environ else "6"))

OPERATIONS: dict[str, dict[str, Any]] = {
    "join": {"name": "again"},
    "grow": {"num_bytes": 300 * MIB},
    "shrink": {"num_bytes": 50 * MIB},
    "load": {"num_bytes": 200 * MIB, "deadline_seconds": 1.0},
    "report": {"demand_bytes": 1, "unmet_bytes": 2, "free_bytes": 3, "cached_bytes": 4, "busy": True},
    "limit": {"name": "victim", "ceiling_bytes": 500 * MIB},
    "leave": {},
}


@pytest.fixture
def ledger(runtime_dir: Path) -> Iterator[Ledger]:
    with closing(Ledger.open("host", TOTAL, runtime_dir=runtime_dir)) as ledger:
        yield ledger


@pytest.fixture
def other(ledger: Ledger) -> Account:
    return ledger.join("other", engine="test")


@contextmanager
def member(runtime_dir: Path, num_bytes: int = 100 * MIB) -> Iterator[MemberProcess]:
    process = MemberProcess(serve, runtime_dir, TOTAL)
    try:
        assert process.do("join", name="victim") == "victim"
        assert process.do("grow", num_bytes=num_bytes) == num_bytes
        yield process
    finally:
        process.end()


def names(ledger: Ledger) -> list[str]:
    return sorted(member.name for member in ledger.snapshot().members)


def take_all(account: Account, deadline_seconds: float = 2.0) -> float:
    """Lease the whole device, asking again until it is granted; returns the seconds it took, and gives it back."""
    began = time.perf_counter()
    while account.lease_bytes < TOTAL:
        account.lease(TOTAL - account.lease_bytes)
        waited = time.perf_counter() - began
        assert waited < deadline_seconds, f"{account!r} after {waited:.2f} s"
    account.give_back(TOTAL)
    return waited


@pytest.mark.parametrize("operation", OPERATIONS)
def test_killed_before_any_write_it_leaves_everything(
    runtime_dir: Path, ledger: Ledger, other: Account, operation: str
) -> None:
    for place in range(1000):
        with member(runtime_dir) as victim:
            victim.tell(operation, at=place, signal=signal.SIGKILL, **OPERATIONS[operation])
            if victim.answer() is not None:
                break  # it has fewer writes than that
        take_all(other)
        assert names(ledger) == ["other"]
    assert place > 1


@pytest.mark.parametrize("operation", OPERATIONS)
def test_stopped_before_any_write_it_holds_nobody_up_and_gets_no_more_afterwards(
    runtime_dir: Path, ledger: Ledger, other: Account, operation: str
) -> None:
    for place in range(1000):
        with member(runtime_dir) as victim:
            victim.tell(operation, at=place, signal=signal.SIGSTOP, **OPERATIONS[operation])
            if not victim.stops():
                break
            began = time.perf_counter()
            granted = other.lease(TOTAL)
            assert time.perf_counter() - began < STEAL_AFTER_SECONDS + 0.5
            assert granted >= TOTAL - 400 * MIB
            if operation != "limit":  # two operators do wait for one another, and say so
                ledger.set_limits("other", weight=2.0)
            victim.send(signal.SIGCONT)
            assert victim.answer() is not None
            assert broken_identities(ledger.snapshot()) == []
            assert other.lease_bytes == granted
            other.give_back(granted)
    assert place > 1


def test_a_stopped_operator_is_named_to_the_next_one(runtime_dir: Path, ledger: Ledger) -> None:
    with member(runtime_dir) as operator:
        operator.tell("limit", at=0, signal=signal.SIGSTOP, name="victim", ceiling_bytes=500 * MIB)
        assert operator.stops()
        with pytest.raises(LedgerError, match=f"process {operator.pid} is changing limits"):
            ledger.set_limits("victim", ceiling_bytes=600 * MIB)
        operator.send(signal.SIGCONT)
        first = operator.answer()
        assert ledger.set_limits("victim", ceiling_bytes=600 * MIB) == first + 1


def test_a_killed_members_memory_is_usable_at_once(
    runtime_dir: Path, ledger: Ledger, other: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = []
    for _ in range(20):
        with member(runtime_dir, TOTAL) as victim:
            assert other.lease(TOTAL) == 0
            victim.send(signal.SIGKILL)
            seconds.append(take_all(other))
    with capsys.disabled():
        middle, worst = statistics.median(seconds) * 1e3, max(seconds) * 1e3
        print(f"\n  from SIGKILL to the last byte granted to another: median {middle:.1f} ms, worst {worst:.1f} ms")


def test_members_that_die_stop_and_are_limited_at_random(runtime_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger.open("host", BUDGET, runtime_dir=runtime_dir)
    choose = random.Random(os.environ.get("CHAOS_SEED", "1"))
    seeds = iter(range(1_000_000))
    reader = MemberProcess(watch, runtime_dir, 100)
    members = [MemberProcess(live, runtime_dir, BUDGET, next(seeds)) for _ in range(8)]
    stopped: list[MemberProcess] = []
    ended_seconds: list[float] = []
    gone_seconds: list[float] = []
    limits = refused = stops = 0
    ends = time.monotonic() + CHAOS_SECONDS
    try:
        while time.monotonic() < ends:
            time.sleep(choose.uniform(0, 0.1))
            what = choose.choice(("kill", "stop", "continue", "continue", "limit", "trim"))
            if what == "kill":
                victim = members.pop(choose.randrange(len(members)))
                stopped = [process for process in stopped if process is not victim]
                ended, gone = _until_gone(ledger, victim)
                ended_seconds.append(ended)
                gone_seconds.append(gone)
                victim.end()
                members.append(MemberProcess(live, runtime_dir, BUDGET, next(seeds)))
            elif what == "stop" and len(stopped) < 6:
                stopped.append(choose.choice(members))
                stopped[-1].send(signal.SIGSTOP)
                stops += 1
            elif what == "continue" and stopped:
                stopped.pop(choose.randrange(len(stopped))).send(signal.SIGCONT)
            elif what in ("limit", "trim"):
                try:
                    _operate(ledger, choose, what)
                    limits += 1
                except (LedgerError, ConfigError):  # it is dead by now, or the floors do not fit
                    refused += 1
            assert broken_identities(ledger.snapshot()) == []
            assert not [process.pid for process in members if process.ended()]  # nobody but us ends one
        seconds, wrong = _ended(reader)
    finally:
        for process in (reader, *members):
            process.end()
    assert wrong == []
    assert len(seconds) > CHAOS_SECONDS * 10
    assert ledger.snapshot().members == ()
    assert ledger.join("last", engine="test").lease(BUDGET) == BUDGET
    ledger.close()
    assert [path.name for path in runtime_dir.iterdir()] == ["host.ledger"]
    with capsys.disabled():
        print(
            f"\n  {CHAOS_SECONDS:.0f} s: {len(gone_seconds)} killed, ended by the kernel within "
            f"{max(ended_seconds) * 1e3:.0f} ms and out of the ledger {max(gone_seconds) * 1e3:.1f} ms later at most; "
            f"{stops} stopped, {limits} limits and trims, {refused} refused; {len(seconds)} readings, "
            f"median {statistics.median(seconds) * 1e3:.2f} ms, worst {max(seconds) * 1e3:.1f} ms, none wrong"
        )


def _until_gone(ledger: Ledger, victim: MemberProcess) -> tuple[float, float]:
    """Kill it; returns the seconds until the kernel has ended it, and from then until no snapshot shows it."""
    victim.send(signal.SIGKILL)
    began = time.perf_counter()
    while not victim.ended():
        assert time.perf_counter() - began < 30.0
    ended = time.perf_counter()
    while any(member.pid == victim.pid for member in ledger.snapshot().members):
        assert time.perf_counter() - ended < 2.0
    return ended - began, time.perf_counter() - ended


def _operate(ledger: Ledger, choose: random.Random, what: str) -> None:
    present = names(ledger)
    if not present:
        return
    name = choose.choice(present)
    if what == "trim":
        ledger.request_trim(name, choose.randrange(BUDGET))
    else:
        ceiling = choose.randrange(BUDGET // 8, BUDGET)
        ledger.set_limits(name, floor_bytes=choose.randrange(ceiling // 8), ceiling_bytes=ceiling)


def _ended(reader: MemberProcess) -> tuple[list[float], list[str]]:
    reader.tell("end")
    seconds, wrong = reader.answer()
    return seconds, wrong
