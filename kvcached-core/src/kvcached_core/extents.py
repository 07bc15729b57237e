"""Which extents are resident, which move, how many more may come, and which are fullest."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator
from enum import IntEnum

from kvcached_core.errors import InvariantError


class Residency(IntEnum):
    """The state of one extent; it is in exactly one."""

    ABSENT = 0
    """Nothing is mapped; it may be taken to grow into."""
    MAPPING = 1
    """An order to map it is under way."""
    RESIDENT = 2
    """Mapped on every rank; its blocks are the engine's."""
    RETIRING = 3
    """Out of use; an order to unmap it is under way, behind a fence."""
    QUARANTINED = 4
    """An order for it went unanswered: nobody knows what is mapped until the answer comes."""


class ExtentPool:
    """The residency of every extent of one arena, and the ceiling on it.

    Every extent starts ABSENT, also a pinned one: there is one way to become resident, through an order
    that every rank has acknowledged. Steps are ``take_absent`` -> ``arrived`` -> ``retire`` ->
    ``departed``; ``abandoned`` undoes the first. A step from any other state is an ``InvariantError``,
    and then nothing has changed.

    Attributes:
        ceiling: Extents that may be resident, moving or quarantined at once. It may be lowered below
            use; then ``room`` is 0 until enough has departed.

    Not thread-safe: the owner's lock covers it.
    """

    def __init__(self, num_extents: int, *, pinned: Iterable[int] = ()) -> None:
        """All extents absent; those in ``pinned`` will never retire once they are resident."""
        self._states = bytearray(num_extents)
        self._counts = [num_extents, 0, 0, 0, 0]
        self._pinned = frozenset(pinned)
        self._before_quarantine: dict[int, Residency] = {}
        # Absent extents: those that were resident before, as a heap, and all from `_fresh` on. Every id
        # in the heap is below `_fresh`, so the heap's first is the lowest of all.
        self._returned: list[int] = []
        self._fresh = 0
        self.ceiling = num_extents

    @property
    def num_extents(self) -> int:
        """All extents, whatever their state."""
        return len(self._states)

    @property
    def num_resident(self) -> int:
        """Extents whose blocks the engine may use."""
        return self._counts[Residency.RESIDENT]

    @property
    def num_moving(self) -> int:
        """Extents that an order is under way for: being mapped or waiting to be unmapped."""
        return self._counts[Residency.MAPPING] + self._counts[Residency.RETIRING]

    @property
    def num_absent(self) -> int:
        """Extents that hold no memory."""
        return self._counts[Residency.ABSENT]

    @property
    def num_quarantined(self) -> int:
        """Extents whose order went unanswered. They count against the ceiling: they may hold memory."""
        return self._counts[Residency.QUARANTINED]

    @property
    def room(self) -> int:
        """How many extents ``take_absent`` may give now."""
        return max(0, min(self.num_absent, self.ceiling - (self.num_extents - self.num_absent)))

    def state(self, extent_id: int) -> Residency:
        """The state of one extent."""
        return Residency(self._states[extent_id])

    def take_absent(self, num_extents: int) -> list[int]:
        """Choose extents to map, lowest ids first: ABSENT -> MAPPING.

        Low ids first keeps resident extents together, so that pages which straddle extents are shared.

        Raises:
            InvariantError: More than ``room`` asked for.
        """
        if not 0 <= num_extents <= self.room:
            raise InvariantError(f"{num_extents} extents taken with room for {self.room}: {self!r}")
        taken = [heapq.heappop(self._returned) for _ in range(min(num_extents, len(self._returned)))]
        fresh = num_extents - len(taken)
        taken.extend(range(self._fresh, self._fresh + fresh))
        self._fresh += fresh
        self._move(taken, Residency.ABSENT, Residency.MAPPING)
        return taken

    def arrived(self, extent_ids: Iterable[int]) -> None:
        """Every rank has mapped them: MAPPING -> RESIDENT."""
        self._move(extent_ids, Residency.MAPPING, Residency.RESIDENT)

    def abandoned(self, extent_ids: Iterable[int]) -> None:
        """No rank holds them: the map failed everywhere, or has been undone: MAPPING -> ABSENT."""
        self._give_up(extent_ids, Residency.MAPPING)

    def retire(self, extent_ids: Iterable[int]) -> None:
        """Take extents out of use: RESIDENT -> RETIRING.

        Raises:
            InvariantError: One is pinned or not resident. Nothing was retired.
        """
        ids = list(extent_ids)
        if pinned := self._pinned.intersection(ids):
            raise InvariantError(f"Pinned extents {sorted(pinned)} never retire: {self!r}")
        self._move(ids, Residency.RESIDENT, Residency.RETIRING)

    def departed(self, extent_ids: Iterable[int]) -> None:
        """Every rank has unmapped them: RETIRING -> ABSENT."""
        self._give_up(extent_ids, Residency.RETIRING)

    def quarantine(self, extent_ids: Iterable[int]) -> None:
        """Their order went unanswered: MAPPING or RETIRING -> QUARANTINED."""
        ids = list(extent_ids)
        before = {extent_id: self.state(extent_id) for extent_id in ids}
        self._check(ids, Residency.MAPPING, Residency.RETIRING)
        for extent_id in ids:
            self._set(extent_id, Residency.QUARANTINED)
        self._before_quarantine.update(before)

    def restore(self, extent_ids: Iterable[int]) -> None:
        """The answer came late: QUARANTINED -> the state before."""
        ids = list(extent_ids)
        self._check(ids, Residency.QUARANTINED)
        for extent_id in ids:
            self._set(extent_id, self._before_quarantine.pop(extent_id))

    def __repr__(self) -> str:
        counts = ", ".join(f"{self._counts[state]} {state.name.lower()}" for state in Residency)
        return f"<ExtentPool of {self.num_extents}, ceiling {self.ceiling}: {counts}>"

    def _give_up(self, extent_ids: Iterable[int], source: Residency) -> None:
        ids = list(extent_ids)
        self._move(ids, source, Residency.ABSENT)
        for extent_id in ids:
            heapq.heappush(self._returned, extent_id)

    def _move(self, extent_ids: Iterable[int], source: Residency, target: Residency) -> None:
        ids = list(extent_ids)
        self._check(ids, source)
        for extent_id in ids:
            self._set(extent_id, target)

    def _check(self, extent_ids: list[int], *sources: Residency) -> None:
        if len(set(extent_ids)) != len(extent_ids):
            raise InvariantError(f"Extents named twice: {extent_ids}")
        for extent_id in extent_ids:
            if not 0 <= extent_id < self.num_extents or self._states[extent_id] not in sources:
                expected = " or ".join(source.name for source in sources)
                raise InvariantError(f"Extent {extent_id} is {self._name(extent_id)}, not {expected}: {self!r}")

    def _name(self, extent_id: int) -> str:
        return self.state(extent_id).name if 0 <= extent_id < self.num_extents else "unknown"

    def _set(self, extent_id: int, state: Residency) -> None:
        self._counts[self._states[extent_id]] -= 1
        self._states[extent_id] = state
        self._counts[state] += 1


