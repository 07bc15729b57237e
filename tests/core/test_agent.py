"""Claims of agent.py: what it orders, when, and what it makes of the answers. Time is the test's."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvcached_core.agent import (
    ANSWER_SECONDS,
    CALM_SECONDS,
    FAILURE_BACKOFF_SECONDS,
    HOLD_SECONDS,
    MAX_EXTENTS_PER_ORDER,
    QUIET_SECONDS,
    REPORT_SECONDS,
    SHORTAGE_BACKOFF_SECONDS,
    Agent,
    Policy,
)
from kvcached_core.extents import Residency
from kvcached_core.orders import Ack, Alive, Map, Report, Retire, Undo

from tests.core.naive_engine import HandAlarm, NaiveBlocks, NaiveScheduler, ScriptedLink

BLOCKS_PER_EXTENT = 4


class HandClock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class Engine:
    """An agent that is stepped by hand, and all that it sees.

    ``turn`` lets every rank carry out and answer every order unless told otherwise.
    """

    def __init__(
        self,
        *,
        num_extents: int = 20,
        num_ranks: int = 1,
        standing: int = 3,
        cache_floor: int = 0,
        cache_ceiling: int | None = None,
        allowed: int | None = 1000,
    ) -> None:
        self.blocks = NaiveBlocks(num_extents, BLOCKS_PER_EXTENT)
        self.scheduler = NaiveScheduler()
        self.links = [ScriptedLink(rank) for rank in range(num_ranks)]
        self.lock = threading.RLock()
        self.clock = HandClock()
        policy = Policy(standing, cache_floor_blocks=cache_floor, cache_ceiling_blocks=cache_ceiling)
        self.alarm = HandAlarm()
        self.agent = Agent(self.blocks, self.links, self.scheduler, self.lock, policy, now=self.clock, alarm=self.alarm)
        if allowed is not None:
            for link in self.links:
                link.allow(allowed)

    def turn(self, seconds: float = 0.0) -> None:
        """Time passes and the agent looks; nobody answers."""
        self.clock.seconds += seconds
        self.agent.turn()

    def settle(self, seconds: float = 0.0, *, turns: int = 50) -> None:
        """Time passes, and everybody does what he is told until nothing more is ordered."""
        self.turn(seconds)
        for _ in range(turns):
            if not self.answer_all():
                return
            self.turn()
        raise AssertionError(f"orders without end: {self.links[0].sent[-4:]}")

    def answer_all(self) -> bool:
        """Every rank answers what it has not answered yet; false when there was nothing."""
        answered = False
        for link in self.links:
            while link.unanswered:
                link.answer()
                answered = True
        return answered

    def busy(self, wanted: int) -> None:
        self.scheduler.is_busy, self.scheduler.wanted = True, wanted

    def idle(self) -> None:
        self.scheduler.is_busy, self.scheduler.wanted = False, 0

    def fill_cache(self, num_blocks: int) -> None:
        """A request of so many blocks comes, ends, and leaves its content behind."""
        self.busy(num_blocks)
        self.settle()
        blocks = self.blocks.use(num_blocks)
        assert len(blocks) == num_blocks
        self.blocks.free(blocks, cached=True)
        self.idle()
        self.settle()

    def allow(self, extents: int, *, target: int | None = None, ceiling: int = 1000, must: bool = False) -> None:
        for link in self.links:
            link.allow(extents, target=target, ceiling=ceiling, must=must)

    @property
    def is_calm(self) -> bool:
        """Whether the agent sleeps on when a step comes by now."""
        self.agent.note_step()
        return self.alarm.snoozed

    @property
    def num_resident(self) -> int:
        return self.blocks.extents.num_resident

    @property
    def reports(self) -> list[Report]:
        return [message for message in self.links[0].sent if isinstance(message, Report)]


def orders_of(link: ScriptedLink) -> list[Map | Retire | Undo]:
    return [message for message in link.sent if not isinstance(message, Report)]  # type: ignore[misc]


# --- growing ----------------------------------------------------------------------------------------------------------


def test_nothing_grows_before_every_ledger_has_spoken() -> None:
    engine = Engine(num_ranks=2, allowed=None)
    engine.turn()
    engine.links[0].allow(20)
    engine.turn()
    assert orders_of(engine.links[0]) == []
    engine.links[1].allow(20)
    engine.turn()
    assert orders_of(engine.links[0]) == orders_of(engine.links[1]) == [Map(1, ((0, 4),))]


def test_blocks_are_the_engines_only_once_every_rank_has_mapped_them() -> None:
    engine = Engine(num_ranks=3)
    engine.turn()
    for link in engine.links:
        assert engine.blocks.num_free_blocks == 0
        link.answer()
        engine.turn()
    assert engine.blocks.num_free_blocks == 3  # the null block is not free


def test_it_grows_ahead_of_demand_to_what_the_next_steps_take() -> None:
    engine = Engine(standing=3)
    engine.settle()
    engine.busy(21)
    engine.turn()
    assert orders_of(engine.links[0])[-1] == Map(2, ((4, 24),))
    engine.settle()
    assert engine.blocks.num_clean_blocks == 23


def test_blocks_on_their_way_are_not_ordered_twice() -> None:
    engine = Engine()
    engine.busy(30)
    for _ in range(5):
        engine.turn()
    assert len(orders_of(engine.links[0])) == 1


def test_a_large_busy_engine_grows_in_large_steps() -> None:
    engine = Engine(num_extents=500)
    engine.busy(4 * 160)
    engine.settle()
    engine.blocks.use(engine.blocks.num_free_blocks)
    before = engine.num_resident
    engine.busy(1)
    engine.settle()
    assert engine.num_resident - before == before // 8


def test_an_order_is_bounded() -> None:
    engine = Engine(num_extents=500)
    engine.busy(4 * 400)
    engine.turn()
    assert engine.blocks.extents.num_moving == MAX_EXTENTS_PER_ORDER
    engine.settle()
    assert engine.num_resident > 400


def test_the_smallest_allowance_of_any_rank_decides() -> None:
    engine = Engine(num_ranks=2)
    engine.links[1].allow(2)
    engine.busy(40)
    engine.settle()
    assert engine.num_resident == 2


def test_growth_stops_at_the_ceiling_and_goes_on_when_it_is_raised() -> None:
    engine = Engine()
    engine.allow(20, ceiling=5)
    engine.busy(40)
    engine.settle()
    assert engine.num_resident == 5
    engine.allow(20, ceiling=7)
    engine.settle()
    assert engine.num_resident == 7


def test_at_the_ceiling_the_engine_evicts_by_itself_and_nothing_is_ordered() -> None:
    engine = Engine()
    engine.allow(20, ceiling=5)
    engine.fill_cache(16)
    engine.busy(12)
    sent = len(orders_of(engine.links[0]))
    for _ in range(20):
        engine.settle(QUIET_SECONDS)
    assert len(orders_of(engine.links[0])) == sent
    assert engine.blocks.num_cached_blocks == 16


# --- answers ----------------------------------------------------------------------------------------------------------


def test_one_rank_that_cannot_map_has_the_others_undo_it(caplog: pytest.LogCaptureFixture) -> None:
    """V5: no rank keeps a page of that order, the extents can be taken anew, and the reason names the rank."""
    engine = Engine(num_ranks=3)
    engine.busy(10)
    engine.turn()
    engine.links[0].answer()
    engine.links[2].answer()
    engine.turn()
    assert engine.links[0].unanswered == []
    engine.links[1].answer("cuMemCreate failed: CUDA_ERROR_UNKNOWN")
    engine.turn()
    assert engine.links[0].unanswered == engine.links[2].unanswered == [Undo(2, ((0, 12),))]
    assert engine.links[1].unanswered == []
    assert "rank 1 did not map order 1: cuMemCreate failed: CUDA_ERROR_UNKNOWN" in caplog.text
    assert engine.blocks.extents.num_absent == 17
    engine.settle()
    assert engine.blocks.extents.num_absent == 20
    assert engine.agent.statistics.failed_orders == 1
    engine.settle(FAILURE_BACKOFF_SECONDS)
    assert engine.num_resident == 3


def test_a_map_that_fails_everywhere_needs_no_undoing() -> None:
    engine = Engine(num_ranks=2)
    engine.turn()
    for link in engine.links:
        link.answer("no lease", shortage=True)
    engine.turn()
    assert engine.blocks.extents.num_absent == 20
    assert all(isinstance(order, Map) for order in orders_of(engine.links[0]))


@pytest.mark.parametrize(
    ("shortage", "pause", "level"),
    [(True, SHORTAGE_BACKOFF_SECONDS, logging.DEBUG), (False, FAILURE_BACKOFF_SECONDS, logging.ERROR)],
)
def test_growth_pauses_after_a_failure_and_a_shortage_is_no_error(
    caplog: pytest.LogCaptureFixture, shortage: bool, pause: float, level: int
) -> None:
    caplog.set_level(logging.DEBUG)
    engine = Engine()
    engine.turn()
    engine.links[0].answer("not now", shortage=shortage)
    engine.turn()
    assert [record.levelno for record in caplog.records] == [level]
    engine.turn(pause * 0.9)
    assert len(orders_of(engine.links[0])) == 1
    engine.turn(pause * 0.2)
    assert len(orders_of(engine.links[0])) == 2


def test_answers_may_come_in_any_order() -> None:
    engine = Engine()
    engine.fill_cache(16)
    engine.blocks.extents.ceiling = 20
    engine.allow(20, target=3)
    engine.turn()
    [retire] = engine.links[0].unanswered
    engine.allow(20)
    engine.busy(40)
    engine.turn()
    _, grow = engine.links[0].unanswered
    engine.links[0].say(Ack(grow.seq))
    engine.links[0].say(Ack(retire.seq))
    engine.links[0].unanswered.clear()
    engine.turn()
    assert engine.blocks.extents.num_moving == 0


def test_an_unanswered_order_is_said_once_and_stops_growth_and_trimming_until_it_is_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine(num_ranks=2)
    engine.fill_cache(16)
    engine.busy(40)
    engine.turn()
    engine.links[0].answer()
    engine.turn(ANSWER_SECONDS / 2)
    assert engine.blocks.extents.num_quarantined == 0
    engine.turn(ANSWER_SECONDS)
    moving = engine.blocks.extents.num_quarantined
    assert moving > 0
    sent = len(orders_of(engine.links[0]))
    engine.allow(20, target=0)
    engine.turn(ANSWER_SECONDS)
    assert len(orders_of(engine.links[0])) == sent
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 1
    assert said[0].startswith("rank 1 has not answered order 3 (Map of")
    assert engine.agent.statistics.overdue_orders == 1
    engine.allow(20)
    engine.links[1].answer()
    engine.turn()
    assert engine.blocks.extents.num_quarantined == 0
    assert "answered after all" in caplog.text
    engine.settle()
    assert engine.blocks.num_clean_blocks >= 40


def test_what_retires_during_a_long_step_is_not_overdue_while_the_rank_shows_that_it_is_alive() -> None:
    """A first compilation or a long prefill takes longer than any rank may be silent."""
    engine = Engine()
    engine.fill_cache(16)
    engine.allow(20, target=3)
    engine.turn()
    assert engine.links[0].unanswered
    for _ in range(8):
        engine.links[0].say(Alive())
        engine.turn(ANSWER_SECONDS / 2)
    assert engine.agent.statistics.overdue_orders == 0
    engine.turn(ANSWER_SECONDS + 0.1)
    assert engine.agent.statistics.overdue_orders == 1


def test_a_lost_rank_is_named_once_and_growth_and_trimming_stop(caplog: pytest.LogCaptureFixture) -> None:
    """V6, as far as it is ours to say."""
    engine = Engine(num_ranks=2)
    engine.fill_cache(16)
    engine.links[1].lose("its process ended")
    engine.busy(40)
    for _ in range(3):
        engine.turn(1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1 is lost (its process ended): this engine cannot grow any more"
    ]
    assert engine.links[0].unanswered == []
    with engine.lock:
        assert not engine.agent.await_blocks(1000)


def test_a_rank_that_said_goodbye_is_not_reported_as_lost(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.settle()
    engine.links[0].close()
    engine.turn(1.0)
    assert caplog.records == []


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_a_step_that_has_enough_does_not_wait() -> None:
    engine = Engine()
    engine.settle()
    with engine.lock:
        assert engine.agent.await_blocks(3)
    assert engine.agent.statistics.waits == 0


def test_a_step_waits_for_blocks_on_their_way_and_lets_go_of_the_lock() -> None:
    engine = Engine()
    engine.settle()
    engine.busy(8)
    engine.turn()

    def answer() -> None:
        with engine.lock:
            engine.links[0].answer()
            engine.agent.turn()

    other = threading.Timer(0.02, answer)
    other.start()
    started = time.monotonic()
    with engine.lock, engine.lock:
        assert engine.agent.await_blocks(8, wait_seconds=20)
    assert time.monotonic() - started < 10
    other.join()
    assert (engine.agent.statistics.waits, engine.agent.statistics.waits_timed_out) == (1, 0)


def test_a_wait_is_bounded_and_a_shortage_is_paid_for_once() -> None:
    engine = _real_time_engine()
    engine.busy(8)
    engine.agent.turn()
    started = time.monotonic()
    with engine.lock:
        assert not engine.agent.await_blocks(8)
        assert not engine.agent.await_blocks(8)
    assert time.monotonic() - started < 1
    assert engine.agent.statistics.waits == 1
    engine.answer_all()
    engine.agent.turn()
    engine.busy(16)
    engine.agent.turn()
    with engine.lock:
        engine.agent.await_blocks(16)
    assert engine.agent.statistics.waits == 2


def _real_time_engine() -> Engine:
    engine = Engine()
    engine.agent = Agent(engine.blocks, engine.links, engine.scheduler, engine.lock, Policy(3))
    engine.allow(20)
    engine.settle()
    return engine


@pytest.mark.parametrize("why", ["at the ceiling", "nothing to be had", "growth pauses"])
def test_a_step_does_not_wait_where_waiting_cannot_help(why: str) -> None:
    engine = Engine()
    if why == "at the ceiling":
        engine.allow(20, ceiling=1)
    elif why == "nothing to be had":
        engine.allow(1)
    engine.settle()
    engine.busy(8)
    if why == "growth pauses":
        engine.turn()
        engine.links[0].answer("it broke")
    engine.turn()
    with engine.lock:
        assert not engine.agent.await_blocks(8)
    assert engine.agent.statistics.waits == 0


def test_a_step_can_see_at_a_glance_whether_asking_for_memory_is_of_use() -> None:
    engine = Engine(num_extents=3, standing=4)
    assert engine.agent.may_grow  # nothing is known yet
    engine.turn()
    assert engine.agent.may_grow  # on its way
    engine.busy(wanted=12)
    engine.settle()
    assert engine.blocks.extents.num_absent == 0
    assert not engine.agent.may_grow
    engine.allow(2, must=True)
    engine.settle()
    assert not engine.agent.may_grow  # owing
    engine.allow(3)
    engine.turn()
    assert engine.agent.may_grow


def test_kicks_that_have_not_been_heard_are_one() -> None:
    engine = Engine()
    for _ in range(3):
        engine.agent.kick()
    assert engine.alarm.rings == 1


# --- sleeping on ------------------------------------------------------------------------------------------------------


@pytest.fixture
def working() -> Engine:
    """At work, short of blocks that its ledger does not grant; it has said so."""
    engine = Engine(num_extents=30)
    engine.allow(5)
    engine.busy(wanted=30)
    engine.settle()
    engine.settle(REPORT_SECONDS)
    return engine


def test_it_sleeps_on_while_nothing_changes(working: Engine) -> None:
    assert working.reports[-1].unmet_extents == 3
    for _ in range(10):
        assert working.is_calm
        working.clock.seconds += CALM_SECONDS / 11


def test_it_looks_around_now_and_then_all_the_same(working: Engine) -> None:
    working.clock.seconds += CALM_SECONDS
    assert not working.is_calm


def test_it_sleeps_on_where_it_has_what_it_wants() -> None:
    engine = Engine()
    engine.busy(wanted=6)
    engine.settle()
    engine.settle(REPORT_SECONDS)
    assert engine.agent.may_grow
    assert engine.is_calm


def test_it_does_not_before_it_has_had_a_turn() -> None:
    assert not Engine().is_calm


def test_it_does_not_while_an_order_is_on_its_way(working: Engine) -> None:
    working.allow(5, target=4)
    working.turn()
    assert isinstance(working.links[0].unanswered[0], Retire)
    assert not working.is_calm


def test_it_does_not_where_a_rank_has_something_to_say(working: Engine) -> None:
    working.allow(7)
    assert not working.is_calm


def test_it_does_not_while_it_owes(working: Engine) -> None:
    working.blocks.use(10)
    working.allow(5, target=1)
    working.settle()
    working.settle(REPORT_SECONDS)
    assert not working.is_calm


def test_it_does_not_while_growth_is_held_back() -> None:
    engine = Engine()
    engine.settle()
    engine.busy(wanted=30)
    engine.turn()
    engine.links[0].answer("the driver refuses")
    engine.settle(REPORT_SECONDS)
    assert not engine.is_calm
    engine.settle(FAILURE_BACKOFF_SECONDS)
    engine.settle(REPORT_SECONDS)
    assert engine.is_calm


def test_it_does_not_before_neighbours_know_that_work_has_begun_or_ended() -> None:
    engine = Engine()
    engine.settle()
    assert engine.is_calm
    engine.busy(wanted=3)
    assert not engine.is_calm
    engine.settle(REPORT_SECONDS)
    assert engine.is_calm
    engine.idle()
    assert not engine.is_calm


def test_it_does_not_before_neighbours_know_of_much_more_demand(working: Engine) -> None:
    assert working.is_calm
    working.busy(wanted=100)
    assert not working.is_calm
    working.settle()
    assert working.reports[-1].unmet_extents == 21
    assert working.is_calm


def test_an_engine_that_starts_waits_for_its_first_block_so_long() -> None:
    engine = Engine(allowed=0)
    engine.turn()
    assert not engine.agent.await_first_blocks(0.01)
    engine.allow(1)
    engine.settle()
    assert engine.agent.await_first_blocks(0.01)


# --- giving back ------------------------------------------------------------------------------------------------------


def test_what_is_owed_leaves_clean_extents_first_then_the_least_recently_used() -> None:
    engine = Engine()
    engine.fill_cache(8)
    engine.fill_cache(8)
    engine.busy(40)
    engine.settle()
    engine.idle()
    order = []
    for target in range(engine.num_resident - 1, 0, -1):
        before = set(engine.blocks.resident_ids())
        cached = [block // BLOCKS_PER_EXTENT for block in engine.blocks.cached]
        engine.allow(20, target=target)
        engine.settle()
        [left] = before - set(engine.blocks.resident_ids())
        order.append(cached.index(left) if left in cached else -1)
    assert order.count(-1) > 0
    assert order == sorted(order)[: order.count(-1)] + sorted(order)[order.count(-1) :]
    assert engine.num_resident == 1


def test_an_idle_engine_that_owes_everything_keeps_its_null_block_and_asks_for_nothing() -> None:
    engine = Engine()
    engine.fill_cache(30)
    engine.allow(20, target=0)
    engine.settle()
    assert engine.blocks.resident_ids() == [0]
    sent = len(orders_of(engine.links[0]))
    engine.allow(1, target=1)
    for _ in range(10):
        engine.settle(QUIET_SECONDS)
    assert len(orders_of(engine.links[0])) == sent
    assert engine.reports[-1] == Report(1, 0, 0, 0, busy=False)


def test_what_is_owed_does_not_touch_the_cache_floor() -> None:
    engine = Engine(cache_floor=10)
    engine.fill_cache(31)
    engine.allow(20, target=0)
    engine.settle()
    assert 10 <= engine.blocks.num_cached_blocks < 10 + 2 * BLOCKS_PER_EXTENT


def test_a_retirement_waits_for_the_step_scheduled_last() -> None:
    engine = Engine()
    engine.fill_cache(16)
    engine.scheduler.step = 41
    engine.allow(20, target=0)
    engine.turn()
    [retire] = engine.links[0].unanswered
    assert isinstance(retire, Retire)
    assert retire.after_step == 41
    assert retire.block_ranges == ((4, 20),)


def test_requests_keep_their_blocks_unless_the_target_binds() -> None:
    engine = Engine()
    engine.busy(16)
    engine.settle()
    engine.blocks.use(16)
    engine.allow(20, target=1)
    engine.settle()
    assert engine.blocks.debt_blocks == 0
    assert engine.blocks.num_used_blocks == 16


def test_nothing_grows_while_something_is_owed_and_neighbours_hear_of_it() -> None:
    """Else the same extents would be unmapped and mapped in turn, until the ledger knows of the demand."""
    engine = Engine()
    engine.settle()
    engine.allow(20, target=0)
    engine.settle()
    engine.busy(16)
    engine.turn()
    assert engine.links[0].unanswered == []
    assert engine.reports[-1].unmet_extents > 0
    engine.allow(20, target=20)
    engine.settle()
    assert engine.blocks.num_clean_blocks >= 16


def test_a_target_that_binds_puts_blocks_into_debt_until_it_is_met() -> None:
    engine = Engine()
    engine.busy(16)
    engine.settle()
    used = engine.blocks.use(16)
    engine.allow(2, target=2, ceiling=2, must=True)
    engine.settle()
    assert engine.blocks.debt_blocks == (engine.num_resident - 2) * BLOCKS_PER_EXTENT
    assert engine.blocks.num_free_blocks == 0
    engine.blocks.free(used[4:], cached=True)  # the engine preempts
    engine.settle()
    assert engine.num_resident == 2
    engine.turn()
    assert engine.blocks.debt_blocks == 0


def test_debt_ends_when_the_ceiling_is_raised_again() -> None:
    engine = Engine()
    engine.busy(16)
    engine.settle()
    engine.blocks.use(16)
    engine.allow(20, target=2, ceiling=2, must=True)
    engine.settle()
    assert engine.blocks.debt_blocks > 0
    engine.allow(20)
    engine.settle()
    assert engine.blocks.debt_blocks == 0


def test_the_lock_is_held_for_about_a_millisecond() -> None:
    """However much is owed; the rest leaves at the next turns."""

    class SlowBlocks(NaiveBlocks):
        def take_idle(self, *, cached: bool) -> int | None:
            engine.clock.seconds += HOLD_SECONDS / 4
            return super().take_idle(cached=cached)

    engine = Engine(num_extents=200)
    engine.fill_cache(400)
    engine.blocks.__class__ = SlowBlocks
    engine.allow(200, target=0)
    engine.turn()
    first = orders_of(engine.links[0])[-1]
    assert isinstance(first, Retire)
    assert 0 < sum(stop - start for start, stop in first.block_ranges) <= 4 * BLOCKS_PER_EXTENT
    assert engine.agent.statistics.longest_hold_seconds == pytest.approx(HOLD_SECONDS)
    engine.settle(turns=200)
    assert engine.num_resident == 1


# --- no surplus -------------------------------------------------------------------------------------------------------


def test_a_surplus_leaves_after_a_quiet_moment_and_the_standing_blocks_stay() -> None:
    engine = Engine(standing=3)
    engine.busy(40)
    engine.settle()
    engine.idle()
    engine.settle(QUIET_SECONDS / 2)
    assert engine.num_resident > 10
    engine.settle(QUIET_SECONDS)
    assert engine.blocks.resident_ids() == [0]


def test_an_idle_engine_keeps_no_more_than_the_extent_of_its_null_block() -> None:
    engine = Engine(standing=10)
    engine.busy(40)
    engine.settle()
    assert engine.num_resident > 10
    engine.idle()
    engine.settle(2 * QUIET_SECONDS)
    assert engine.blocks.resident_ids() == [0]


def test_a_busy_engine_keeps_one_extent_more_than_it_wants() -> None:
    engine = Engine()
    engine.busy(40)
    engine.settle()
    engine.busy(8)
    engine.settle(2 * QUIET_SECONDS)
    assert 8 + BLOCKS_PER_EXTENT <= engine.blocks.num_clean_blocks < 8 + 2 * BLOCKS_PER_EXTENT
    sent = len(orders_of(engine.links[0]))
    for wanted in (8, 9, 8, 11, 8):
        engine.busy(wanted)
        engine.settle(2 * QUIET_SECONDS)
    assert len(orders_of(engine.links[0])) == sent


def test_cached_content_stays_as_long_as_nobody_asks_for_it() -> None:
    engine = Engine()
    engine.fill_cache(32)
    for _ in range(20):
        engine.settle(1.0)
    assert engine.blocks.num_cached_blocks == 32


def test_a_cache_that_was_reset_goes_back_without_a_request() -> None:
    engine = Engine()
    engine.fill_cache(32)
    engine.blocks.clean.update(engine.blocks.cached)
    engine.blocks.cached.clear()
    engine.settle(2 * QUIET_SECONDS)
    assert engine.blocks.resident_ids() == [0]


@pytest.mark.parametrize("ceiling", [0, 1, BLOCKS_PER_EXTENT, 3 * BLOCKS_PER_EXTENT])
def test_a_cache_ceiling_holds_when_quiet_from_nothing_to_several_extents(ceiling: int) -> None:
    """V7: from less than a block on, caching itself stays on; the pinned extent's free blocks are there anyway."""
    engine = Engine(cache_ceiling=ceiling)
    engine.fill_cache(40)
    engine.settle(2 * QUIET_SECONDS)
    assert engine.blocks.num_cached_blocks <= max(ceiling, BLOCKS_PER_EXTENT - 1)
    sent = len(orders_of(engine.links[0]))
    for _ in range(10):
        engine.settle(QUIET_SECONDS)
    assert len(orders_of(engine.links[0])) == sent
    engine.fill_cache(40)


