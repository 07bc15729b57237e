"""Claims of rank.py, with real pages on the host and a real ledger."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcached_core.account import Account
from kvcached_core.arena import Arena
from kvcached_core.backends.host import HostBackend
from kvcached_core.errors import DeviceMemoryError, DriverError, InvariantError, LedgerError
from kvcached_core.geometry import Geometry, Stripe
from kvcached_core.ledger import Ledger
from kvcached_core.orders import (
    ALIVE_SECONDS,
    Ack,
    Alive,
    BlockRanges,
    FromRank,
    Hello,
    Map,
    Report,
    Retire,
    Standing,
    Undo,
    Welcome,
)
from kvcached_core.rank import REFRESH_SECONDS, SAID_AFTER_SECONDS, Rank
from kvcached_core.testing import FailingBackend

PAGE = HostBackend.granularity_bytes
BLOCKS, BLOCKS_PER_EXTENT = 40, 4
# Two layers whose blocks are three quarters of a page: an extent is three pages in each, none of them shared.
ALIGNED = Geometry(
    num_blocks=BLOCKS,
    stripes=(Stripe(0, PAGE * 3 // 4, PAGE * 3 // 4), Stripe(30 * PAGE, PAGE * 3 // 4, PAGE * 3 // 4)),
    size_bytes=60 * PAGE,
    page_bytes=PAGE,
    blocks_per_extent=BLOCKS_PER_EXTENT,
)
EXTENT_BYTES = 6 * PAGE
BUDGET = 10 * EXTENT_BYTES


class ManualFence:
    def __init__(self, streams: Sequence[int]) -> None:
        self.streams = streams
        self.over = False

    def done(self) -> bool:
        return self.over


class FencedBackend(HostBackend):
    """The host with fences that a test completes by hand."""

    def __init__(self) -> None:
        super().__init__(BUDGET)
        self.fences: list[ManualFence] = []

    def fence(self, streams: Sequence[int]) -> ManualFence:  # type: ignore[override]
        self.fences.append(ManualFence(streams))
        return self.fences[-1]


class HandClock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Held:
    """A rank and what it stands on."""

    rank: Rank
    arena: Arena
    account: Account
    ledger: Ledger
    fences: list[ManualFence]
    failing: FailingBackend
    clock: HandClock
    standings: list[Standing] = field(default_factory=list)

    def give(self, *orders: Map | Retire | Undo | Report | Hello) -> list[FromRank]:
        """Give these orders and tick; what the rank says, but for what the ledger says of it."""
        for order in orders:
            self.rank.order(order)
        said = self.rank.tick()
        self.standings += [each for each in said if isinstance(each, Standing)]
        return [each for each in said if not isinstance(each, Standing)]

    @property
    def standing(self) -> Standing:
        """What the ledger says now."""
        self.clock.seconds += REFRESH_SECONDS
        self.give()
        return self.standings[-1]

    @property
    def held_bytes(self) -> tuple[int, int, int]:
        """Resident, leased and created: the same as long as nothing is under way."""
        return self.arena.resident_bytes, self.account.lease_bytes, self.account.created_bytes


@contextmanager
def holding(
    runtime_dir: Path, geometry: Geometry = ALIGNED, name: str = "a", ceiling_bytes: int | None = None
) -> Iterator[Held]:
    backend = FencedBackend()
    failing = FailingBackend(backend)
    clock = HandClock()
    with (
        closing(Ledger.open("host", BUDGET, runtime_dir=runtime_dir)) as ledger,
        closing(Arena(failing, geometry.size_bytes, geometry.page_bytes)) as arena,
    ):
        account = ledger.join(name, engine="vllm", ceiling_bytes=ceiling_bytes)
        with closing(Rank(arena, geometry, account, failing, index=1, now=clock)) as rank:
            yield Held(rank, arena, account, ledger, backend.fences, failing, clock)


@pytest.fixture
def held(runtime_dir: Path) -> Iterator[Held]:
    with holding(runtime_dir) as made:
        yield made


def extents(*ids: int) -> BlockRanges:
    return tuple((extent_id * BLOCKS_PER_EXTENT, (extent_id + 1) * BLOCKS_PER_EXTENT) for extent_id in ids)


# --- mapping ----------------------------------------------------------------------------------------------------------


def test_a_map_is_leased_created_and_answered(held: Held) -> None:
    assert held.give(Map(7, extents(0, 2))) == [Ack(7)]
    assert held.held_bytes == (2 * EXTENT_BYTES,) * 3
    assert held.rank.num_extents == 2


def test_consecutive_extents_may_come_as_one_range_and_leave_one_by_one(held: Held) -> None:
    held.give(Map(1, ((0, 3 * BLOCKS_PER_EXTENT),)))
    assert held.give(Undo(2, extents(1))) == [Ack(2)]
    assert held.held_bytes == (2 * EXTENT_BYTES,) * 3
    assert held.rank.num_extents == 2


def test_what_the_ledger_does_not_grant_is_a_shortage_and_changes_nothing(runtime_dir: Path) -> None:
    with holding(runtime_dir, ceiling_bytes=2 * EXTENT_BYTES) as held:
        held.give(Map(1, extents(0)))
        [answer] = held.give(Map(2, extents(1, 2)))
        assert isinstance(answer, Ack)
        assert (answer.seq, answer.shortage) == (2, True)
        assert "the ledger grants" in answer.error
        assert held.held_bytes == (EXTENT_BYTES,) * 3
        assert held.give(Map(3, extents(1))) == [Ack(3)]


@pytest.mark.parametrize(
    ("make_error", "shortage"),
    [(lambda: DeviceMemoryError("no page"), True), (lambda: DriverError("it broke"), False)],
)
@pytest.mark.parametrize("fail_at", range(3))  # two runs of three pages, and zeroing them
def test_a_map_that_fails_at_any_call_changes_nothing(
    held: Held, make_error: Callable[[], Exception], shortage: bool, fail_at: int
) -> None:
    """V4: a part of an order is refused. The rest and the lease go back, the reason is told, a later map works."""
    held.give(Map(1, extents(0)))
    held.failing.make_error, held.failing.fail_at = make_error, fail_at
    [answer] = held.give(Map(2, extents(3)))
    assert isinstance(answer, Ack)
    assert (answer.seq, answer.shortage) == (2, shortage)
    assert str(make_error()) in answer.error
    assert held.held_bytes == (EXTENT_BYTES,) * 3
    assert held.rank.num_extents == 1
    assert held.ledger.snapshot().members[0].create_failures_total == 1
    assert held.give(Map(3, extents(3))) == [Ack(3)]


def test_a_ledger_that_gives_no_turn_is_a_shortage(held: Held) -> None:
    """Serving goes on with what is held; growth is tried again."""

    class Waiting(Account):
        def lease(self, asked_bytes: int) -> int:
            raise LedgerError("no turn at host.ledger within 5.0 s (epoch 7)")

    held.account.__class__ = Waiting
    assert held.give(Map(1, extents(0))) == [Ack(1, "no turn at host.ledger within 5.0 s (epoch 7)", shortage=True)]
    assert held.arena.resident_bytes == 0


def test_a_ledger_that_is_gone_is_a_shortage(held: Held, runtime_dir: Path) -> None:
    held.give(Map(1, extents(0)))
    (runtime_dir / "host.ledger").unlink()
    held.account.heartbeat()
    [answer] = held.give(Map(2, extents(1)))
    assert isinstance(answer, Ack)
    assert answer.shortage
    assert held.give(Undo(3, extents(0))) == [Ack(3)]
    assert held.arena.resident_bytes == 0


# --- unmapping --------------------------------------------------------------------------------------------------------


def test_a_retired_extent_stays_until_its_step_is_launched_and_its_fence_done(held: Held) -> None:
    held.give(Map(1, extents(0, 1)))
    assert held.give(Retire(2, extents(1), after_step=5)) == []
    held.rank.note_step(4, [11])
    assert held.give() == []
    assert held.fences == []
    held.rank.note_step(5, [11, 12])
    assert held.give() == []
    assert [fence.streams for fence in held.fences] == [[11, 12]]
    assert held.held_bytes == (2 * EXTENT_BYTES,) * 3
    held.fences[0].over = True
    assert held.give() == [Ack(2)]
    assert held.held_bytes == (EXTENT_BYTES,) * 3


def test_a_retirement_that_waits_delays_no_later_order(held: Held) -> None:
    held.give(Map(1, extents(0, 1, 2)))
    held.rank.note_step(5)
    assert held.give(Retire(2, extents(0), after_step=5), Retire(3, extents(1), after_step=6), Map(4, extents(4))) == [
        Ack(4)
    ]
    held.rank.note_step(6)
    held.give()
    held.fences[1].over = True
    assert held.give() == [Ack(3)]
    held.fences[0].over = True
    assert held.give() == [Ack(2)]


def test_what_is_to_be_undone_goes_at_once(held: Held) -> None:
    held.give(Map(1, extents(0)))
    assert held.give(Undo(2, extents(0))) == [Ack(2)]
    assert held.held_bytes == (0, 0, 0)
    assert held.fences == []


def test_the_engines_thread_wakes_the_rank_only_while_a_retirement_waits(held: Held) -> None:
    held.rank.note_step(1)
    assert not _readable(held.rank.wake)
    held.give(Map(1, extents(0)), Retire(2, extents(0), after_step=2))
    _drain(held.rank.wake)
    held.rank.note_step(2)
    assert _readable(held.rank.wake)


@given(steps=st.lists(st.sets(st.integers(0, 7), min_size=1), max_size=12), blocks_per_extent=st.integers(1, 6))
def test_pages_that_extents_share_are_counted_once_and_leave_with_the_last(
    steps: list[set[int]], blocks_per_extent: int
) -> None:
    """Any extents come and go in any order, cut by the scheduler's size of an extent and not by this rank's own."""

    num_extents = -(-BLOCKS // blocks_per_extent)

    def blocks_of(extent_id: int) -> range:
        return range(extent_id * blocks_per_extent, min(BLOCKS, (extent_id + 1) * blocks_per_extent))

    def ranges_of(ids: set[int]) -> BlockRanges:
        return tuple((blocks_of(extent_id).start, blocks_of(extent_id).stop) for extent_id in sorted(ids))

    with TemporaryDirectory(dir="/dev/shm") as directory, holding(Path(directory)) as held:
        held.give(Hello(BLOCKS, blocks_per_extent))
        resident: set[int] = set()
        for seq, chosen in enumerate(steps):
            ids = {extent_id % num_extents for extent_id in chosen}
            assert held.give(Map(2 * seq, ranges_of(ids - resident)), Undo(2 * seq + 1, ranges_of(ids & resident))) == [
                Ack(2 * seq),
                Ack(2 * seq + 1),
            ]
            resident ^= ids
            page_ranges = [pages for extent_id in resident for pages in ALIGNED.page_ranges(blocks_of(extent_id))]
            assert held.held_bytes == (len(set(chain.from_iterable(page_ranges))) * PAGE,) * 3


def test_a_rank_that_waits_for_a_long_step_says_that_it_is_alive(held: Held) -> None:
    held.give(Map(1, extents(1)))
    assert held.give(Retire(2, extents(1), after_step=5)) == []
    held.clock.seconds += ALIVE_SECONDS
    assert held.give() == [Alive()]
    assert held.give() == []
    held.clock.seconds += ALIVE_SECONDS
    assert held.give() == [Alive()]
    held.rank.note_step(5)
    held.give()
    held.fences[-1].over = True
    held.clock.seconds += ALIVE_SECONDS
    assert held.give() == [Ack(2)]


# --- the null block ---------------------------------------------------------------------------------------------------


def test_the_null_block_stays_whatever_retires(held: Held) -> None:
    held.rank.pin(range(1))
    assert held.held_bytes == (2 * PAGE,) * 3
    held.give(Map(1, extents(0)), Undo(2, extents(0)))
    assert held.held_bytes == (2 * PAGE,) * 3


def test_the_null_block_waits_for_neighbours_to_make_room(runtime_dir: Path) -> None:
    """V2, V11: an engine starts beside one that holds everything, which sees its demand and trims."""
    with holding(runtime_dir, name="old") as old, holding(runtime_dir, name="new") as new:
        old.give(Map(1, ((0, BLOCKS),)))
        assert old.held_bytes[0] == BUDGET
        old.give(Report(0, 0, 10, 0, busy=False))
        pinning = threading.Thread(target=new.rank.pin, args=(range(1),), kwargs={"deadline_seconds": 20.0})
        pinning.start()
        while old.standing.target_extents == 10 and pinning.is_alive():
            pinning.join(0.02)
        assert old.standing.target_extents == 9
        old.give(Undo(2, extents(9)))
        pinning.join(20)
        assert new.held_bytes == (2 * PAGE,) * 3
        assert [member.unmet_bytes for member in new.ledger.snapshot().members] == [0, 0]


def test_an_engine_that_waits_for_its_first_memory_says_so_and_is_seen_to_wait(
    runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """V2: two minutes without a line look like a hang."""
    with holding(runtime_dir, name="old") as old, holding(runtime_dir, name="new") as new:
        old.give(Map(1, ((0, BLOCKS),)))
        pinning = threading.Thread(target=new.rank.pin, args=(range(1),), kwargs={"deadline_seconds": 20.0})
        pinning.start()
        for seconds in (0.0, SAID_AFTER_SECONDS, 1.0):
            new.clock.seconds += seconds
            pinning.join(0.1)
        assert {member.name: member.state for member in old.ledger.snapshot().members}["new"] == "waiting"
        [line] = [record.getMessage() for record in caplog.records if "waits for neighbours" in record.getMessage()]
        assert "cannot map the engine's null block on host yet: the ledger grants 0 B" in line
        old.give(Undo(2, extents(9)))
        pinning.join(20)


def test_an_engine_that_warms_up_after_its_first_page_is_loading_not_stopped(held: Held) -> None:
    """Compiling and capturing take minutes, in which it reports nothing."""
    held.rank.pin(range(1))
    assert [member.state for member in held.ledger.snapshot().members] == ["loading"]
    held.give(Report(0, 0, 0, 0, busy=False))
    assert [member.state for member in held.ledger.snapshot().members] == ["idle"]


def test_the_pages_of_the_null_block_count_towards_its_extent(runtime_dir: Path) -> None:
    """Else an engine whose neighbours hold the rest would wait for a first extent that is there already."""
    whole = replace(ALIGNED, blocks_per_extent=1, stripes=(Stripe(0, PAGE, PAGE),), page_bytes=PAGE)
    with holding(runtime_dir, name="old") as old, holding(runtime_dir, whole, name="new") as new:
        new.rank.pin(range(1))
        old.account.lease(BUDGET)
        new.give(Hello(BLOCKS, 1))
        assert new.standing.may_hold_extents == 1
        assert new.give(Map(1, ((0, 1),))) == [Ack(1)]
        assert new.standing.may_hold_extents == 1


def test_a_null_block_without_room_is_refused_with_the_figures(runtime_dir: Path) -> None:
    with holding(runtime_dir, name="old") as old, holding(runtime_dir, name="new") as new:
        old.give(Map(1, ((0, BLOCKS),)))
        with pytest.raises(LedgerError, match="cannot map the engine's null block on host: the ledger grants 0 B"):
            new.rank.pin(range(1))


def test_a_null_block_that_the_driver_refuses_is_not_the_neighbours_fault(held: Held) -> None:
    held.failing.make_error, held.failing.fail_at = (lambda: DriverError("it broke")), 0
    with pytest.raises(DriverError, match="rank 1 cannot map the engine's null block on host: it broke"):
        held.rank.pin(range(1), deadline_seconds=60)


# --- the scheduler ----------------------------------------------------------------------------------------------------


def test_the_greeting_says_who_it_is_and_how_it_would_cut(held: Held) -> None:
    [welcome] = held.give(Hello(BLOCKS))
    assert isinstance(welcome, Welcome)
    assert (welcome.rank, welcome.device_id, welcome.member) == (1, "host", "a")
    assert (welcome.blocks_per_extent, welcome.extent_bytes, welcome.page_bytes) == (4, EXTENT_BYTES, PAGE)
    assert welcome.total_bytes == BUDGET
    [welcome] = held.give(Hello(BLOCKS, 8))
    assert isinstance(welcome, Welcome)
    assert (welcome.blocks_per_extent, welcome.extent_bytes) == (8, 2 * EXTENT_BYTES)


def test_a_scheduler_with_other_blocks_is_refused(held: Held) -> None:
    with pytest.raises(InvariantError, match="the scheduler counts 41 blocks and rank 1 40"):
        held.give(Hello(BLOCKS + 1))


def test_what_the_scheduler_reports_is_in_the_ledger_in_bytes(held: Held) -> None:
    held.give(Map(1, extents(0, 1, 2)), Report(4, 3, 2, 1, busy=True))
    [member] = held.ledger.snapshot().members
    assert (member.demand_bytes, member.unmet_bytes) == (4 * EXTENT_BYTES, 3 * EXTENT_BYTES)
    assert (member.free_bytes, member.cached_bytes) == (2 * EXTENT_BYTES, EXTENT_BYTES)
    assert member.state == "serving"


# --- what the ledger says ---------------------------------------------------------------------------------------------


def test_a_standing_is_said_when_it_changes_and_only_then(held: Held) -> None:
    assert held.standing == Standing(may_hold_extents=10, target_extents=0, ceiling_extents=10)
    assert held.standing == Standing(10, 0, 10)
    assert len(held.standings) == 1
    held.ledger.set_limits("a", ceiling_bytes=7 * EXTENT_BYTES)
    held.give()
    assert held.standings == [Standing(10, 0, 10), Standing(7, 0, 7)]


def test_a_standing_that_counts_a_map_is_said_before_the_maps_answer(held: Held) -> None:
    """Else a scheduler would see one extent more than it may keep, and trim what it has just grown by."""
    held.rank.order(Map(1, extents(0)))
    assert held.rank.tick() == [Standing(10, 1, 10), Ack(1)]


def test_a_lowered_ceiling_is_said_at_the_next_tick_and_binds(held: Held) -> None:
    held.give(Map(1, extents(0, 1, 2, 3)))
    held.ledger.set_limits("a", ceiling_bytes=3 * EXTENT_BYTES)
    held.give()
    assert held.standings[-1] == Standing(may_hold_extents=4, target_extents=3, ceiling_extents=3, must=True)
    assert not held.ledger.snapshot().members[0].limits_followed
    held.give(Undo(2, extents(3)))
    assert held.standing == Standing(3, 3, 3)
    assert held.ledger.snapshot().members[0].limits_followed


def test_what_a_neighbours_floor_takes_from_the_ceiling_is_said_beside_it(held: Held) -> None:
    held.give(Map(1, extents(0, 1, 2, 3)))
    neighbour = held.ledger.join("b", engine="test", floor_bytes=8 * EXTENT_BYTES)
    neighbour.report(
        demand_bytes=8 * EXTENT_BYTES, unmet_bytes=8 * EXTENT_BYTES, free_bytes=0, cached_bytes=0, busy=True
    )
    held.give()
    assert held.standings[-1] == Standing(4, 2, ceiling_extents=2, must=True, yielded_extents=8)


def test_a_trim_that_an_operator_asks_for_lowers_the_target_and_does_not_bind(held: Held) -> None:
    held.give(Map(1, extents(0, 1, 2, 3)), Report(1, 0, 3, 0, busy=False))
    held.ledger.request_trim("a", 2 * EXTENT_BYTES)
    assert (held.standing.target_extents, held.standing.must) == (2, False)
    held.give(Undo(2, extents(3, 2)), Map(3, extents(5)))
    assert held.standing.target_extents == 3


def test_a_trim_asks_for_no_more_than_can_be_spared(held: Held) -> None:
    held.give(Map(1, extents(0, 1, 2, 3)), Report(4, 0, 0, 1, busy=True))
    held.ledger.request_trim("a", 4 * EXTENT_BYTES)
    assert held.standing.target_extents == 3


def test_a_neighbours_unmet_demand_lowers_the_target_to_the_fair_share_and_does_not_bind(runtime_dir: Path) -> None:
    with holding(runtime_dir, name="old") as old, holding(runtime_dir, name="new") as new:
        old.give(Map(1, ((0, BLOCKS),)), Report(6, 0, 0, 4, busy=False))
        assert old.standing.target_extents == 10
        new.give(Report(10, 10, 0, 0, busy=True))
        assert (old.standing.target_extents, old.standing.must) == (5, False)
        assert new.standing.may_hold_extents == 0


def test_a_neighbours_unmet_floor_binds(runtime_dir: Path) -> None:
    with holding(runtime_dir, name="old") as old, holding(runtime_dir, name="new") as new:
        old.give(Map(1, ((0, BLOCKS),)), Report(10, 0, 0, 0, busy=True))
        new.account.set_floor(2 * EXTENT_BYTES)
        new.give(Report(10, 10, 0, 0, busy=True))
        assert (old.standing.target_extents, old.standing.must) == (5, True)


def test_a_rank_is_calm_until_it_has_something_to_say_or_has_not_looked_for_long(held: Held) -> None:
    assert not held.rank.is_calm
    held.give()
    assert held.rank.is_calm
    held.rank.order(Map(1, extents(0)))
    assert not held.rank.is_calm
    held.give()
    assert held.rank.is_calm
    held.clock.seconds += REFRESH_SECONDS
    assert not held.rank.is_calm


def test_a_rank_is_not_calm_while_it_waits_for_a_fence(held: Held) -> None:
    held.give(Map(1, extents(0)), Retire(2, extents(0), after_step=5))
    assert not held.rank.is_calm
    held.rank.note_step(5)
    held.give()
    held.fences[0].over = True
    assert held.give() == [Ack(2)]
    held.give()
    assert held.rank.is_calm


def test_a_rank_is_not_calm_when_a_neighbour_has_changed_anything(runtime_dir: Path) -> None:
    with holding(runtime_dir, name="old") as old, holding(runtime_dir, name="new") as new:
        old.give()
        assert old.rank.is_calm
        new.give(Report(10, 10, 0, 0, busy=True))
        assert not old.rank.is_calm


def test_what_a_report_changes_is_said_with_no_second_look(runtime_dir: Path) -> None:
    with holding(runtime_dir, name="old") as old, holding(runtime_dir, name="new") as new:
        old.give(Map(1, ((0, BLOCKS),)), Report(10, 0, 0, 0, busy=True))
        new.give(Report(10, 10, 0, 0, busy=True))
        old.give()
        assert old.rank.is_calm
        before = old.standings[-1].target_extents
        old.rank.order(Report(2, 0, 8, 0, busy=False))
        assert not old.rank.is_calm
        [said] = old.rank.tick()
        assert isinstance(said, Standing)
        assert said.target_extents < before
        old.rank.order(Report(2, 0, 8, 0, busy=False))
        assert old.rank.is_calm  # its own words are no news to it


def test_a_closed_rank_holds_nothing_says_nothing_and_has_left(held: Held) -> None:
    held.rank.pin(range(1))
    held.give(Map(1, extents(0, 5)), Retire(2, extents(5), after_step=9))
    held.rank.close()
    held.rank.close()
    assert held.arena.resident_bytes == 0
    assert held.ledger.snapshot().members == ()
    assert held.give(Map(3, extents(1))) == []


def test_what_else_the_process_holds_is_told_to_the_ledger(runtime_dir: Path) -> None:
    clock, used = HandClock(), [5 * PAGE]
    with (
        closing(Ledger.open("host", BUDGET, runtime_dir=runtime_dir)) as ledger,
        closing(Arena(HostBackend(BUDGET), ALIGNED.size_bytes, PAGE)) as arena,
    ):
        account = ledger.join("a", engine="vllm")
        rank = Rank(arena, ALIGNED, account, HostBackend(BUDGET), index=0, static_used_bytes=lambda: used[0], now=clock)
        with closing(rank):
            rank.tick()
            assert ledger.snapshot().members[0].static_used_bytes == 5 * PAGE
            used[0] = 7 * PAGE
            rank.tick()
            assert ledger.snapshot().members[0].static_used_bytes == 5 * PAGE
            clock.seconds += REFRESH_SECONDS
            rank.tick()
            assert ledger.snapshot().members[0].static_used_bytes == 7 * PAGE


def _readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def _drain(descriptor: int) -> None:
    os.eventfd_read(descriptor)
