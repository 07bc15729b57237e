"""The background thread that decides how much of an engine's KV cache is resident.

It lives beside the engine's scheduler and works while the engine is blocked, so that an idle engine gives memory
back too. A scheduling step adds only what `Agent.await_blocks` does, which is O(1).

Policy, in this order:

1. **Grow ahead of demand.** A standing amount of clean free blocks plus what the engine says its next steps take.
   Large steps under load. What the ledger does not grant is reported as unmet demand, so that neighbours trim.
2. **Give back what is owed** (more is resident than the ledger's target): extents that are free, then cached ones,
   least recently used first, down to the cache floor. Only where the target binds (a lowered ceiling, a neighbour's
   floor): put the blocks into debt, so that the engine runs short and preempts by its own rules.
3. **Keep no surplus.** Clean extents beyond the target leave after a quiet moment; cached ones beyond the cache
   ceiling too. Cached content that nobody asks for stays.

At the ceiling, or idle, cached blocks satisfy the target, since the engine evicts them by itself; an unmet target
never blocks trimming.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvcached_core.extents import ExtentPool
from kvcached_core.orders import (
    TICK_SECONDS,
    Ack,
    FromRank,
    Link,
    Map,
    Report,
    Retire,
    Standing,
    ToRank,
    Undo,
)
from kvcached_core.wake import Alarm

log = logging.getLogger(__name__)

WAIT_SECONDS = 0.005
"""The longest that one scheduling step waits for blocks on their way."""
HOLD_SECONDS = 0.001
"""How long the agent holds the engine's lock at a time, at most about."""
ANSWER_SECONDS = 2.0
"""A rank that owes an answer and says nothing for so long is named once; the order's extents are quarantined until
the answer comes."""
QUIET_SECONDS = 0.3
"""No shortage for this long: surplus may go."""
SHORTAGE_BACKOFF_SECONDS = 0.02
FAILURE_BACKOFF_SECONDS = 1.0
REPORT_SECONDS = 0.1
CALM_SECONDS = 0.5
"""The longest that the agent of an engine at work takes no turn, though nothing calls for one."""
MAX_EXTENTS_PER_ORDER = 64
MAX_ORDERS = 4


class Blocks(Protocol):
    """The engine's free blocks, over extents that come and go. Covered by the engine's lock."""

    extents: ExtentPool
    blocks_per_extent: int
    attainable_extents: int
    debt_blocks: int

    @property
    def num_free_blocks(self) -> int: ...
    @property
    def num_clean_blocks(self) -> int: ...
    @property
    def num_cached_blocks(self) -> int: ...
    @property
    def num_idle_clean_extents(self) -> int: ...
    @property
    def num_idle_cached_extents(self) -> int: ...
    def block_ranges(self, extent_ids: Iterable[int]) -> list[range]: ...
    def take_absent(self, num_extents: int) -> list[int]: ...
    def arrived(self, extent_ids: Iterable[int]) -> None: ...
    def abandoned(self, extent_ids: Iterable[int]) -> None: ...
    def departed(self, extent_ids: Iterable[int]) -> None: ...
    def take_idle(self, *, cached: bool) -> int | None: ...


class Engine(Protocol):
    """What the agent asks of the scheduler; called with the lock held, each in O(1)."""

    def wanted_blocks(self) -> int:
        """Free blocks that the next steps would take: for what runs and for the prompts waiting."""

    def busy(self) -> bool:
        """Whether anything runs or waits."""

    def last_step(self) -> int:
        """Number of the step scheduled last."""


@dataclass(frozen=True)
class Policy:
    """What is kept.

    Attributes:
        standing_blocks: Clean free blocks kept resident, if the ledger grants them.
        cache_floor_blocks: Cached blocks that stay when neighbours need memory.
        cache_ceiling_blocks: Cached blocks that stay when nobody does; None: all.
    """

    standing_blocks: int
    cache_floor_blocks: int = 0
    cache_ceiling_blocks: int | None = None


