"""Giving back: what the ledger wants, and what nobody needs. Busy or idle, at the tick.

An extent leaves only whole and with every page free, and its memory only behind a fence: SGLang frees pages that a
forward pass in flight may still write, which stream order makes harmless for SGLang, but unmapping has no stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcached_core.orders import Ack, Retire

from kvcached_sglang.agreement import Agreed
from kvcached_sglang.demand import Demand
from kvcached_sglang.mapper import Order
from kvcached_sglang.space import Departure, Space

QUIET_MS = 300
"""No shortage for this long: surplus may go."""
OWED_PAUSE_MS = 20
SURPLUS_PAUSE_MS = 500
"""After a look for extents to trim that found none. Looking waits for the device."""
MAX_EXTENTS_PER_ORDER = 64
SCATTERED = 1.5
"""Memory of what is cached in an idle engine, at most, as a multiple of the cache's ceiling."""


class Cache(Protocol):
    """The prefix cache, in tokens of one space (`cache.TreeCache`)."""

    def evictable(self, space: Space) -> int:
        """Tokens cached that no running request uses."""

    def evict(self, space: Space, num_tokens: int) -> int:
        """Evict the least recently used; returns tokens evicted."""


@dataclass(frozen=True)
class CachePolicy:
    """Bounds on cached content, in bytes of all pools.

    Attributes:
        floor_bytes: Stays when neighbours need memory.
        ceiling_bytes: Stays when nobody does; None: all.
    """

    floor_bytes: int = 0
    ceiling_bytes: int | None = None


