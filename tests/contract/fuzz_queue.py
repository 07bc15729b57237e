"""The elastic queue on a release's real block pool, beside that release's own queue on a twin pool.

    python fuzz_queue.py OPERATIONS SEED

Both pools see the same requests: allocations, prefix hits, cached content, frees in whole and in part, evictions and
resets. Extents come and go in one of them only. What vLLM can see must agree: which requests are served, how many
blocks are free, whether a reset succeeds. And no block is handed out twice, none that is not resident, never the null
block. Run with the release's sources first on PYTHONPATH.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import vllm
from kvcached_core.extents import Residency
from kvcached_vllm.queue import ElasticFreeQueue
from vllm.v1.core.block_pool import BlockPool

BLOCK_SIZE = 16
NUM_BLOCKS, BLOCKS_PER_EXTENT = 500, 16  # the last extent has four blocks


class Twins:
    """An elastic pool and a stock one, driven alike."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.elastic, self.stock = (BlockPool(NUM_BLOCKS, True, BLOCK_SIZE) for _ in range(2))
        self.queue = ElasticFreeQueue(self.elastic, BLOCKS_PER_EXTENT)
        self.elastic.free_block_queue = self.queue
        self.requests = {}  # number -> (blocks of the elastic pool, blocks of the stock pool)
        self.moving = {}
        self.numbers = itertools.count()
        self.done = Counter()

    def run(self, operations: int) -> None:
        weights = {
            self.allocate: 30, self.free: 22, self.free_some: 8, self.hit: 12, self.evict: 3, self.reset: 1,
            self.grow: 8, self.answer: 10, self.shrink: 5, self.set_debt: 1, self.walk: 1,
        }  # fmt: skip
        for operation in self.random.choices(list(weights), list(weights.values()), k=operations):
            operation()
            self.done[operation.__name__] += 1
            self.check_counts()
            if self.random.random() < 0.02:
                self.check_everything()
        self.check_everything()

    # what vLLM does, on both

    def allocate(self) -> None:
        num_blocks = self.random.choice([1, 1, 1, 2, 5, 30, 90])
        served = num_blocks <= self.elastic.get_num_free_blocks()
        try:
            blocks = self.elastic.get_new_blocks(num_blocks)
        except ValueError:
            assert not served
            self.done["refused"] += 1
            return
        assert served
        self.check_handed_out(blocks)
        number = next(self.numbers)
        self.requests[number] = blocks, self.stock.get_new_blocks(num_blocks)
        num_full = self.random.randint(0, num_blocks)
        content = [self.hash_of(next(self.numbers)) for _ in range(num_full)]
        for pool, held in zip((self.elastic, self.stock), self.requests[number], strict=True):
            pool.cache_full_blocks(SimpleNamespace(block_hashes=content), held, 0, num_full, BLOCK_SIZE, 0)

    def free(self) -> None:
        if self.requests:
            held = self.requests.pop(self.random.choice(list(self.requests)))
            for pool, blocks in zip((self.elastic, self.stock), held, strict=True):
                pool.free_blocks(reversed(blocks))

    def free_some(self) -> None:
        """The front of a request, as where a window slides on."""
        if self.requests:
            number = self.random.choice(list(self.requests))
            held = self.requests[number]
            cut = self.random.randint(0, len(held[0]))
            for pool, blocks in zip((self.elastic, self.stock), held, strict=True):
                pool.free_blocks(blocks[:cut])
            self.requests[number] = held[0][cut:], held[1][cut:]

    def hit(self) -> None:
        """A new request finds content that both pools still have."""
        hashed = [block for block in self.elastic.blocks if block.block_hash is not None]
        chosen = self.random.sample(hashed, min(len(hashed), self.random.choice([1, 3, 20])))
        found = [
            (block, twin)
            for block in chosen
            if (twin := self.stock.cached_block_hash_to_block.get_one_block(block.block_hash)) is not None
        ]
        if found:
            blocks, twins = (list(side) for side in zip(*found, strict=True))
            self.elastic.touch(blocks)
            self.stock.touch(twins)
            self.requests[next(self.numbers)] = blocks, twins

    def evict(self) -> None:
        """As a connector that could not load: content goes, blocks stay where they are."""
        hashed = [block.block_id for block in self.elastic.blocks if block.block_hash is not None]
        self.elastic.evict_blocks(set(self.random.sample(hashed, min(len(hashed), 4))))

    def reset(self) -> None:
        if self.random.random() < 0.7:
            for number in list(self.requests):
                held = self.requests.pop(number)
                for pool, blocks in zip((self.elastic, self.stock), held, strict=True):
                    pool.free_blocks(blocks)
        with self.queue.counting_absent():
            reset = self.elastic.reset_prefix_cache()
        assert reset == self.stock.reset_prefix_cache() == (not any(held[0] for held in self.requests.values()))
        self.queue.forget_cache()
        self.done["reset succeeded"] += reset

    def walk(self) -> None:
        """As the connector that offloads what is next to be evicted."""
        free = [block.block_id for block in self.queue.get_all_free_blocks()]
        cursor = self.random.choice(self.elastic.blocks)
        walked = [block.block_id for block in self.queue.iter_blocks_after(cursor)]
        assert walked in (free, free[len(free) - len(walked) :])
        assert len(self.stock.free_block_queue.get_all_free_blocks()) >= len(free)

    # what the agent does, on one

    def grow(self) -> None:
        taken = self.queue.take_absent(min(self.random.randint(1, 6), self.queue.extents.room))
        self.moving.update(dict.fromkeys(taken, Residency.MAPPING))

    def answer(self) -> None:
        for extent_id in self.random.sample(list(self.moving), min(len(self.moving), 4)):
            if self.moving.pop(extent_id) is Residency.RETIRING:
                self.queue.departed([extent_id])
            elif self.random.random() < 0.9:
                self.queue.arrived([extent_id])
            else:
                self.queue.abandoned([extent_id])

    def shrink(self) -> None:
        for _ in range(self.random.randint(1, 6)):
            extent_id = self.queue.take_idle(cached=self.random.random() < 0.5)
            if extent_id is not None:
                self.moving[extent_id] = Residency.RETIRING
                self.done["retired"] += 1

    def set_debt(self) -> None:
        self.queue.debt_blocks = self.random.choice([0, 0, 16, 60])

    # what must hold

    def check_counts(self) -> None:
        resident = self.resident_blocks()
        free = self.stock.get_num_free_blocks() - (NUM_BLOCKS - resident)
        assert self.queue.num_clean_blocks + self.queue.num_cached_blocks == free + (1 if self.null_is_absent() else 0)
        assert self.elastic.get_num_free_blocks() == max(0, self.queue_total() - self.queue.debt_blocks)
        assert self.queue.num_used_blocks == NUM_BLOCKS - 1 - self.stock.get_num_free_blocks()

    def queue_total(self) -> int:
        return self.queue.num_clean_blocks + self.queue.num_cached_blocks

    def null_is_absent(self) -> bool:
        return self.queue.extents.state(0) is not Residency.RESIDENT

    def resident_blocks(self) -> int:
        last = self.queue.extents.num_extents - 1
        blocks = self.queue.extents.num_resident * BLOCKS_PER_EXTENT
        if self.queue.extents.state(last) is Residency.RESIDENT:
            blocks -= -NUM_BLOCKS % BLOCKS_PER_EXTENT
        return blocks

    def check_handed_out(self, blocks: list) -> None:
        in_use = {block.block_id for held, _ in self.requests.values() for block in held}
        handed_out = [block.block_id for block in blocks]
        assert len(set(handed_out)) == len(handed_out)
        assert not in_use & set(handed_out)
        assert 0 not in handed_out
        for block in blocks:
            assert self.queue.extents.state(block.block_id // BLOCKS_PER_EXTENT) is Residency.RESIDENT
            assert block.ref_cnt == 1
            assert block.block_hash is None

    def check_everything(self) -> None:
        free = [block.block_id for block in self.queue.get_all_free_blocks()]
        state = self.queue.extents.state
        assert sorted(free) == [
            block.block_id
            for block in self.elastic.blocks[1:]
            if block.ref_cnt == 0 and state(block.block_id // BLOCKS_PER_EXTENT) is Residency.RESIDENT
        ]
        for block in self.elastic.blocks:
            if state(block.block_id // BLOCKS_PER_EXTENT) is not Residency.RESIDENT:
                assert block.block_hash is None
                assert block.ref_cnt == 0

    def hash_of(self, number: int) -> bytes:
        return number.to_bytes(32, "big")


if __name__ == "__main__":
    operations, seed = map(int, sys.argv[1:])
    twins = Twins(seed)
    twins.run(operations)
    print(f"{operations} operations with {Path(vllm.__file__).parents[1].name}")
    print(", ".join(f"{number} {name}" for name, number in sorted(twins.done.items())))
