"""Agents with a rank each in one ledger, stepped in turn: memory goes where it is wanted, and then it stays there.

Pages and the ledger are real; the engines' blocks are plain sets, and time is the test's.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from kvcached_core.account import Account
from kvcached_core.agent import Agent, Policy
from kvcached_core.arena import Arena
from kvcached_core.backends.host import HostBackend
from kvcached_core.geometry import Geometry, Stripe
from kvcached_core.ledger import Ledger
from kvcached_core.ledger_statistics import MemberStatistics
from kvcached_core.orders import LocalLink
from kvcached_core.rank import Rank

from tests.core.naive_engine import HandAlarm, NaiveBlocks, NaiveScheduler

PAGE = HostBackend.granularity_bytes
BLOCKS_PER_EXTENT = 4
MAX_RUNNING = 8
MAX_REQUEST_BLOCKS = 12
NUM_EXTENTS = 24
BUDGET = NUM_EXTENTS * PAGE
GEOMETRY = Geometry(
    num_blocks=NUM_EXTENTS * BLOCKS_PER_EXTENT,
    stripes=(Stripe(0, PAGE // BLOCKS_PER_EXTENT, PAGE // BLOCKS_PER_EXTENT),),
    size_bytes=BUDGET,
    page_bytes=PAGE,
    blocks_per_extent=BLOCKS_PER_EXTENT,
)


class HandClock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class Engine:
    """One member whose requests take every free block that they may, up to what they want."""

    def __init__(self, ledger: Ledger, clock: HandClock, stack: ExitStack, account: Account) -> None:
        self.account = account
        self._ledger = ledger
        backend = HostBackend(BUDGET)
        arena = stack.enter_context(closing(Arena(backend, BUDGET, PAGE)))
        rank = stack.enter_context(closing(Rank(arena, GEOMETRY, account, backend, index=0, now=clock)))
        rank.pin(range(1))
        self.blocks = NaiveBlocks(NUM_EXTENTS, BLOCKS_PER_EXTENT)
        self.scheduler = NaiveScheduler()
        self._links = [LocalLink(rank)]
        self._alarm = HandAlarm()
        self._agent = Agent(
            self.blocks, self._links, self.scheduler, threading.RLock(), Policy(standing_blocks=3), now=clock,
            alarm=self._alarm,
        )  # fmt: skip
        self._wants = 0
        self._rank = rank

    def want(self, num_blocks: int) -> None:
        """Requests come that would use so many blocks, and stay."""
        self._wants = num_blocks
        self.scheduler.is_busy = num_blocks > 0

    def finish(self) -> None:
        """All requests end; their content stays cached."""
        self.blocks.free(list(self.blocks.used), cached=True)
        self.want(0)

    def step(self) -> None:
        self.blocks.use(max(0, self._wants - self.blocks.num_used_blocks))
        self.scheduler.wanted = max(0, self._wants - self.blocks.num_used_blocks)
        self.turn()

    def turn(self) -> None:
        """The step is launched, and the agent has a turn, unless it need not."""
        self.scheduler.step += 1
        self._rank.note_step(self.scheduler.step)
        self._agent.note_step()
        kicked = self._agent.may_grow and self.blocks.num_clean_blocks < self.scheduler.wanted
        if kicked or not self._alarm.snoozed:
            self._agent.turn()

    @property
    def member(self) -> MemberStatistics:
        return next(member for member in self._ledger.snapshot().members if member.name == self.account.name)

    @property
    def num_extents(self) -> int:
        return self.member.resident_bytes // PAGE


@dataclass
class Request:
    """Grows by a block a step until it has so many; then it ends."""

    num_blocks: int
    held: list[int] = field(default_factory=list)


class Serving(Engine):
    """An engine with requests that end, and with preemption as real engines have it: of the youngest, to begin anew."""

    def __init__(self, ledger: Ledger, clock: HandClock, stack: ExitStack, account: Account) -> None:
        super().__init__(ledger, clock, stack, account)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_finished = 0
        self.num_preempted = 0

    def step(self) -> None:
        for request in list(self.running):
            self._grow(request)
        if self.waiting and len(self.running) < MAX_RUNNING and self.blocks.num_free_blocks > 0:
            self.running.append(self.waiting.popleft())
        self.scheduler.is_busy = bool(self.running or self.waiting)
        self.scheduler.wanted = 2 * len(self.running) + bool(self.waiting)
        self.turn()

    def _grow(self, request: Request) -> None:
        while request in self.running:
            taken = self.blocks.use(1)
            if taken:
                request.held += taken
                if len(request.held) >= request.num_blocks:
                    self._end(request)
                    self.num_finished += 1
                return
            youngest = self.running[-1]
            self._end(youngest)
            self.waiting.appendleft(youngest)
            self.num_preempted += 1

    def _end(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.free(request.held, cached=True)
        request.held = []


class Host:
    """The two, and the time."""

    def __init__(self, ledger: Ledger, stack: ExitStack, weights: tuple[float, float]) -> None:
        self.clock = HandClock()
        self.a, self.b = (
            Engine(ledger, self.clock, stack, ledger.join(name, engine="vllm", weight=weight))
            for name, weight in zip("ab", weights, strict=True)
        )

    def run(self, turns: int = 200) -> None:
        for _ in range(turns):
            self.clock.seconds += 0.02
            self.a.step()
            self.b.step()

    def check_rest(self) -> None:
        """Nothing is mapped or unmapped any more, however long one looks."""
        before = [(engine.member.maps_total, engine.member.unmaps_total) for engine in (self.a, self.b)]
        self.run(400)
        assert [(engine.member.maps_total, engine.member.unmaps_total) for engine in (self.a, self.b)] == before


@pytest.fixture
def weights() -> tuple[float, float]:
    return (1.0, 1.0)


@pytest.fixture
def host(runtime_dir: Path, weights: tuple[float, float]) -> Iterator[Host]:
    with ExitStack() as stack:
        ledger = stack.enter_context(closing(Ledger.open("host", BUDGET, runtime_dir=runtime_dir)))
        yield Host(ledger, stack, weights)


def test_what_one_only_caches_goes_to_the_other_that_wants_it_and_no_more(host: Host) -> None:
    host.a.want(80)
    host.run()
    host.a.finish()
    host.run()
    assert host.a.num_extents >= 20
    host.b.want(40)
    host.run()
    assert host.b.blocks.num_used_blocks == 40
    assert host.a.blocks.num_cached_blocks >= 80 - 40
    host.check_rest()


def test_an_idle_cache_that_nobody_wants_stays(host: Host) -> None:
    host.a.want(60)
    host.run()
    host.a.finish()
    host.run()
    host.check_rest()
    assert host.a.blocks.num_cached_blocks == 60


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (1.0, 5.0)])
def test_two_that_want_more_than_there_is_settle_at_their_weights(host: Host, weights: tuple[float, float]) -> None:
    """Neither holds anything yet when both begin, so nobody has to be preempted for the other's share."""
    host.a.want(200)
    host.b.want(200)
    host.run()
    fair = NUM_EXTENTS * weights[0] / sum(weights)
    assert abs(host.a.num_extents - fair) <= 1
    assert host.a.num_extents + host.b.num_extents >= NUM_EXTENTS - 1
    host.check_rest()


