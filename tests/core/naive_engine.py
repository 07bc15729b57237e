"""An engine's blocks, scheduler and ranks as plain as they can be: what the agent is tried against."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvcached_core.extents import ExtentPool, Residency
from kvcached_core.geometry import extent_block_ranges
from kvcached_core.orders import Ack, FromRank, Map, Retire, Standing, ToRank, Undo
from kvcached_core.wake import Alarm

NULL_BLOCK = 0


class NaiveBlocks:
    """Free blocks as a set and an ordered one. Block 0 is never free, so its extent is pinned.

    Attributes:
        clean: Free, resident, without content.
        cached: Free, resident, with content; least recently used first.
        used: Held by requests.
    """

    def __init__(self, num_extents: int, blocks_per_extent: int) -> None:
        self.extents = ExtentPool(num_extents, pinned=[0])
        self.blocks_per_extent = blocks_per_extent
        self.attainable_extents = num_extents
        self.debt_blocks = 0
        self.clean: set[int] = set()
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.used: set[int] = set()

    # What an engine does

    def use(self, num_blocks: int) -> list[int]:
        """Take free blocks, clean ones first, as far as there are any beyond the debt."""
        taken = [*sorted(self.clean), *self.cached][: min(num_blocks, self.num_free_blocks)]
        for block in taken:
            self.clean.discard(block)
            self.cached.pop(block, None)
        self.used.update(taken)
        return taken

    def free(self, blocks: Iterable[int], *, cached: bool) -> None:
        for block in blocks:
            self.used.remove(block)
            if cached:
                self.cached[block] = None
            else:
                self.clean.add(block)

    # What the agent asks

    @property
    def num_free_blocks(self) -> int:
        return max(0, len(self.clean) + len(self.cached) - self.debt_blocks)

    @property
    def num_used_blocks(self) -> int:
        return len(self.used)

    @property
    def num_clean_blocks(self) -> int:
        return len(self.clean)

    @property
    def num_cached_blocks(self) -> int:
        return len(self.cached)

    @property
    def num_idle_clean_extents(self) -> int:
        return len(self._idle(cached=False))

    @property
    def num_idle_cached_extents(self) -> int:
        return len(self._idle(cached=True))

    def block_ranges(self, extent_ids: Iterable[int]) -> list[range]:
        num_blocks = self.extents.num_extents * self.blocks_per_extent
        return extent_block_ranges(extent_ids, num_blocks, self.blocks_per_extent)

    def take_absent(self, num_extents: int) -> list[int]:
        return self.extents.take_absent(num_extents)

    def arrived(self, extent_ids: Iterable[int]) -> None:
        ids = list(extent_ids)
        self.extents.arrived(ids)
        self.clean.update(block for extent_id in ids for block in self._blocks_of(extent_id) if block != NULL_BLOCK)

    def abandoned(self, extent_ids: Iterable[int]) -> None:
        self.extents.abandoned(extent_ids)

    def departed(self, extent_ids: Iterable[int]) -> None:
        self.extents.departed(extent_ids)

    def take_idle(self, *, cached: bool) -> int | None:
        idle = self._idle(cached=cached)
        if not idle:
            return None
        self.extents.retire(idle[:1])
        for block in self._blocks_of(idle[0]):
            self.clean.discard(block)
            self.cached.pop(block, None)
        return idle[0]

    def resident_ids(self) -> list[int]:
        return [each for each in range(self.extents.num_extents) if self.extents.state(each) is Residency.RESIDENT]

    def _idle(self, *, cached: bool) -> list[int]:
        """Extents with nothing in use; those with cached content by its age."""
        idle = [each for each in self.resident_ids() if each and not self.used.intersection(self._blocks_of(each))]
        if not cached:
            return [each for each in idle if not self.cached.keys() & set(self._blocks_of(each))]
        by_age = dict.fromkeys(block // self.blocks_per_extent for block in self.cached)
        return [each for each in by_age if each in idle]

    def _blocks_of(self, extent_id: int) -> range:
        return range(extent_id * self.blocks_per_extent, (extent_id + 1) * self.blocks_per_extent)


class NaiveScheduler:
    """Wants what a test says."""

    def __init__(self) -> None:
        self.wanted = 0
        self.is_busy = False
        self.step = 0

    def wanted_blocks(self) -> int:
        return self.wanted

    def busy(self) -> bool:
        return self.is_busy

    def last_step(self) -> int:
        return self.step


class HandAlarm(Alarm):
    """An alarm that wakes nobody: the test takes the thread's turns.

    Attributes:
        rings: How often it rang.
        snoozed: Whether all was calm when the engine's thread came by last.
    """

    def __init__(self) -> None:
        self.rings = 0
        self.snoozed = False

    def ring(self) -> None:
        self.rings += 1

    def snooze(self, is_calm: Callable[[], bool]) -> None:
        self.snoozed = is_calm()


class ScriptedLink:
    """A link to a rank that a test speaks for.

    Attributes:
        sent: Every order and report, in order.
        unanswered: Those that are to be answered and have not been.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.closed = False
        self.lost = ""
        self.sent: list[ToRank] = []
        self.unanswered: list[Map | Retire | Undo] = []
        self._said: list[FromRank] = []
        self._readable = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def is_calm(self) -> bool:
        return not self._said

    def fileno(self) -> int:
        return self._readable

    def send(self, message: ToRank) -> None:
        self.sent.append(message)
        if isinstance(message, (Map, Retire, Undo)):
            self.unanswered.append(message)

    def receive(self) -> list[FromRank]:
        said, self._said = self._said, []
        return said

    def close(self) -> None:
        self.closed = True

    def say(self, message: FromRank) -> None:
        self._said.append(message)
        os.eventfd_write(self._readable, 1)

    def lose(self, reason: str) -> None:
        self.closed, self.lost = True, reason

    def allow(self, extents: int, *, target: int | None = None, ceiling: int = 1000, must: bool = False) -> None:
        """The rank's ledger lets us hold so many, and asks for those beyond ``target`` back."""
        self.say(Standing(extents, extents if target is None else target, ceiling, must))

    def answer(self, error: str = "", *, shortage: bool = False) -> Map | Retire | Undo:
        """Answer the oldest order."""
        order = self.unanswered.pop(0)
        self.say(Ack(order.seq, error, shortage))
        return order
