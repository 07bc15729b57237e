"""The free blocks of one vLLM block pool: only resident ones, concentrated into the fullest extents.

``ElasticFreeQueue`` keeps the contract of ``FreeKVCacheBlockQueue`` (the same in vLLM 0.30.0 to 0.33.0;
``contract.py`` lists it) and takes its place on one ``BlockPool`` instance. Prefix cache, hybrid
coordination and KV events stay vLLM's own.

Free blocks are *clean* (without cached content) or *cached*. Clean blocks are bits of one integer per
extent: no object and no link per block, and a whole extent is handed out as one slice. Cached blocks are
also in vLLM's own linked list, least recently used first, so that eviction is vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcached_core.errors import InvariantError
from kvcached_core.extents import ExtentLists, ExtentPool
from kvcached_core.geometry import extent_block_ranges
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_IDLE_CLEAN = 0
"""The list of extents all of whose blocks are free and clean: the last to be picked from."""


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
        self._clean = [0] * num_extents
        self._cached = [0] * num_extents
        self._cached_blocks = FreeKVCacheBlockQueue([])
        # Lists: idle and clean; with clean blocks, by blocks in use; only cached, by blocks in use.
        self._only_cached = blocks_per_extent + 2
        self._lists = ExtentLists(num_extents, self._only_cached + blocks_per_extent + 1)
        self._idle_cached = ExtentLists(num_extents, 1)
        # Extents whose lists are out of date. Filed when a list is next looked at: one prefix hit
        # removes hundreds of blocks of the same few extents.
        self._unfiled: dict[int, None] = {}

        self.num_clean_blocks = 0
        self.num_cached_blocks = 0
        self._num_resident_blocks = 0
        self._debt_blocks = 0
        self._count_absent = False
        self.num_free_blocks = 0

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
        if n > self.num_clean_blocks + self.num_cached_blocks - self._debt_blocks and n:
            raise InvariantError(f"{n} blocks taken of {self.num_free_blocks} free: {self!r}")
        if self._debt_blocks:
            blocks = self._pop_fullest(n)
        else:
            blocks = self._pop_clean(min(n, self.num_clean_blocks))
            if len(blocks) < n:
                blocks.extend(self._pop_cached(n - len(blocks)))
        self._count()
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        """Take a free block out of the middle: a prefix hit.

        Raises:
            RuntimeError: It is not free, as with vLLM's own queue.
        """
        extent_id, index = divmod(block.block_id, self.blocks_per_extent)
        bit = 1 << index
        if self._cached[extent_id] & bit:
            self._cached_blocks.remove(block)
            self._cached[extent_id] ^= bit
            self.num_cached_blocks -= 1
        elif self._clean[extent_id] & bit:
            self._clean[extent_id] ^= bit
            self.num_clean_blocks -= 1
        else:
            raise RuntimeError(f"remove() called on a block that is not free: {block}")
        self._unfiled[extent_id] = None
        self._count()

    def append(self, block: KVCacheBlock) -> None:
        """Free one block, most recently used."""
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks; cached ones become the most recently used."""
        cached = [block for block in blocks if block.block_hash is not None]
        self._cached_blocks.append_n(cached)
        self._file(blocks, cached)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks; cached ones become the least recently used."""
        cached = [block for block in blocks if block.block_hash is not None]
        self._cached_blocks.prepend_n(cached)
        self._file(blocks, cached)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Every free block, in the order in which they would be taken without debt."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Free blocks in the order in which they would be taken, after ``cursor``.

        Starts anew where the cursor is not free and cached any more: it may have been handed out, or its
        extent may have retired. Clean blocks precede every cached one, so after a clean cursor there is
        nothing that a walk from the start would repeat to any harm.
        """
        if cursor is not None and self._is_cached(cursor):
            yield from self._cached_blocks.iter_blocks_after(cursor)
            return
        self._file_extents()
        for list_id in range(self._only_cached - 1, -1, -1):
            for extent_id in self._lists.walk(list_id):
                yield from self._blocks(extent_id, self._clean[extent_id])
        yield from self._cached_blocks.iter_blocks_after(None)

    # What the scheduler mixin and the agent call, between steps

    @property
    def debt_blocks(self) -> int:
        """Free blocks that vLLM does not see, because as many must soon be given back.

        Set where the ceiling was lowered below what is resident: vLLM then runs short by itself and
        preempts, and what it takes comes from the fullest extents, so the emptiest drain.
        """
        return self._debt_blocks

    @debt_blocks.setter
    def debt_blocks(self, num_blocks: int) -> None:
        self._debt_blocks = num_blocks
        self._count()

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold; without the null block and attention sinks."""
        return self._num_resident_blocks - self.num_clean_blocks - self.num_cached_blocks

    @property
    def num_attainable_blocks(self) -> int:
        """Blocks that requests could hold now, at least those they do: what usage is a share of."""
        blocks = self.attainable_extents * self.blocks_per_extent - (self._num_blocks - self._num_pooled)
        return max(self.num_used_blocks, min(blocks, self._num_pooled))

    @property
    def num_idle_clean_extents(self) -> int:
        """Extents all of whose blocks are free and clean."""
        self._file_extents()
        return self._lists.length(_IDLE_CLEAN)

    @property
    def num_idle_cached_extents(self) -> int:
        """Extents all of whose blocks are free, some of them cached."""
        self._file_extents()
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
            bits = self._all_bits(extent_id) & ~self._missing.get(extent_id, 0)
            self._clean[extent_id] = bits
            self.num_clean_blocks += bits.bit_count()
            self._num_resident_blocks += bits.bit_count()
            self._unfiled[extent_id] = None
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
        self._file_extents()
        lists, list_id = (self._idle_cached, 0) if cached else (self._lists, _IDLE_CLEAN)
        if not lists.length(list_id):
            return None
        extent_id = lists.first(list_id)
        self.extents.retire([extent_id])
        self._withdraw(extent_id)
        return extent_id

    @contextmanager
    def counting_absent(self) -> Iterator[None]:
        """Count blocks that are not resident as free, as ``BlockPool.reset_prefix_cache`` expects.

        It compares the free blocks with all blocks to learn whether any is in use.
        """
        self._count_absent = True
        self._count()
        try:
            yield
        finally:
            self._count_absent = False
            self._count()

    def forget_cache(self) -> None:
        """The prefix cache has been reset: every cached block is clean."""
        for block in self._cached_blocks.popleft_n(self.num_cached_blocks):
            self._unfiled[block.block_id // self.blocks_per_extent] = None
        for extent_id in self._unfiled:
            self._clean[extent_id] |= self._cached[extent_id]
            self._cached[extent_id] = 0
        self.num_clean_blocks += self.num_cached_blocks
        self.num_cached_blocks = 0

    def __repr__(self) -> str:
        return (
            f"<ElasticFreeQueue: {self.num_free_blocks} free ({self.num_clean_blocks} clean, {self.num_cached_blocks} "
            f"cached, debt {self._debt_blocks}), {self.num_used_blocks} used, {self.extents!r}>"
        )

    # Taking

    def _pop_clean(self, n: int) -> list[KVCacheBlock]:
        blocks: list[KVCacheBlock] = []
        while len(blocks) < n:
            self._file_extents()
            extent_id = self._lists.first(self._lists.highest(below=self._only_cached))
            blocks.extend(self._take_clean(extent_id, n - len(blocks)))
        return blocks

    def _pop_cached(self, n: int) -> list[KVCacheBlock]:
        blocks = self._cached_blocks.popleft_n(n)
        for extent_id, bits in self._by_extent(blocks):
            self._cached[extent_id] ^= bits
            self._unfiled[extent_id] = None
        self.num_cached_blocks -= n
        return blocks

    def _pop_fullest(self, n: int) -> list[KVCacheBlock]:
        """Take clean and cached blocks alike from the extents with most blocks in use."""
        blocks: list[KVCacheBlock] = []
        while len(blocks) < n:
            extent_id = self._fullest()
            blocks.extend(self._take_clean(extent_id, n - len(blocks)))
            for block in self._blocks(extent_id, self._cached[extent_id])[: n - len(blocks)]:
                self.remove(block)
                blocks.append(block)
        return blocks

    def _fullest(self) -> int:
        """The extent with a free block that has most blocks in use."""
        self._file_extents()
        split = self._only_cached
        with_clean = self._lists.highest(below=split)
        only_cached = self._lists.highest(below=2 * split)
        if only_cached >= split and only_cached - split >= with_clean - 1:
            return self._lists.first(only_cached)
        return self._lists.first(with_clean)

    def _take_clean(self, extent_id: int, n: int) -> list[KVCacheBlock]:
        """Take up to ``n`` clean blocks of one extent, lowest first, a run at a time."""
        bits = self._clean[extent_id]
        blocks: list[KVCacheBlock] = []
        while bits and len(blocks) < n:
            first, stop = _lowest_run(bits)
            stop = min(stop, first + n - len(blocks))
            bits &= -1 << stop
            base = extent_id * self.blocks_per_extent
            blocks.extend(self._pool.blocks[base + first : base + stop])
        self._clean[extent_id] = bits
        self.num_clean_blocks -= len(blocks)
        self._unfiled[extent_id] = None
        return blocks

    def _withdraw(self, extent_id: int) -> None:
        """Take all blocks of an idle extent out of the queue, and their content out of the prefix cache."""
        blocks = self._blocks(extent_id, self._cached[extent_id])
        for block in blocks:
            self._cached_blocks.remove(block)
        self.num_cached_blocks -= len(blocks)
        self.num_clean_blocks -= self._clean[extent_id].bit_count()
        self._clean[extent_id] = self._cached[extent_id] = 0
        self._file_extent(extent_id)
        hashed = {block.block_id for block in self._extent_blocks(extent_id) if block.block_hash is not None}
        self._pool.evict_blocks(hashed)
        self._num_resident_blocks -= len(self._extent_blocks(extent_id))
        self._count()

    # Filing

    def _file(self, blocks: list[KVCacheBlock], cached: list[KVCacheBlock]) -> None:
        """Note blocks as free, those in ``cached`` as cached and the rest as clean."""
        clean = blocks if not cached else [block for block in blocks if block.block_hash is None]
        for masks, freed in ((self._clean, clean), (self._cached, cached)):
            for extent_id, bits in self._by_extent(freed):
                if (self._clean[extent_id] | self._cached[extent_id]) & bits:
                    raise InvariantError(f"Blocks of extent {extent_id} freed twice: {self!r}")
                masks[extent_id] |= bits
                self._unfiled[extent_id] = None
        self.num_clean_blocks += len(clean)
        self.num_cached_blocks += len(cached)
        self._count()

    def _by_extent(self, blocks: list[KVCacheBlock]) -> Iterator[tuple[int, int]]:
        """Runs of blocks of the same extent, as the extent and a bit per block."""
        extent_id, bits = -1, 0
        for block in blocks:
            of, index = divmod(block.block_id, self.blocks_per_extent)
            if of != extent_id:
                if bits:
                    yield extent_id, bits
                extent_id, bits = of, 0
            bits |= 1 << index
        if bits:
            yield extent_id, bits

    def _file_extents(self) -> None:
        """Put the extents that have changed into the lists they belong to."""
        for extent_id in self._unfiled:
            self._file_extent(extent_id)
        self._unfiled.clear()

    def _file_extent(self, extent_id: int) -> None:
        clean, cached = self._clean[extent_id], self._cached[extent_id]
        every = self._all_bits(extent_id)
        idle = clean | cached == every
        if idle and cached:
            self._idle_cached.put(extent_id, 0)
        else:
            self._idle_cached.discard(extent_id)
        used = every.bit_count() - (clean | cached).bit_count()
        if clean:
            list_id = _IDLE_CLEAN if clean == every else 1 + used
        elif cached:
            list_id = self._only_cached + used
        else:
            self._lists.discard(extent_id)
            return
        if self._lists.list_of(extent_id) != list_id:
            self._lists.put(extent_id, list_id)

    def _count(self) -> None:
        hidden = self._num_resident_blocks - self._num_pooled if self._count_absent else self._debt_blocks
        self.num_free_blocks = max(0, self.num_clean_blocks + self.num_cached_blocks - hidden)

    # Bits and blocks

    def _all_bits(self, extent_id: int) -> int:
        """A bit per block of an extent, also those that are never free."""
        size = min(self.blocks_per_extent, self._num_blocks - extent_id * self.blocks_per_extent)
        return (1 << size) - 1

    def _extent_blocks(self, extent_id: int) -> list[KVCacheBlock]:
        start = extent_id * self.blocks_per_extent
        return self._pool.blocks[start : start + self.blocks_per_extent]

    def _blocks(self, extent_id: int, bits: int) -> list[KVCacheBlock]:
        """The blocks that these bits of an extent stand for, lowest first."""
        base = extent_id * self.blocks_per_extent
        blocks: list[KVCacheBlock] = []
        while bits:
            first, stop = _lowest_run(bits)
            blocks.extend(self._pool.blocks[base + first : base + stop])
            bits &= -1 << stop
        return blocks

    def _is_cached(self, block: KVCacheBlock) -> bool:
        extent_id, index = divmod(block.block_id, self.blocks_per_extent)
        return bool(self._cached[extent_id] >> index & 1)


def _lowest_run(bits: int) -> tuple[int, int]:
    """The lowest run of set bits, as first and behind last."""
    lowest = bits & -bits
    carried = bits + lowest
    return lowest.bit_length() - 1, (carried & -carried).bit_length() - 1


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