@dataclass(frozen=True)
class AgentStatistics:
    """What the agent has done since it started."""

    turns: int = 0
    mapped_extents: int = 0
    retired_extents: int = 0
    failed_orders: int = 0
    overdue_orders: int = 0
    waits: int = 0
    waits_timed_out: int = 0
    waited_seconds: float = 0.0
    longest_hold_seconds: float = 0.0
    longest_answer_seconds: float = 0.0
    peak_resident_extents: int = 0


@dataclass
class _Pending:
    """An order on its way, and who has answered."""

    order: Map | Retire | Undo
    extents: list[int]
    unanswered: set[int]
    sent_at: float = 0.0
    done_by: set[int] = field(default_factory=set)
    quarantined: bool = False


class Agent(threading.Thread):
    """Maps ahead of demand and trims, for one engine over all its ranks.

    Args:
        blocks: The engine's free blocks.
        links: One for each rank.
        engine: The scheduler.
        lock: Held by every method of the engine that changes its block lists. Re-entrant.
        policy: What is kept.
        now: A monotonic clock.
        alarm: What the thread sleeps by; its own one where none is given.

    Attributes:
        may_grow: Whether extents were on their way, or could be ordered, at the last turn. If not, waiting and kicks
            are of no use; an attribute, so that a step of an engine that holds all it may costs next to nothing.
    """

    def __init__(
        self,
        blocks: Blocks,
        links: Sequence[Link],
        engine: Engine,
        lock: threading.RLock,
        policy: Policy,
        *,
        now: Callable[[], float] = time.monotonic,
        alarm: Alarm | None = None,
    ) -> None:
        super().__init__(name="kvcached-agent", daemon=True)
        self.policy = policy
        self._blocks = blocks
        self._links = list(links)
        self._engine = engine
        self._lock = lock
        self._grown = threading.Condition(lock)
        self._now = now
        self._alarm = Alarm(TICK_SECONDS, now=now) if alarm is None else alarm
        self._kicked = False  # and not heard yet
        self.may_grow = True
        self._stopping = False
        self._seq = 0
        self._pending: dict[int, _Pending] = {}
        self._mapping_extents = 0
        self._standings: dict[int, Standing] = {}
        self._heard_at: dict[int, float] = {}
        self._short_at = self._now()
        self._growth_held_until = 0.0
        self._gave_up_after = -1
        self._report: Report | None = None
        self._reported_at = 0.0
        self._short_blocks_seen = 0
        self._calm_until = 0.0
        self._gone_ranks: set[int] = set()
        self.statistics = AgentStatistics()

    def kick(self) -> None:
        """Demand has changed: look at once. Any thread."""
        if not self._kicked:
            self._kicked = True
            self._alarm.ring()

    def note_step(self) -> None:
        """A step is scheduled: no turn is needed for now, if a turn would find nothing new. With the lock held."""
        self._alarm.snooze(self._is_calm)

    def stop(self) -> None:
        """End the thread and close the links. Idempotent. Not with the lock held."""
        self._stopping = True
        self.kick()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(2.0)
        if not self.is_alive() or threading.current_thread() is self:  # else it may be in a call on a link
            for link in self._links:
                link.close()

    @property
    def ceiling_extents(self) -> int:
        """Extents that the ceiling allows which is set, also those that others' floors take from it now."""
        ceilings = [standing.ceiling_extents + standing.yielded_extents for standing in self._standings.values()]
        return min([*ceilings, self._blocks.extents.num_extents])

    def await_blocks(self, num_blocks: int, wait_seconds: float = WAIT_SECONDS) -> bool:
        """Wait until so many blocks are clean, if waiting can help. With the lock held, which the wait releases.

        Cached blocks are free too, but taking them while memory is to be had would keep the prefix cache from ever
        growing. After a time-out it does not wait again until something has been mapped: a shortage is paid for once.

        Returns:
            Whether so many are free, cached ones included.
        """
        if self._num_spendable_blocks >= num_blocks or not self._waiting_helps():
            return self._blocks.num_free_blocks >= num_blocks
        start = self._now()
        deadline = start + wait_seconds
        self.kick()
        while self._num_spendable_blocks < num_blocks and self._waiting_helps():
            left = deadline - self._now()
            if left <= 0:
                self._gave_up_after = self.statistics.mapped_extents
                break
            self._grown.wait(left)
        enough = self._blocks.num_free_blocks >= num_blocks
        self._note(waits=1, waits_timed_out=int(not enough), waited_seconds=self._now() - start)
        return enough

    def await_growth(self, wait_seconds: float) -> None:
        """Wait until anything has been mapped, so long at most. With the lock held, which the wait releases."""
        self._grown.wait(wait_seconds)

    def await_first_blocks(self, wait_seconds: float) -> bool:
        """Wait until any block is free, when the engine starts. Not with the lock held.

        Returns:
            Whether one is.
        """
        with self._lock:
            return self._grown.wait_for(lambda: self._blocks.num_free_blocks > 0, wait_seconds)

    def run(self) -> None:
        try:
            while not self._stopping:
                self._sleep()
                self.turn()
        except BaseException as error:
            log.critical("kvcached's agent cannot go on, so this engine process ends: %r", error, exc_info=error)
            os._exit(70)

    def turn(self) -> None:
        """Hear the ranks, decide under the lock, then give orders without it: a direct call maps right there.

        The thread does nothing else, again and again; a test may do it instead of starting the thread.
        """
        heard = [(link.rank, message) for link in self._links if not link.closed for message in link.receive()]
        self._say_lost_ranks()
        with self._lock:
            start = self._now()
            orders = [undo for rank, message in heard for undo in self._hear(rank, message)]
            self._quarantine_overdue(start)
            orders.extend(self._plan(start))
            report = self._changed_report(start)
            self.may_grow = self._growth_possible()
            self._calm_until = 0.0 if self._is_at_work() else start + CALM_SECONDS
            self._note(turns=1, longest_hold_seconds=self._now() - start)
        for pending in orders:
            self._give(pending)
        if report is not None:
            self._send(report, [link.rank for link in self._links])

    def _sleep(self) -> None:
        self._alarm.sleep([link.fileno() for link in self._links if not link.closed])
        self._kicked = False

    # Hearing

    def _hear(self, rank: int, message: FromRank) -> Iterator[_Pending]:
        self._heard_at[rank] = self._now()
        if isinstance(message, Standing):
            self._standings[rank] = message
            self._apply_standings()
        elif isinstance(message, Ack):
            yield from self._hear_ack(rank, message)

    def _hear_ack(self, rank: int, ack: Ack) -> Iterator[_Pending]:
        pending = self._pending[ack.seq]
        pending.unanswered.discard(rank)
        if ack.error:
            self._hold_growth(rank, ack)
        else:
            pending.done_by.add(rank)
        if pending.unanswered:
            return
        del self._pending[ack.seq]
        if pending.quarantined:
            self._blocks.extents.restore(pending.extents)
            log.warning("order %d was answered after all; its %d extents are back", ack.seq, len(pending.extents))
        self._note(longest_answer_seconds=self._now() - pending.sent_at)
        yield from self._finish(pending)

    def _finish(self, pending: _Pending) -> Iterator[_Pending]:
        if isinstance(pending.order, Retire):
            self._blocks.departed(pending.extents)
        elif isinstance(pending.order, Undo):
            self._blocks.abandoned(pending.extents)
        else:
            self._mapping_extents -= len(pending.extents)
            if len(pending.done_by) == len(self._links):
                self._blocks.arrived(pending.extents)
                self._note(mapped_extents=len(pending.extents))
                self._grown.notify_all()
            else:
                self._note(failed_orders=1)
                yield from self._take_back(pending)

    def _take_back(self, pending: _Pending) -> Iterator[_Pending]:
        """Some rank could not map: those that did unmap again, then the extents may be taken anew."""
        if pending.done_by:
            yield self._order(Undo(self._next_seq(), self._ranges(pending.extents)), pending.extents, pending.done_by)
        else:
            self._blocks.abandoned(pending.extents)

    def _hold_growth(self, rank: int, ack: Ack) -> None:
        pause = SHORTAGE_BACKOFF_SECONDS if ack.shortage else FAILURE_BACKOFF_SECONDS
        self._growth_held_until = self._now() + pause
        log.log(
            logging.DEBUG if ack.shortage else logging.ERROR,
            "rank %d did not map order %d: %s; growth pauses for %.2f s", rank, ack.seq, ack.error, pause,
        )  # fmt: skip

    def _apply_standings(self) -> None:
        extents = self._blocks.extents
        ceiling = min(standing.ceiling_extents for standing in self._standings.values())
        extents.ceiling = max(0, min(ceiling, extents.num_extents))
        self._blocks.attainable_extents = max(extents.num_resident, min(self._may_hold, extents.ceiling))

    def _say_lost_ranks(self) -> None:
        for link in self._links:
            if link.closed and link.rank not in self._gone_ranks:
                self._gone_ranks.add(link.rank)
                if link.lost:
                    log.error("rank %d is lost (%s): this engine cannot grow any more", link.rank, link.lost)

    def _quarantine_overdue(self, now: float) -> None:
        for pending in self._pending.values():
            if not pending.quarantined and self._silence(pending, now) > ANSWER_SECONDS:
                pending.quarantined = True
                self._blocks.extents.quarantine(pending.extents)
                self._note(overdue_orders=1)
                log.error(
                    "rank %s has not answered order %d (%s of %d extents) for %.1f s; growth stops until it does",
                    ", ".join(map(str, sorted(pending.unanswered))), pending.order.seq,
                    type(pending.order).__name__, len(pending.extents), self._silence(pending, now),
                )  # fmt: skip

    def _silence(self, pending: _Pending, now: float) -> float:
        """Seconds since the quietest of the ranks that owe an answer said anything, or since it was asked.

        Not the age of the order: what retires waits for the step in flight, however long that takes.
        """
        heard_at = min(self._heard_at.get(rank, 0.0) for rank in pending.unanswered)
        return now - max(pending.sent_at, heard_at)

    # Deciding

    @property
    def _may_hold(self) -> int:
        """Extents that every rank's ledger lets us hold now; 0 until all have said."""
        if len(self._standings) < len(self._links):
            return 0
        return min(standing.may_hold_extents for standing in self._standings.values())

    @property
    def _stuck(self) -> bool:
        return bool(self._gone_ranks) or any(pending.quarantined for pending in self._pending.values())

    @property
    def _num_held(self) -> int:
        return self._blocks.extents.num_extents - self._blocks.extents.num_absent

    @property
    def _growable(self) -> int:
        """Extents that could be mapped now; none while some are owed, which would go and come in turn."""
        if self._num_owed > 0:
            return 0
        return max(0, min(self._blocks.extents.room, self._may_hold - self._num_held))

    def _growth_possible(self) -> bool:
        """Whether extents are on their way or could be ordered now."""
        if self._stuck:
            return False
        return self._mapping_extents > 0 or (self._growable > 0 and self._now() >= self._growth_held_until)

    def _is_at_work(self) -> bool:
        """Whether the next turn has something to do even if nothing changes until then."""
        held_back = self._short_blocks_seen > 0 and self._growable > 0
        return bool(self._pending) or held_back or self._num_owed > 0

    def _is_calm(self) -> bool:
        """Whether a turn now would find nothing that it did not find the last time. O(1)."""
        if self._now() >= self._calm_until or self._report is None or self._report.busy != self._engine.busy():
            return False
        # An engine that may grow kicks where it runs short. One that may not would never say that it wants more.
        if not self.may_grow and _is_news(max(0, self._short_blocks()), self._short_blocks_seen):
            return False
        return all(link.is_calm for link in self._links)

    def _waiting_helps(self) -> bool:
        return self.statistics.mapped_extents != self._gave_up_after and self._growth_possible()

    def _plan(self, now: float) -> list[_Pending]:
        orders = []
        short = self._short_blocks()
        self._short_blocks_seen = max(0, short)
        if short > 0:
            self._short_at = now
            growth = self._grow(short, now)
            if growth is not None:
                orders.append(growth)
        leaving = self._choose_leaving(now)
        if leaving:
            self._note(retired_extents=len(leaving))
            retire = Retire(self._next_seq(), self._ranges(leaving), after_step=self._engine.last_step())
            orders.append(self._order(retire, leaving))
        return orders

    def _target_blocks(self) -> int:
        """Clean free blocks to have. An idle engine keeps the extent of its null block, which stays anyway."""
        if not self._engine.busy():
            return min(self.policy.standing_blocks, max(1, self._blocks.blocks_per_extent - 1))
        return max(self.policy.standing_blocks, self._engine.wanted_blocks())

    @property
    def _num_spendable_blocks(self) -> int:
        """Free blocks that hold nothing worth keeping: clean, or cached beyond the cache ceiling."""
        blocks, ceiling = self._blocks, self.policy.cache_ceiling_blocks
        return blocks.num_clean_blocks + (0 if ceiling is None else max(0, blocks.num_cached_blocks - ceiling))

    def _short_blocks(self) -> int:
        """Blocks missing from the target; all cached ones count where the engine is idle."""
        blocks = self._blocks
        coming = self._mapping_extents * blocks.blocks_per_extent
        if self._engine.busy():
            return self._target_blocks() - self._num_spendable_blocks - coming
        return self._target_blocks() - blocks.num_clean_blocks - blocks.num_cached_blocks - coming

    def _grow(self, short_blocks: int, now: float) -> _Pending | None:
        if self._stuck or now < self._growth_held_until or len(self._pending) >= MAX_ORDERS:
            return None
        wanted = -(-short_blocks // self._blocks.blocks_per_extent)
        step = self._blocks.extents.num_resident // 8 if self._engine.busy() else 0
        num_extents = min(max(wanted, step), MAX_EXTENTS_PER_ORDER, self._growable)
        if num_extents <= 0:
            return None
        taken = self._blocks.take_absent(num_extents)
        self._mapping_extents += num_extents
        return self._order(Map(self._next_seq(), self._ranges(taken)), taken)

    def _choose_leaving(self, now: float) -> list[int]:
        """Extents to retire now, as many as the lock may be held for."""
        leaving: list[int] = []
        if self._stuck:
            return leaving
        deadline = now + HOLD_SECONDS
        while len(leaving) < MAX_EXTENTS_PER_ORDER and self._now() < deadline:
            extent = self._next_leaving(now)
            if extent is None:
                break
            leaving.append(extent)
        self._set_debt()
        return leaving

    def _next_leaving(self, now: float) -> int | None:
        blocks, policy = self._blocks, self.policy
        if self._num_owed > 0:
            extent = blocks.take_idle(cached=False)
            # An extent less of cached blocks at most; without a floor there is nothing to keep.
            left = max(0, blocks.num_cached_blocks - blocks.blocks_per_extent)
            if extent is None and left >= policy.cache_floor_blocks:
                extent = blocks.take_idle(cached=True)
            return extent
        if now - self._short_at > QUIET_SECONDS:
            # One extent more than the target stays: growing back at once would cost more than it saves.
            if blocks.num_clean_blocks >= self._target_blocks() + 2 * blocks.blocks_per_extent or self._idle_surplus():
                extent = blocks.take_idle(cached=False)
                if extent is not None:
                    return extent
            if self._cache_is_over():
                return blocks.take_idle(cached=True)
        return None

    def _cache_is_over(self) -> bool:
        """More is cached than the ceiling, or what an idle engine has cached holds half as many blocks again."""
        blocks, ceiling = self._blocks, self.policy.cache_ceiling_blocks
        if ceiling is None:
            return False
        held = blocks.num_idle_cached_extents * blocks.blocks_per_extent
        scattered = not self._engine.busy() and 2 * held > max(3 * ceiling, 2 * blocks.blocks_per_extent)
        return blocks.num_cached_blocks > ceiling or scattered

    def _idle_surplus(self) -> bool:
        """Idle, and without one more clean extent the target is still met."""
        blocks = self._blocks
        if self._engine.busy():
            return False
        return blocks.num_clean_blocks + blocks.num_cached_blocks - blocks.blocks_per_extent >= self._target_blocks()

    @property
    def _num_owed(self) -> int:
        """Resident extents beyond what the ledger lets us keep."""
        if not self._standings:
            return 0
        target = min(standing.target_extents for standing in self._standings.values())
        return self._blocks.extents.num_resident - target

    def _set_debt(self) -> None:
        must = any(standing.must for standing in self._standings.values())
        debt = max(0, self._num_owed) * self._blocks.blocks_per_extent if must else 0
        if debt != self._blocks.debt_blocks:
            self._blocks.debt_blocks = debt

    # Saying

    def _changed_report(self, now: float) -> Report | None:
        """What the ledger should know of us, if that has changed. At once where unmet demand appears, ends or soars."""
        report, last = self._make_report(), self._report
        urgent = last is None or _is_news(report.unmet_extents, last.unmet_extents)
        if report == self._report or not (urgent or now - self._reported_at >= REPORT_SECONDS):
            return None
        self._report, self._reported_at = report, now
        return report

    def _make_report(self) -> Report:
        blocks, busy = self._blocks, self._engine.busy()
        short = max(0, self._short_blocks())
        # Blocks that requests hold, and the pinned ones: a lease has to reach for both.
        resident = blocks.extents.num_resident * blocks.blocks_per_extent
        used = resident - blocks.num_clean_blocks - blocks.num_cached_blocks
        used += self._target_blocks() + blocks.num_cached_blocks if busy else short
        unmet = -(-short // blocks.blocks_per_extent) - self._growable
        return Report(
            demand_extents=-(-used // blocks.blocks_per_extent),
            unmet_extents=max(0, min(unmet, blocks.extents.room)),
            free_extents=blocks.num_idle_clean_extents,
            cached_extents=blocks.num_idle_cached_extents,
            busy=busy,
        )

    def _order(self, order: Map | Retire | Undo, extents: list[int], ranks: Iterable[int] | None = None) -> _Pending:
        """Note an order; it is given once the lock is released."""
        unanswered = set(ranks) if ranks is not None else {link.rank for link in self._links}
        pending = _Pending(order, extents, unanswered, self._now())
        self._pending[order.seq] = pending
        return pending

    def _give(self, pending: _Pending) -> None:
        pending.sent_at = self._now()
        self._send(pending.order, pending.unanswered)

    def _send(self, message: ToRank, ranks: Iterable[int]) -> None:
        for link in self._links:
            if link.rank in ranks and not link.closed:
                link.send(message)

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _ranges(self, extents: Iterable[int]) -> tuple[tuple[int, int], ...]:
        return tuple((blocks.start, blocks.stop) for blocks in self._blocks.block_ranges(extents))

    def _note(self, *, longest_hold_seconds: float = 0.0, longest_answer_seconds: float = 0.0, **added: float) -> None:
        old = self.statistics
        self.statistics = replace(
            old,
            longest_hold_seconds=max(old.longest_hold_seconds, longest_hold_seconds),
            longest_answer_seconds=max(old.longest_answer_seconds, longest_answer_seconds),
            peak_resident_extents=max(old.peak_resident_extents, self._blocks.extents.num_resident),
            **{name: getattr(old, name) + number for name, number in added.items()},
        )


def _is_news(unmet: int, said: int) -> bool:
    """Whether neighbours should not wait to hear of it. A rise by half: so that a burst is a few reports, not many."""
    return (unmet > 0) != (said > 0) or 2 * unmet > 3 * said
