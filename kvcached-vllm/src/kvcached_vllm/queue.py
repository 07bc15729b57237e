"""The free blocks of one vLLM block pool: only resident ones, concentrated into the fullest extents.

``ElasticFreeQueue`` keeps the contract of ``FreeKVCacheBlockQueue`` (the same in vLLM 0.30.0 to 0.34.0;
``contract.py`` lists it) and takes its place on one ``BlockPool`` instance. Prefix cache, hybrid
coordination and KV events stay vLLM's own.

vLLM prepends blocks without cached content, to be reused first, and appends blocks with it, to be reused
last. So free blocks are *clean* or *cached* by the end that they came in at, whatever happens to their
hash meanwhile: handing a block out evicts what it still has, and only the order would have differed.
(0.34 prepends cached blocks too, for a connector that keeps them elsewhere. It wants them reused first.)

Clean blocks are bits of one integer per extent: no object and no link per block, and a whole extent is
handed out as one slice. Cached blocks are in vLLM's own linked list, least recently used first.

A step only notes which blocks came and went. How many blocks of an extent are free, and which extents are
full or idle, is settled when somebody asks: the agent does at every turn, while the engine waits for its
device. In a step it would cost a microsecond per block, most of it for memory that is in no cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcached_core.errors import InvariantError
from kvcached_core.extents import ExtentLists, ExtentPool, Residency
from kvcached_core.geometry import extent_block_ranges
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_IDLE_CLEAN = 0
"""The list of extents all of whose blocks are free and clean: the last to be picked from."""

# Extents filed by blocks in use per step in debt, and when debt is set: 40 us and 0.6 ms.
_FILED_PER_STEP = 64
_FILED_AT_ONCE = 1024


class ElasticFreeQueue:
    """vLLM's free block queue over extents that come and go.

    Blocks are handed out clean ones first, from the extent with most blocks in use, so that the others
    drain; then cached ones, least recently used first. In debt, all of them from the fullest extents.

    No extent is resident at first. Those that hold blocks which are never free (the null block,
    attention sinks) are pinned: they never become idle, so they never retire.

    Attributes:
        extents: The residency of every extent; only this queue's methods step it.
        blocks_per_extent: Of every extent but a short last one.
        num_free_blocks: Blocks that vLLM may take now. A plain attribute, since vLLM reads it once per
            running request and step. Changes only where blocks enter or leave, or ``debt_blocks`` does.
        num_clean_blocks: Free, resident, without cached content.
        num_cached_blocks: Free, resident, with cached content when they were freed.
        attainable_extents: Extents that this engine could hold now; set by the agent, for the usage
            metrics only.

    Not thread-safe: the scheduler's lock covers it.
    """

    def __init__(self, block_pool: BlockPool, blocks_per_extent: int) -> None:
        """Take over the free blocks of ``block_pool``; the caller then makes this its queue.

        Args:
            block_pool: Nothing of it is in use yet but what never becomes free.
            blocks_per_extent: The same on every rank.
        """
        self._pool = block_pool
        self._num_blocks = len(block_pool.blocks)
        self.blocks_per_extent = blocks_per_extent
        num_extents = -(-self._num_blocks // blocks_per_extent)
        self._missing = _withdraw_all(block_pool, blocks_per_extent)
        self._num_pooled = self._num_blocks - sum(bits.bit_count() for bits in self._missing.values())

        self.extents = ExtentPool(num_extents, pinned=self._missing)
        self.attainable_extents = num_extents
        self._cached = FreeKVCacheBlockQueue([])
        self._clean = [0] * num_extents
        # Free blocks of a resident extent. A short last extent counts the blocks that it lacks as free,
        # so every extent has `blocks_per_extent - free` in use and is idle when that is 0.
        self._free = [0] * num_extents
        # Not settled: blocks that became clean, cached blocks that came, cached blocks that went.
        self._freed: list[KVCacheBlock] = []
        self._came: list[KVCacheBlock] = []
        self._went: list[KVCacheBlock] = []
        # Idle and clean; then with clean blocks, by blocks in use.
        self._with_clean = ExtentLists(num_extents, blocks_per_extent + 1)
        self._idle_cached = ExtentLists(num_extents, 1)
        # In debt: every extent with a free block, by blocks in use, as far as it has been filed.
        self._by_use: ExtentLists | None = None
        self._num_filed = 0

        self.num_clean_blocks = 0
        self.num_cached_blocks = 0
        self.num_free_blocks = 0
        self._num_resident_blocks = 0
        self._debt_blocks = 0
        self._hidden_blocks = 0

    # What vLLM calls

    def popleft(self) -> KVCacheBlock:
        """Take the first free block.

        Raises:
            ValueError: There is none, as with vLLM's own queue.
        """
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first ``n`` free blocks; ``n`` is at most ``num_free_blocks``."""
        if n > self.num_free_blocks:
            raise InvariantError(f"{n} blocks taken of {self.num_free_blocks} free: {self!r}")
        blocks: list[KVCacheBlock] = []
        if self._by_use is not None:
            self._pop_fullest(blocks, n, self._by_use)
        if self.num_clean_blocks and len(blocks) < n:
            self._pop_clean(blocks, n)
        if len(blocks) < n:
            taken = self._cached.popleft_n(n - len(blocks))
            self._went += taken
            self.num_cached_blocks -= len(taken)
            blocks += taken
        self.num_free_blocks -= n
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        """Take a free block out of the middle: a prefix hit.

        Raises:
            RuntimeError: It is not free, as with vLLM's own queue.
        """
        if _is_linked(block):
            self._cached.remove(block)
            self._went.append(block)
            self.num_cached_blocks -= 1
        else:
            self._remove_clean(block)
        self._count()

    def append(self, block: KVCacheBlock) -> None:
        """Free one block with cached content, the most recently used."""
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks with cached content, the last one the most recently used."""
        if blocks:
            self._cached.append_n(blocks)
            self._came += blocks
            self.num_cached_blocks += len(blocks)
            self._count()

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks without cached content."""
        if blocks:
            self._freed += blocks
            self.num_clean_blocks += len(blocks)
            self._count()

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Every free block, in the order in which they would be taken without debt."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Free blocks in the order in which they would be taken without debt, after ``cursor``.

        Starts anew where the cursor is not free and cached any more: it may have been handed out, or its
        extent may have retired. Clean blocks precede all cached ones, so after a clean cursor a walk
        from the start repeats only blocks that hold nothing.
        """
        if cursor is not None and _is_linked(cursor):
            yield from self._cached.iter_blocks_after(cursor)
            return
        self._settle()
        for list_id in range(self.blocks_per_extent, -1, -1):
            for extent_id in self._with_clean.walk(list_id):
                yield from self._take(extent_id, self._clean[extent_id], self.blocks_per_extent)[0]
        yield from self._cached.iter_blocks_after(None)

    # What the scheduler mixin and the agent call, between steps

    @property
    def debt_blocks(self) -> int:
        """Free blocks that vLLM does not see, because as many must soon be given back.

        Set where the ceiling was lowered below what is resident: vLLM then runs short by itself and
        preempts. What it takes comes from the fullest extents, cached or not, so the emptiest drain;
        in the order of use alone, blocks in use would stay scattered over all extents.
        """
        return self._debt_blocks

    @debt_blocks.setter
    def debt_blocks(self, num_blocks: int) -> None:
        self._settle()
        self._debt_blocks = self._hidden_blocks = num_blocks
        self._count()
        if not num_blocks:
            self._by_use = None
        elif self._by_use is None:
            self._by_use = ExtentLists(self.extents.num_extents, self.blocks_per_extent)
            self._num_filed = 0
        self._file_next(_FILED_AT_ONCE)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold; without the null block and attention sinks."""
        return self._num_resident_blocks - self.num_clean_blocks - self.num_cached_blocks

    @property
    def num_attainable_blocks(self) -> int:
        """Blocks that requests could hold now, at least those they do: what usage is a share of."""
        return max(self.num_used_blocks, self.usable_blocks(self.attainable_extents))

    def usable_blocks(self, num_extents: int) -> int:
        """Blocks of so many extents that requests could hold: not the null block and attention sinks."""
        return min(num_extents * self.blocks_per_extent - (self._num_blocks - self._num_pooled), self._num_pooled)

    @property
    def num_idle_clean_extents(self) -> int:
        """Extents all of whose blocks are free and clean."""
        self._settle()
        return self._with_clean.length(_IDLE_CLEAN)

    @property
    def num_idle_cached_extents(self) -> int:
        """Extents all of whose blocks are free, some of them cached."""
        self._settle()
        return self._idle_cached.length(0)

    def block_ranges(self, extent_ids: Iterable[int]) -> list[range]:
        """The blocks of these extents, ascending, consecutive extents as one range."""
        return extent_block_ranges(extent_ids, self._num_blocks, self.blocks_per_extent)

    def take_absent(self, num_extents: int) -> list[int]:
        """Choose extents to map, lowest ids first; at most ``extents.room``."""
        return self.extents.take_absent(num_extents)

    def arrived(self, extent_ids: Iterable[int]) -> None:
        """Every rank has mapped these extents: their blocks are free and clean."""
        ids = list(extent_ids)
        self.extents.arrived(ids)
        for extent_id in ids:
            size = self._size(extent_id)
            bits = (1 << size) - 1 & ~self._missing.get(extent_id, 0)
            num_free = bits.bit_count()
            self._clean[extent_id] = bits
            self._free[extent_id] = num_free + self.blocks_per_extent - size
            self.num_clean_blocks += num_free
            self._num_resident_blocks += num_free
            self._file(extent_id)
        self._count()

    def abandoned(self, extent_ids: Iterable[int]) -> None:
        """No rank holds these extents; they may be taken again."""
        self.extents.abandoned(extent_ids)

    def departed(self, extent_ids: Iterable[int]) -> None:
        """Every rank has unmapped these extents; they may be taken again."""
        self.extents.departed(extent_ids)

    def take_idle(self, *, cached: bool) -> int | None:
        """Take one extent with nothing in use out of the queue, to be unmapped.

        Args:
            cached: One with cached content, which vLLM then evicts; the one used least recently.
                Else the one that has been idle and clean for longest.

        Returns:
            Its id, now RETIRING, or None if there is none.
        """
        self._settle()
        lists, list_id = (self._idle_cached, 0) if cached else (self._with_clean, _IDLE_CLEAN)
        if not lists.length(list_id):
            return None
        extent_id = lists.first(list_id)
        self.extents.retire([extent_id])
        self._withdraw(extent_id)
        return extent_id

    @contextmanager
    def counting_absent(self) -> Iterator[None]:
        """Count every block that nobody uses as free, as ``BlockPool.reset_prefix_cache`` expects.

        It compares the free blocks with all blocks to learn whether any is in use.
        """
        self._hidden_blocks = self._num_resident_blocks - self._num_pooled
        self._count()
        try:
            yield
        finally:
            self._hidden_blocks = self._debt_blocks
            self._count()

    def forget_cache(self) -> None:
        """The prefix cache has been reset: cached blocks that have lost their content are clean."""
        self._settle()
        blocks = self._cached.popleft_n(self.num_cached_blocks)
        emptied = [block for block in blocks if block.block_hash is None]
        self._cached.append_n([block for block in blocks if block.block_hash is not None])
        self.num_cached_blocks -= len(emptied)
        self.num_clean_blocks += len(emptied)
        for extent_id, bits in self._by_extent(emptied):
            self._clean[extent_id] |= bits
            self._file(extent_id)

    def __repr__(self) -> str:
        return (
            f"<ElasticFreeQueue: {self.num_free_blocks} free ({self.num_clean_blocks} clean, {self.num_cached_blocks} "
            f"cached, debt {self._debt_blocks}), {self.num_used_blocks} used, {self.extents!r}>"
        )

    # Taking

    def _pop_clean(self, blocks: list[KVCacheBlock], n: int) -> None:
        """Add clean blocks from the fullest extents until there are ``n``, or no more."""
        lists = self._with_clean
        while len(blocks) < n:
            list_id = lists.highest()
            if list_id >= 0:
                self._take_clean(blocks, n, lists.first(list_id))
            elif self._freed:
                self._take_freed(blocks, n)
            else:
                break

    def _pop_fullest(self, blocks: list[KVCacheBlock], n: int, by_use: ExtentLists) -> None:
        """Add clean and cached blocks alike from the fullest extents that are filed, until there are ``n``."""
        self._settle()
        self._file_next(_FILED_PER_STEP)
        while len(blocks) < n and (list_id := by_use.highest()) >= 0:
            extent_id = by_use.first(list_id)
            self._take_clean(blocks, n, extent_id)
            cached = [block for block in self._extent_blocks(extent_id) if _is_linked(block)]
            for block in cached[: n - len(blocks)]:
                self._cached.remove(block)
                self._went.append(block)
                self.num_cached_blocks -= 1
                blocks.append(block)
            self._settle()

    def _take_clean(self, blocks: list[KVCacheBlock], n: int, extent_id: int) -> None:
        """Add clean blocks of one extent, lowest first, until there are ``n`` or it has no more."""
        taken, rest = self._take(extent_id, self._clean[extent_id], n - len(blocks))
        self._clean[extent_id] = rest
        self._free[extent_id] -= len(taken)
        self.num_clean_blocks -= len(taken)
        self._file(extent_id)
        blocks.extend(taken)

    def _take_freed(self, blocks: list[KVCacheBlock], n: int) -> None:
        """Add clean blocks that have not been settled, the last freed first: nothing has been counted of them."""
        first = max(0, len(self._freed) - (n - len(blocks)))
        taken = self._freed[first:]
        del self._freed[first:]
        self.num_clean_blocks -= len(taken)
        blocks += taken

    def _take(self, extent_id: int, bits: int, n: int) -> tuple[Sequence[KVCacheBlock], int]:
        """The first ``n`` blocks that these bits of an extent stand for, and the bits of the rest."""
        base = extent_id * self.blocks_per_extent
        taken: list[KVCacheBlock] = []
        while bits and len(taken) < n:
            lowest = bits & -bits
            carried = bits + lowest
            first, stop = lowest.bit_length() - 1, (carried & -carried).bit_length() - 1
            stop = min(stop, first + n - len(taken))
            taken += self._pool.blocks[base + first : base + stop]
            bits &= -1 << stop
        return taken, bits

    def _remove_clean(self, block: KVCacheBlock) -> None:
        self._settle()
        extent_id, index = divmod(block.block_id, self.blocks_per_extent)
        bit = 1 << index
        if not self._clean[extent_id] & bit:
            raise RuntimeError(f"remove() called on a block that is not free: {block}")
        self._clean[extent_id] ^= bit
        self._free[extent_id] -= 1
        self.num_clean_blocks -= 1
        self._file(extent_id)

    def _withdraw(self, extent_id: int) -> None:
        """Take all blocks of an idle extent out of the queue, and their content out of the prefix cache."""
        blocks = self._extent_blocks(extent_id)
        cached = [block for block in blocks if _is_linked(block)]
        for block in cached:
            self._cached.remove(block)
        self.num_cached_blocks -= len(cached)
        self.num_clean_blocks -= self._clean[extent_id].bit_count()
        self._num_resident_blocks -= len(blocks)
        self._clean[extent_id] = self._free[extent_id] = 0
        for lists in (self._with_clean, self._idle_cached, self._by_use):
            if lists is not None:
                lists.discard(extent_id)
        self._pool.evict_blocks({block.block_id for block in blocks if block.block_hash is not None})
        self._count()

    # Settling

    def _settle(self) -> None:
        """Bring the extents' counts and lists up to date with the blocks that came and went."""
        if not (self._freed or self._came or self._went):
            return
        size, free = self.blocks_per_extent, self._free
        changed: dict[int, None] = {}  # in the order of the last use
        for block in self._went:
            extent_id = block.block_id // size
            free[extent_id] -= 1
            changed[extent_id] = None
        for extent_id, bits in self._by_extent(self._freed):
            if self._clean[extent_id] & bits:
                raise InvariantError(f"Blocks of extent {extent_id} freed twice: {self!r}")
            self._clean[extent_id] |= bits
            free[extent_id] += bits.bit_count()
            changed[extent_id] = None
        for block in self._came:
            extent_id = block.block_id // size
            free[extent_id] += 1
            changed.pop(extent_id, None)
            changed[extent_id] = None
        self._went.clear()
        self._freed.clear()
        self._came.clear()
        for extent_id in changed:
            self._file(extent_id)

    def _file(self, extent_id: int) -> None:
        """Put an extent into the lists that it belongs to."""
        clean, num_used = self._clean[extent_id], self.blocks_per_extent - self._free[extent_id]
        if num_used > 0:
            self._idle_cached.discard(extent_id)
            if clean:
                self._with_clean.put(extent_id, 1 + num_used)
            else:
                self._with_clean.discard(extent_id)
        else:
            self._file_idle(extent_id, clean)
        if self._by_use is not None:
            self._file_by_use(extent_id, self._by_use)

    def _file_idle(self, extent_id: int, clean: int) -> None:
        if self._free[extent_id] > self.blocks_per_extent:
            raise InvariantError(f"Blocks of extent {extent_id} freed twice: {self!r}")
        if clean.bit_count() == self._size(extent_id):
            self._idle_cached.discard(extent_id)
            self._with_clean.put(extent_id, _IDLE_CLEAN)
            return
        self._idle_cached.discard(extent_id)
        self._idle_cached.put(extent_id, 0)  # the last of all, since it has just been used
        if clean:
            self._with_clean.put(extent_id, 1)
        else:
            self._with_clean.discard(extent_id)

    def _file_by_use(self, extent_id: int, by_use: ExtentLists) -> None:
        num_used = self.blocks_per_extent - self._free[extent_id]
        if num_used < self._size(extent_id):
            by_use.put(extent_id, num_used)
        else:
            by_use.discard(extent_id)

    def _file_next(self, num_extents: int) -> None:
        """File more extents by use; those that change are filed as they do."""
        if self._by_use is None:
            return
        stop = min(self._num_filed + num_extents, self.extents.num_extents)
        for extent_id in range(self._num_filed, stop):
            if self.extents.state(extent_id) is Residency.RESIDENT:
                self._file_by_use(extent_id, self._by_use)
        self._num_filed = stop

    def _count(self) -> None:
        self.num_free_blocks = max(0, self.num_clean_blocks + self.num_cached_blocks - self._hidden_blocks)

    def _by_extent(self, blocks: Sequence[KVCacheBlock]) -> Iterator[tuple[int, int]]:
        """Runs of different blocks of the same extent, as the extent and a bit per block."""
        extent_id, bits = -1, 0
        for block in blocks:
            of, index = divmod(block.block_id, self.blocks_per_extent)
            if of != extent_id or bits >> index & 1:
                if bits:
                    yield extent_id, bits
                extent_id, bits = of, 0
            bits |= 1 << index
        if bits:
            yield extent_id, bits

    def _size(self, extent_id: int) -> int:
        return min(self.blocks_per_extent, self._num_blocks - extent_id * self.blocks_per_extent)

    def _extent_blocks(self, extent_id: int) -> list[KVCacheBlock]:
        start = extent_id * self.blocks_per_extent
        return self._pool.blocks[start : start + self.blocks_per_extent]


def _is_linked(block: KVCacheBlock) -> bool:
    """Whether a block is in vLLM's linked list, so free and cached."""
    return block.next_free_block is not None


def _withdraw_all(block_pool: BlockPool, blocks_per_extent: int) -> dict[int, int]:
    """Take every block out of the pool's own queue; the blocks that were not in it, as bits per extent."""
    queue = block_pool.free_block_queue
    present = bytearray(len(block_pool.blocks))
    for block in queue.popleft_n(queue.num_free_blocks):
        present[block.block_id] = 1
    missing: dict[int, int] = {}
    block_id = present.find(0)
    while block_id >= 0:
        extent_id, index = divmod(block_id, blocks_per_extent)
        missing[extent_id] = missing.get(extent_id, 0) | 1 << index
        block_id = present.find(0, block_id + 1)
    return missing