def test_memory_moves_back_and_forth_with_the_load(host: Host) -> None:
    for busy, idle in ((host.a, host.b), (host.b, host.a)) * 3:
        busy.want(80)
        host.run()
        assert busy.blocks.num_used_blocks == 80
        assert idle.num_extents <= 3
        busy.finish()
        host.run(50)


@pytest.mark.parametrize("num_engines", [3, 6])
def test_more_demand_than_memory_for_a_minute_ends_every_request(num_engines: int, runtime_dir: Path) -> None:
    """V1: every engine would fill the device alone; none starves, and what is asked ends once it is asked no more."""
    pick, clock = random.Random(num_engines), HandClock()
    with ExitStack() as stack:
        ledger = stack.enter_context(closing(Ledger.open("host", BUDGET, runtime_dir=runtime_dir)))
        floor_bytes = MAX_REQUEST_BLOCKS // BLOCKS_PER_EXTENT * PAGE
        names = "abcdef"[:num_engines]
        accounts = [ledger.join(name, engine="vllm", floor_bytes=floor_bytes) for name in names]
        engines = [Serving(ledger, clock, stack, account) for account in accounts]
        asked = 0
        for turn in range(3000):
            clock.seconds += 0.02
            for engine in engines:
                if turn < 2500 and len(engine.waiting) < 4:
                    engine.waiting.append(Request(pick.randint(4, MAX_REQUEST_BLOCKS)))
                    asked += 1
                engine.step()
            assert sum(member.lease_bytes for member in ledger.snapshot().members) <= BUDGET
        finished = [engine.num_finished for engine in engines]
        assert sum(finished) == asked
        assert min(finished) > 0.5 * max(finished)
        assert sum(engine.num_preempted for engine in engines) > 0