class ExtentLists:
    """Numbered lists of extents, each extent in at most one; every step is O(1).

    Lists are linked through two arrays, so an extent costs 12 bytes, and a bit per list says which ones
    are not empty, so the highest such list is found without looking at the others.
    """

    def __init__(self, num_extents: int, num_lists: int) -> None:
        self._heads = num_extents
        ends = range(num_extents, num_extents + num_lists)
        self._next = array("i", [-1] * num_extents)
        self._next.extend(ends)
        self._previous = array("i", self._next)
        self._list_of = array("i", [-1] * num_extents)
        self._lengths = [0] * num_lists
        self._occupied = 0

    def put(self, extent_id: int, list_id: int) -> None:
        """Make an extent the last of a list, unless it is in that list already."""
        if self._list_of[extent_id] == list_id:
            return
        self.discard(extent_id)
        end = self._heads + list_id
        last = self._previous[end]
        self._next[last] = self._previous[end] = extent_id
        self._previous[extent_id] = last
        self._next[extent_id] = end
        self._list_of[extent_id] = list_id
        self._lengths[list_id] += 1
        self._occupied |= 1 << list_id

    def discard(self, extent_id: int) -> None:
        """Take an extent out of its list, if it is in one."""
        list_id = self._list_of[extent_id]
        if list_id < 0:
            return
        before, after = self._previous[extent_id], self._next[extent_id]
        self._next[before] = after
        self._previous[after] = before
        self._list_of[extent_id] = -1
        self._lengths[list_id] -= 1
        if not self._lengths[list_id]:
            self._occupied ^= 1 << list_id

    def length(self, list_id: int) -> int:
        """Extents in one list."""
        return self._lengths[list_id]

    def first(self, list_id: int) -> int:
        """The extent that has been in a list for longest; the list must not be empty."""
        return self._next[self._heads + list_id]

    def highest(self) -> int:
        """The highest list that is not empty, or -1."""
        return self._occupied.bit_length() - 1

    def walk(self, list_id: int) -> Iterator[int]:
        """The extents of one list, longest there first; the list must not change meanwhile."""
        end = self._heads + list_id
        extent_id = self._next[end]
        while extent_id != end:
            yield extent_id
            extent_id = self._next[extent_id]
