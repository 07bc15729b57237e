"""What happens before every batch: extents join the free lists, growth is ordered, and what is owed or idle leaves.

All ranks of a tensor-parallel group take the same decisions, since each follows from numbers that are the same on all
of them: free pages, requests, the count of ticks, and what was agreed last. What is a rank's own (its ledger, how far
its orders have got) goes through the agreement first. With one rank that costs nothing and happens whenever there are
news; with several it happens every `AGREEMENT_TICKS` ticks, and at once where the scheduler runs short and growing
may help.

Policy:

1. Keep free what the next step can take at most, and some steps ahead (`demand.py`); grow in large steps.
2. Beyond that, let admission count on what the ledger would grant (``credit_tokens``), only while what is resident
   covers the next step: the engine admits as with a large pool, and no allocation depends on memory that may not
   come.
3. Give back what is owed: free extents, then cached ones through the tree's own eviction, down to the cache floor.
   Where it must be (a lowered ceiling, a neighbour's floor), put the spaces into debt: the engine retracts by its own
   rules.
4. After a quiet moment, give back free extents that nothing needs. Cached content stays unless it exceeds its
   ceiling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcached_core.orders import Ack, Report

from kvcached_sglang.agreement import NO_LIMIT, Agreed, Agreement
from kvcached_sglang.demand import IDLE, Demand
from kvcached_sglang.growth import Grower
from kvcached_sglang.mapper import Allowance, Order
from kvcached_sglang.space import Outcome, Space
from kvcached_sglang.starvation import Starvation
from kvcached_sglang.trimming import Cache, CachePolicy, Trimmer

log = logging.getLogger(__name__)

AGREEMENT_TICKS = 16
"""Ticks between the agreements of several ranks while nothing is short."""
POLL_SECONDS = 0.005
"""How often a waiting tick agrees anew."""
UNDER_WAY_SECONDS = 0.5
"""How long a tick waits at most for growth on its way when the next step would be short. It takes a few milliseconds,
unless the mapper gets no processor; SGLang would evict cached content instead, which costs a prefill later."""
NEIGHBOUR_SECONDS = 0.1
"""How long it waits for a neighbour to trim before running requests are retracted: prefilling one anew costs more."""
LAST_RESORT_SECONDS = 10.0
"""How long where SGLang would end a request, or itself: a single request left, or a prompt that is half prefilled."""
REPORT_SECONDS = 0.1
STEADY_SECONDS = 0.5
"""The same while the engine works and its demand is about what it last said: the mapper wakes up for each report, and
takes the interpreter from the scheduler (``kvcached_core.wake``)."""
IDLE_SECONDS = 0.002
"""How long an idle tick sleeps at most while memory is being given back: the longest a request waits for it that comes
in just then."""


class Hands(Protocol):
    """What carries orders out (`mapper.Mapper`)."""

    @property
    def has_news(self) -> bool: ...
    def send(self, order: Order) -> None: ...
    def take(self) -> list[Ack | Allowance]: ...
    def wait(self, seconds: float) -> bool: ...
    def note_step(self, step: int, streams: Sequence[int]) -> None: ...


@dataclass
class Statistics:
    """What the tick has done since the start, on this rank."""

    agreements: int = 0
    waits: int = 0
    waited_seconds: float = 0.0
    mapped_extents: int = 0
    failed_orders: int = 0
    retired_extents: int = 0
    evicted_tokens: int = 0


class Ticker:
    """Decides for one rank, in step with the others of its group.

    Args:
        spaces: The id spaces of the model.
        hands: Carry the orders out.
        agreement: Over the group that schedules the same batches.
        cache: The prefix cache.
        policy: What of it is kept.
        extent_bytes: What the rank counts an extent as, in reports.
        chunk_tokens: What one step allocates of a prompt at most.
        attainable_bytes: What the rank's device leaves for its KV cache were it alone, whatever its ceiling.
        now: A monotonic clock, the same for all processes of a host.
    """

    def __init__(
        self,
        spaces: Sequence[Space],
        hands: Hands,
        agreement: Agreement,
        cache: Cache,
        policy: CachePolicy,
        *,
        extent_bytes: int,
        chunk_tokens: int = NO_LIMIT,
        attainable_bytes: int = NO_LIMIT,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spaces = list(spaces)
        self._hands = hands
        self._agreement = agreement
        self._cache = cache
        self._extent_bytes = extent_bytes
        self._chunk_tokens = chunk_tokens
        self._attainable_bytes = attainable_bytes
        self._now = now
        self._grower = Grower(self._spaces, hands.send, self._next_seq)
        self._trimmer = Trimmer(self._spaces, cache, policy, hands.send, self._next_seq)
        self._seq = 0
        self._step = 0
        self._agreed = Agreed()
        self._starvation = Starvation(lambda: self._agreed.now_ms / 1000)
        self._agreed_step = 0
        self._allowance = Allowance(0, 0, NO_LIMIT, must=False)
        self._demand = IDLE
        self._stalled = False  # short of what is kept ahead, and nothing could be ordered
        self._stuck = False  # the same of the next step
        self._short_at_ms = 0
        self._debt_bytes = 0
        self._report: Report | None = None
        self._reported_at = 0.0
        self._waits = 0
        self._waited_seconds = 0.0
        for space in self._spaces:
            space.supply = self._supply
            space.cleared = self._trim_cleared

    def tick(self, demand: Demand, streams: Sequence[int] = ()) -> None:
        """Before a batch is chosen. Everything launched so far is on these streams."""
        self._step += 1
        self._demand = demand
        self._hands.note_step(self._step, streams)
        if self._due():
            self._agree()
            self._grow()
            self._await_step()
            self._trim()
        self._set_credit()
        self._note_starvation()
        if self._trimmer.under_way and not demand.busy:
            # SGLang's idle loop never sleeps, and each driver call of the hands waits for a turn of it until it has the
            # interpreter back: 260 us a call on a CPU, where the call itself took 7.
            self._hands.wait(IDLE_SECONDS)

    @property
    def growable_bytes(self) -> int:
        """How much more the ledgers would have granted at the last agreement, less what is on its way."""
        return max(0, self._agreed.growable_bytes - self._grower.under_way_bytes)

    @property
    def ceiling_tokens(self) -> int:
        """Tokens that a prompt may take at most, agreed; the virtual capacity while nothing limits it.

        Sliding-window attention keeps a window and a chunk of a prompt, however long it is.
        """
        windows = [space for space in self._spaces if space.window_tokens is not None]
        [full] = [space for space in self._spaces if space.window_tokens is None]
        left_bytes = self._agreed.ceiling_bytes - sum(self._window_bytes(space) for space in windows)
        left_tokens = left_bytes // full.extent_bytes * full.extent_tokens - full.tokens_per_block  # one is padding
        return max(0, min(left_tokens, full.num_usable_tokens))

    def _window_bytes(self, space: Space) -> int:
        """Of the extents that one prompt holds at most in a space of windows."""
        held = space.prompt_tokens(space.num_usable_tokens, self._chunk_tokens) + space.tokens_per_block
        return -(-held // space.extent_tokens) * space.extent_bytes

    @property
    def starves(self) -> bool:
        """Whether nothing has run for long, on any rank, because the first request finds no room."""
        return self._starvation.is_long

    @property
    def statistics(self) -> Statistics:
        """What has been done since the start."""
        return Statistics(
            agreements=self._agreement.count,
            waits=self._waits,
            waited_seconds=self._waited_seconds,
            mapped_extents=self._grower.mapped_extents,
            failed_orders=self._grower.failed_orders,
            retired_extents=self._trimmer.retired_extents,
            evicted_tokens=self._trimmer.evicted_tokens,
        )

    # When to agree: from numbers that are the same on every rank, or alone

    def _due(self) -> bool:
        if self._step - self._agreed_step >= AGREEMENT_TICKS:
            return True
        if self._agreement.alone and self._hands.has_news:
            return True
        # Once for each kind of shortage: what was tried in vain is not tried at every tick.
        if not self._stuck and self._is_short(Space.step_tokens):
            return True
        return not self._stalled and self._is_short(Space.ahead_tokens)

    def _is_short(self, needs: Callable[[Space, Demand], int]) -> bool:
        return any(space.free_tokens < needs(space, self._demand) for space in self._spaces)

    # Agreeing

    def _agree(self) -> None:
        for message in self._hands.take():
            self._hear(message)
        allowance = self._allowance
        own = [
            int(self._now() * 1000),
            allowance.growable_bytes,
            -allowance.owed_bytes,
            -int(allowance.must),
            min(allowance.ceiling_bytes, self._attainable_bytes),
        ]
        for space in self._spaces:
            own.append(int(space.growth.outcome if space.growth else Outcome.DONE))
            own.append(self._trimmer.answered(space))
        now_ms, growable, owed, must, ceiling, *rest = self._agreement.least(own)
        self._agreed = Agreed(now_ms, growable, -owed, bool(must), ceiling)
        self._agreed_step = self._step
        for space, outcome, num_departed in zip(self._spaces, rest[::2], rest[1::2], strict=True):
            self._grower.settle(space, Outcome(outcome), self._agreed)
            self._trimmer.settle(space, num_departed)
        self._tell()

    def _hear(self, message: Ack | Allowance) -> None:
        if isinstance(message, Allowance):
            self._allowance = message
        elif not self._grower.hear(message):
            self._trimmer.hear(message)

    # Growing

    def _grow(self) -> None:
        """Order what is short: first what the next step needs, then, while it computes, what is kept ahead.

        What one of several spaces lacks comes before all that: another would take the memory.
        """
        lacking = self._lacking()
        if lacking:
            self._rebalance(lacking)
        else:
            for space in self._spaces:
                self._grow_space(space)
        if self._is_short(Space.ahead_tokens):
            self._short_at_ms = self._agreed.now_ms
        in_vain = not self._grower.under_way and not self._trimmer.makes_room
        self._stalled = in_vain and self._is_short(Space.ahead_tokens)
        self._stuck = in_vain and self._is_short(Space.step_tokens)

    def _grow_space(self, space: Space) -> None:
        step, ahead = space.step_tokens(self._demand), space.ahead_tokens(self._demand)
        if space.free_tokens < step:
            self._grower.order(space, step, self.growable_bytes, self._agreed)
        elif space.free_tokens < ahead:
            larger = space.extents.num_resident // 8 * space.extent_tokens if self._demand.running else 0
            self._grower.order(space, max(ahead, space.free_tokens + larger), self.growable_bytes, self._agreed)

    def _rebalance(self, lacking: Sequence[Space]) -> None:
        """Let these grow; what the ledger does not grant comes from the others, as far as they can spare it.

        All are under one ceiling, and which of them needs how much of it changes with the requests.
        """
        for space in lacking:
            self._grower.order(space, self._needed_tokens(space), self.growable_bytes, self._agreed)
        for space in lacking:
            if space.growth is not None:
                continue
            num_extents = -(-self._lacking_tokens(space) // space.extent_tokens)
            num_bytes = num_extents * space.worst_extent_bytes - self.growable_bytes
            num_bytes -= sum(each.retiring_bytes for each in self._spaces)
            for other in self._spaces:
                if other is not space:
                    num_bytes -= self._trimmer.make_room(other, num_bytes, self._needed_tokens(other), self._step)

    def _lacking(self) -> list[Space]:
        """Of several spaces, those that have less than they need."""
        return [space for space in self._spaces if len(self._spaces) > 1 and self._lacking_tokens(space) > 0]

    def _lacking_tokens(self, space: Space) -> int:
        """What a space has too little of for what it needs, with all that is cached."""
        return self._needed_tokens(space) - space.free_tokens - self._cache.evictable(space)

    def _needed_tokens(self, space: Space) -> int:
        """What has been admitted needs of a space, and where nothing has, the first request."""
        demand = self._demand
        first = 0 if demand.running or demand.pledged else space.prompt_tokens(demand.head_prompt, self._chunk_tokens)
        return min(space.kept_tokens(demand) + first, space.num_usable_tokens)

    def _await_step(self) -> None:
        """If the next step would be short, wait for what is on its way, and for neighbours where requests would
        suffer."""
        if not self._is_short(Space.step_tokens):
            return
        began_ms, began = self._agreed.now_ms, self._now()
        while self._is_short(Space.step_tokens) and self._agreed.now_ms - began_ms < self._patience() * 1000:
            self._hands.wait(POLL_SECONDS)
            self._agree()
            self._grow()
        self._waits += 1
        self._waited_seconds += self._now() - began

    def _patience(self) -> float:
        """How long the next step may be held up."""
        if not self._may_still_grow():
            return 0.0
        if self._cache_covers(self._demand.pledged + self._demand.decode):
            return UNDER_WAY_SECONDS if self._grower.under_way else 0.0
        return LAST_RESORT_SECONDS if self._demand.pledged or self._demand.running == 1 else NEIGHBOUR_SECONDS

    def _may_still_grow(self) -> bool:
        if self._trimmer.makes_room:
            return True
        held = sum(space.held_bytes for space in self._spaces)
        smallest = min(space.extent_bytes for space in self._spaces)
        return held + smallest <= self._agreed.ceiling_bytes and any(space.extents.num_absent for space in self._spaces)

    def _cache_covers(self, num_tokens: int) -> bool:
        """Whether evicting cached content would free so much, which SGLang does by itself."""
        return all(
            space.free_tokens + self._cache.evictable(space) >= min(num_tokens, space.num_usable_tokens)
            for space in self._spaces
        )

    def _supply(self, space: Space, num_blocks: int) -> None:
        """An allocation is about to find too few pages, which the bound on a step should have prevented: do what can
        be done.

        Every rank is in the same allocation, so they may agree here.
        """
        wanted = num_blocks * space.tokens_per_block
        began_ms, tried = self._agreed.now_ms, False
        while space.free_tokens < wanted and (not tried or self._agreed.now_ms - began_ms < LAST_RESORT_SECONDS * 1000):
            if tried:
                self._hands.wait(POLL_SECONDS)
            self._agree()
            tried = True
            ordered = self._grower.order(space, wanted, self.growable_bytes, self._agreed)
            if not ordered and not self._grower.under_way and not self._may_still_grow():
                break

    # Giving back

    def _trim(self) -> None:
        owed = self._trimmer.trim(self._agreed, self._demand, self._short_at_ms, self._step)
        self._debt_bytes = owed if self._agreed.must else 0

    def _trim_cleared(self, space: Space) -> None:
        """The cache was flushed, on every rank: what it held goes at once. While SGLang is paused there is no tick."""
        self._trimmer.give_all(space, self._step)

    # What available_size adds to what is free

    def _set_credit(self) -> None:
        covered = not self._is_short(Space.step_tokens)
        growable = self.growable_bytes // len(self._spaces) if covered else 0
        for space in self._spaces:
            extents = min(space.extents.room, growable // space.extent_bytes)
            space.credit_tokens = extents * space.extent_tokens
            if self._debt_bytes:
                space.credit_tokens = -int(
                    self._debt_bytes / len(self._spaces) / space.extent_bytes * space.extent_tokens
                )
            elif self._demand.head_prompt and not self._demand.running:
                space.credit_tokens = max(space.credit_tokens, self._credit_for_first(space))

    def _credit_for_first(self, space: Space) -> int:
        """Nothing runs: let the first request in if its prompt finds room, whatever it may generate.

        What it may generate could exceed a ceiling that was set after SGLang clipped it to the virtual capacity; it
        would wait for ever. This lets in that request only.
        """
        prompt = space.prompt_tokens(self._demand.head_prompt, self._chunk_tokens)
        attainable = space.free_tokens + self._cache.evictable(space)
        if attainable < prompt:
            return 0
        if attainable > self._demand.head_total:
            return 0  # it gets in without
        # SGLang evicts only where too little is available, and what is lent here counts as available.
        if space.free_tokens < prompt:
            self._cache.evict(space, prompt - space.free_tokens)
        if space.free_tokens < prompt:
            return 0
        return max(0, self._demand.head_total + 1 - space.free_tokens - self._cache.evictable(space))

    def _note_starvation(self) -> None:
        """Say so if nothing runs for long because the first request finds no room."""
        demand = self._demand
        if not demand.waiting or demand.running or demand.pledged or not self._is_short(Space.step_tokens):
            self._starvation.ended()
            return
        first = demand.head_prompt or demand.prefill
        needs = [space.prompt_tokens(first, self._chunk_tokens) for space in self._spaces]
        needed, space = max(zip(needs, self._spaces, strict=True), key=lambda each: each[0] - each[1].free_tokens)
        self._starvation.goes_on(
            needed_tokens=needed,
            free_tokens=space.free_tokens,
            cached_tokens=self._cache.evictable(space),
            growable_bytes=self.growable_bytes,
        )

    # Saying

    def _tell(self) -> None:
        """Put into the ledger what this engine would use. Unmet demand at once, everything else now and then."""
        report, last = self._make_report(), self._report
        if report == last or self._now() - self._reported_at < _pause_seconds(report, last):
            return
        self._report, self._reported_at = report, self._now()
        self._hands.send(report)

    def _make_report(self) -> Report:
        busy = self._demand.busy
        used = cached = free = unmet = ahead = 0.0
        for space in self._spaces:
            bytes_per_token = space.extent_bytes / space.extent_tokens
            evictable = self._cache.evictable(space)
            resident = space.num_resident_blocks * space.tokens_per_block
            wanted = space.ahead_tokens(self._demand)
            free += space.free_tokens * bytes_per_token
            cached += evictable * bytes_per_token
            used += (resident - space.free_tokens - evictable) * bytes_per_token
            ahead += wanted * bytes_per_token
            unmet += max(0, wanted - space.free_tokens) * bytes_per_token
        demand = used + (ahead + cached if busy else 0)
        return Report(
            demand_extents=-int(-demand // self._extent_bytes),
            unmet_extents=-int(-max(0.0, unmet - self.growable_bytes) // self._extent_bytes),
            free_extents=int(free // self._extent_bytes),
            cached_extents=int(cached // self._extent_bytes),
            busy=busy,
        )

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq


def _pause_seconds(report: Report, last: Report | None) -> float:
    """How long after the last report this one may go."""
    if last is None or (report.unmet_extents > 0) != (last.unmet_extents > 0):
        return 0.0
    steady = report.busy and last.busy and 8 * abs(report.demand_extents - last.demand_extents) <= last.demand_extents
    return STEADY_SECONDS if steady else REPORT_SECONDS