def test_a_cache_ceiling_bounds_what_is_resident_where_content_is_scattered() -> None:
    """V3: one cached block in each extent holds the extent. Resident is within 1.5x of the bound, and one extent."""
    engine = Engine(cache_ceiling=12)
    engine.busy(72)
    engine.settle()
    blocks = engine.blocks.use(72)
    scattered = blocks[::6]
    engine.blocks.free(sorted(set(blocks) - set(scattered)), cached=False)
    engine.blocks.free(scattered, cached=True)
    engine.idle()
    for _ in range(5):
        engine.settle(QUIET_SECONDS)
    assert engine.num_resident * BLOCKS_PER_EXTENT <= 1.5 * 12 + BLOCKS_PER_EXTENT


# --- saying -----------------------------------------------------------------------------------------------------------


def test_unmet_demand_that_appears_ends_or_soars_is_said_at_once_and_the_rest_ten_times_a_second() -> None:
    engine = Engine(allowed=2)
    engine.settle()
    engine.busy(3)
    engine.settle(REPORT_SECONDS)
    count = len(engine.reports)
    engine.busy(40)
    engine.settle()
    assert engine.reports[-1].unmet_extents == 9
    engine.busy(48)
    engine.settle()
    assert engine.reports[-1].unmet_extents == 9
    engine.busy(80)
    engine.settle()
    assert engine.reports[-1].unmet_extents == 18
    engine.busy(1)
    engine.settle()
    assert engine.reports[-1].unmet_extents == 0
    assert len(engine.reports) == count + 3
    for wanted in (2, 3, 4, 5, 6, 7):
        engine.busy(wanted)
        engine.settle(REPORT_SECONDS / 7)
    assert len(engine.reports) <= count + 4