class Trimmer:
    """Chooses extents to give back, for one rank, from agreed numbers.

    Args:
        spaces: The id spaces of the model.
        cache: The prefix cache.
        policy: What of it is kept.
        give: Hands an order to the rank.
        next_seq: A sequence number for an order.
    """

    def __init__(
        self,
        spaces: Sequence[Space],
        cache: Cache,
        policy: CachePolicy,
        give: Callable[[Order], None],
        next_seq: Callable[[], int],
    ) -> None:
        self.retired_extents = 0
        self.evicted_tokens = 0
        self._spaces = spaces
        self._cache = cache
        self._policy = policy
        self._give = give
        self._next_seq = next_seq
        self._owed_paused_until_ms = 0
        self._surplus_paused_until_ms = 0

    def trim(self, agreed: Agreed, demand: Demand, short_at_ms: int, step: int) -> int:
        """Give back what is owed and, after a quiet moment, what is surplus.

        Args:
            short_at_ms: When something was short last.
            step: The last that was launched.

        Returns:
            Bytes still owed, of which nothing is free or may be evicted.
        """
        owed = agreed.owed_bytes - sum(space.retiring_bytes for space in self._spaces)
        for space in self._spaces:
            owed -= self._give_owed(space, owed, agreed, demand, step)
        if agreed.now_ms >= max(short_at_ms + QUIET_MS, self._surplus_paused_until_ms):
            given = sum(self._give_surplus(space, demand, step) for space in self._spaces)
            self._surplus_paused_until_ms = agreed.now_ms + (0 if given else SURPLUS_PAUSE_MS)
        return max(0, owed)

    @property
    def under_way(self) -> bool:
        """Whether any extent is on its way out."""
        return any(space.departures for space in self._spaces)

    @property
    def makes_room(self) -> bool:
        """Whether extents of one space are leaving for another's sake."""
        return any(departure.makes_room for space in self._spaces for departure in space.departures)

    def make_room(self, space: Space, num_bytes: int, keep_tokens: int, step: int) -> int:
        """Give back so much of a space, free and cached, that another space of this engine needs.

        Returns:
            Bytes that leave; less if that would leave fewer than ``keep_tokens`` free.
        """
        if num_bytes <= 0:
            return 0
        num_extents = -(-num_bytes // space.extent_bytes)
        return self._trim_space(space, num_extents, keep_tokens, step, evict=True, makes_room=True)

    def give_all(self, space: Space, step: int) -> None:
        """Give back every extent but the pinned one; every page is free."""
        self._retire(space, self._idle(space, keep_tokens=0), step)

    def hear(self, ack: Ack) -> bool:
        """Note an answer.

        Returns:
            Whether it was one to an order of ours.
        """
        for space in self._spaces:
            for departure in space.departures:
                if departure.seq == ack.seq:
                    departure.answered = True
                    return True
        return False

    @staticmethod
    def answered(space: Space) -> int:
        """How many of a space's departures are answered here, up to the first that is not."""
        count = 0
        for departure in space.departures:
            if not departure.answered:
                break
            count += 1
        return count

    @staticmethod
    def settle(space: Space, num_departed: int) -> None:
        """So many departures are answered everywhere: their extents may be taken anew."""
        for _ in range(num_departed):
            space.extents.departed(space.departures.popleft().extent_ids)

    def _give_owed(self, space: Space, owed_bytes: int, agreed: Agreed, demand: Demand, step: int) -> int:
        num_owed = -(-owed_bytes // space.extent_bytes)
        if num_owed <= 0 or agreed.now_ms < self._owed_paused_until_ms:
            return 0
        # A prompt that is half prefilled was promised what is cached, too.
        given = self._trim_space(space, num_owed, space.kept_tokens(demand), step, evict=not demand.pledged)
        if not given:
            self._owed_paused_until_ms = agreed.now_ms + OWED_PAUSE_MS
        return given

    def _trim_space(
        self, space: Space, num_extents: int, keep_tokens: int, step: int, *, evict: bool, makes_room: bool = False
    ) -> int:
        """Give back so many extents, cached ones too or not, as far as so much stays free. Returns their bytes."""
        space.free_list.concentrate()
        idle = self._evict_for(space, num_extents, keep_tokens) if evict else self._idle(space, keep_tokens=keep_tokens)
        leaving = idle[: min(num_extents, MAX_EXTENTS_PER_ORDER)]
        self._retire(space, leaving, step, makes_room=makes_room)
        return len(leaving) * space.extent_bytes

    def _evict_for(self, space: Space, num_extents: int, keep_tokens: int) -> list[int]:
        """Evict cached content until enough extents are idle, or the cache is at its floor. Returns those idle."""
        floor = self._tokens(self._policy.floor_bytes, space)
        idle = self._idle(space, keep_tokens=keep_tokens)
        while len(idle) < num_extents:
            tokens = min((num_extents - len(idle)) * space.extent_tokens, self._cache.evictable(space) - floor)
            evicted = self._cache.evict(space, tokens) if tokens > 0 else 0
            if evicted <= 0:
                break
            self.evicted_tokens += evicted
            idle = self._idle(space, keep_tokens=keep_tokens)
        return idle

    def _give_surplus(self, space: Space, demand: Demand, step: int) -> int:
        if self._policy.ceiling_bytes is not None:
            most = self._tokens(self._policy.ceiling_bytes, space)
            over = self._cache.evictable(space) - most
            if over > 0:
                self.evicted_tokens += self._cache.evict(space, over)
            if not demand.busy:
                # What is least recently used lies anywhere, so that every extent may hold a little of what is left.
                most_extents = max(1, int(most * SCATTERED) // space.extent_tokens)
                if space.extents.num_resident > most_extents:
                    self._evict_for(space, space.extents.num_resident - most_extents, keep_tokens=0)
        # One extent more than what is kept ahead stays while the engine is busy: growing back at once would cost more
        # than it saves.
        keep = space.ahead_tokens(demand) + (space.extent_tokens if demand.busy else 0)
        spare = (space.free_tokens - keep) // space.extent_tokens
        if spare <= 0:
            return 0
        return self._trim_space(space, spare, keep, step, evict=False)

    def _idle(self, space: Space, *, keep_tokens: int) -> list[int]:
        """Resident extents all of whose pages are free, highest first, as far as so much stays free. Waits for the
        device."""
        most = max(0, (space.free_tokens - keep_tokens) // space.extent_tokens)
        free_per_extent = space.free_list.free_per_extent()
        idle = [
            extent
            for extent in range(len(free_per_extent) - 1, -1, -1)
            if free_per_extent[extent] == len(space.geometry.blocks_of(extent))
        ]
        return idle[:most]

    def _retire(self, space: Space, extent_ids: list[int], step: int, *, makes_room: bool = False) -> None:
        if not extent_ids:
            return
        space.free_list.remove(extent_ids)
        space.leave(extent_ids)
        departure = Departure(self._next_seq(), extent_ids, makes_room)
        space.departures.append(departure)
        self.retired_extents += len(extent_ids)
        self._give(Retire(departure.seq, space.orders(extent_ids), after_step=step))

    def _tokens(self, num_bytes: int, space: Space) -> int:
        """Tokens of this space that so many bytes of cached content are, were all spaces cached alike."""
        return int(num_bytes * space.extent_tokens / (space.extent_bytes * len(self._spaces)))