def test_a_report_counts_what_is_there_and_what_is_wanted_in_extents() -> None:
    engine = Engine()
    engine.fill_cache(16)
    engine.settle(REPORT_SECONDS)
    assert engine.reports[-1] == Report(
        demand_extents=1,
        unmet_extents=0,
        free_extents=0,
        cached_extents=engine.blocks.num_idle_cached_extents,
        busy=False,
    )
    engine.busy(8)
    engine.settle(REPORT_SECONDS)
    assert engine.reports[-1].busy
    assert engine.reports[-1].demand_extents == engine.num_resident + -(-(8 - engine.blocks.num_clean_blocks) // 4)


def test_an_idle_engine_without_its_first_extent_demands_it() -> None:
    """A demand of nothing would be a fair share of nothing: it would never get the extent, whatever its floor."""
    engine = Engine(allowed=0)
    engine.settle()
    assert engine.reports[-1] == Report(1, 1, 0, 0, busy=False)


def test_nothing_beyond_the_own_ceiling_is_asked_of_neighbours() -> None:
    engine = Engine()
    engine.allow(20, ceiling=2)
    engine.busy(40)
    engine.settle()
    assert engine.reports[-1].unmet_extents == 0


def test_the_usage_that_metrics_show_is_a_share_of_what_can_be_had() -> None:
    engine = Engine()
    engine.allow(12, ceiling=8)
    engine.settle()
    assert engine.blocks.attainable_extents == 8
    engine.allow(5, ceiling=8)
    engine.settle()
    assert engine.blocks.attainable_extents == 5


# --- the thread -------------------------------------------------------------------------------------------------------


def test_the_thread_works_while_the_engine_does_nothing() -> None:
    engine = Engine()
    engine.agent = Agent(engine.blocks, engine.links, engine.scheduler, engine.lock, Policy(3))
    engine.agent.start()
    engine.allow(20)
    _until(lambda: bool(engine.links[0].unanswered))
    engine.links[0].answer()
    _until(lambda: engine.blocks.num_free_blocks == 3)
    engine.agent.stop()
    engine.agent.stop()
    assert not engine.agent.is_alive()
    assert engine.links[0].closed


def test_an_agent_that_cannot_go_on_ends_its_process_and_says_why() -> None:
    """The engine would otherwise serve on with blocks that nobody maps any more."""
    program = (
        "import threading, time\n"
        "from kvcached_core.agent import Agent, Policy\n"
        "from kvcached_core.orders import Ack\n"
        "from tests.core.naive_engine import *\n"
        "link = ScriptedLink(0)\n"
        "Agent(NaiveBlocks(4, 4), [link], NaiveScheduler(), threading.RLock(), Policy(3)).start()\n"
        "link.say(Ack(99))\n"
        "time.sleep(30)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 70
    assert "kvcached's agent cannot go on, so this engine process ends: KeyError(99)" in done.stderr


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "not within 20 s"
        time.sleep(0.005)


# --- everything at once -----------------------------------------------------------------------------------------------


class AgentAmongRanks(RuleBasedStateMachine):
    """Requests come and go, ranks answer late, fail, and change what they allow: nothing is lost or promised twice."""

    @initialize(num_ranks=st.integers(1, 3), cache_ceiling=st.none() | st.integers(0, 20), floor=st.integers(0, 8))
    def start(self, num_ranks: int, cache_ceiling: int | None, floor: int) -> None:
        self.engine = Engine(
            num_extents=12, num_ranks=num_ranks, cache_ceiling=cache_ceiling, cache_floor=floor, allowed=12
        )
        self.mapped: list[set[int]] = [set() for _ in range(num_ranks)]
        self.requests: list[list[int]] = []

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.5, 3.0]))
    def turn(self, seconds: float) -> None:
        self.engine.scheduler.step += 1
        self.engine.turn(seconds)

    @rule(wanted=st.integers(0, 60), busy=st.booleans())
    def demand(self, wanted: int, busy: bool) -> None:
        self.engine.scheduler.wanted, self.engine.scheduler.is_busy = wanted, busy

    @rule(count=st.integers(1, 20))
    def take(self, count: int) -> None:
        self.requests.append(self.engine.blocks.use(count))

    @precondition(lambda self: self.requests)
    @rule(cached=st.booleans(), data=st.data())
    def finish(self, cached: bool, data: st.DataObject) -> None:
        blocks = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.engine.blocks.free(blocks, cached=cached)

    @rule(
        data=st.data(),
        may_hold=st.integers(0, 12),
        owed=st.integers(0, 12),
        ceiling=st.integers(0, 12),
        must=st.booleans(),
    )
    def change_standing(self, data: st.DataObject, may_hold: int, owed: int, ceiling: int, must: bool) -> None:
        link = data.draw(st.sampled_from(self.engine.links))
        held = len(self.mapped[link.rank]) // BLOCKS_PER_EXTENT
        link.allow(max(held, may_hold), target=max(0, held - owed), ceiling=ceiling, must=must)

    @rule(data=st.data(), outcome=st.sampled_from(["done", "done", "failed", "short"]))
    def answer(self, data: st.DataObject, outcome: str) -> None:
        link = data.draw(st.sampled_from(self.engine.links))
        if not link.unanswered:
            return
        order = link.unanswered.pop(data.draw(st.integers(0, len(link.unanswered) - 1)))
        blocks = {block for start, stop in order.block_ranges for block in range(start, stop)}
        mapped = self.mapped[link.rank]
        if isinstance(order, Map):
            assert not mapped & blocks, "an order to map what is mapped"
            if outcome != "done":
                link.say(Ack(order.seq, outcome, shortage=outcome == "short"))
                return
            mapped |= blocks
        else:
            assert blocks <= mapped, "an order to unmap what is not mapped"
            assert not blocks & self.engine.blocks.used, "an order to unmap what a request uses"
            mapped -= blocks
        link.say(Ack(order.seq))

    @invariant()
    def every_block_that_the_engine_may_use_is_mapped_on_every_rank(self) -> None:
        blocks = self.engine.blocks
        promised = blocks.clean | set(blocks.cached) | blocks.used
        assert all(promised <= mapped for mapped in self.mapped)

    @invariant()
    def what_is_mapped_and_not_the_engines_is_under_way(self) -> None:
        pool = self.engine.blocks.extents
        for mapped in self.mapped:
            for extent_id in {block // BLOCKS_PER_EXTENT for block in mapped}:
                assert pool.state(extent_id) is not Residency.ABSENT

    def teardown(self) -> None:
        """Once everybody answers and nobody is pressed, everything that is wanted comes."""
        if not hasattr(self, "engine"):
            return
        for link in self.engine.links:
            link.allow(12)
        self.engine.busy(8)
        for _ in range(20):
            while any(link.unanswered for link in self.engine.links):
                for link in self.engine.links:
                    if link.unanswered:
                        self._carry_out(link)
            self.engine.turn(FAILURE_BACKOFF_SECONDS)
        pool = self.engine.blocks.extents
        assert pool.num_quarantined == 0
        assert pool.num_moving == 0
        assert self.engine.blocks.num_clean_blocks >= 8 or pool.room == 0
        self.every_block_that_the_engine_may_use_is_mapped_on_every_rank()

    def _carry_out(self, link: ScriptedLink) -> None:
        order = link.answer()
        blocks = {block for start, stop in order.block_ranges for block in range(start, stop)}
        if isinstance(order, Map):
            self.mapped[link.rank] |= blocks
        else:
            self.mapped[link.rank] -= blocks


TestAgentAmongRanks = AgentAmongRanks.TestCase
