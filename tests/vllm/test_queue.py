"""Claims of queue.py, on vLLM's real block pool."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvcached_core.errors import InvariantError
from kvcached_core.extents import Residency
from kvcached_vllm.queue import ElasticFreeQueue
from vllm.distributed.kv_events import BlockRemoved
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

BLOCK_SIZE = 16


def elastic_pool(num_blocks: int, blocks_per_extent: int, resident: int = 0, *, events: bool = False) -> BlockPool:
    """A block pool with an elastic queue, the first ``resident`` extents mapped."""
    pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=BLOCK_SIZE, enable_kv_cache_events=events)
    queue = ElasticFreeQueue(pool, blocks_per_extent)
    pool.free_block_queue = queue
    queue.arrived(queue.take_absent(resident))
    return pool


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


_hashes: Iterator[BlockHash] = (BlockHash(number.to_bytes(32, "big")) for number in itertools.count())


def cache(pool: BlockPool, blocks: list[KVCacheBlock]) -> None:
    """Give blocks content that nothing else has, through the pool's own interface."""
    request = SimpleNamespace(block_hashes=[next(_hashes) for _ in blocks])
    events, pool.enable_kv_cache_events = pool.enable_kv_cache_events, False
    pool.cache_full_blocks(request, blocks, 0, len(blocks), BLOCK_SIZE, 0)
    pool.enable_kv_cache_events = events


def settle(pool: BlockPool) -> None:
    """What the agent does at every turn: it looks how many extents are idle."""
    assert pool.free_block_queue.num_idle_clean_extents >= 0


def cached_content(pool: BlockPool, blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
    cache(pool, blocks)
    pool.free_blocks(blocks)
    return blocks


class QueueBesideModel(RuleBasedStateMachine):
    """Every method in any order, beside sets and lists that are searched from end to end."""

    @initialize(num_blocks=st.integers(1, 40), blocks_per_extent=st.integers(1, 7), resident=st.integers(0, 40))
    def start(self, num_blocks: int, blocks_per_extent: int, resident: int) -> None:
        self.pool = elastic_pool(num_blocks, blocks_per_extent)
        self.queue: ElasticFreeQueue = self.pool.free_block_queue
        self.size = blocks_per_extent
        self.num_extents = -(-num_blocks // blocks_per_extent)
        self.clean: set[int] = set()
        self.cached: list[int] = []  # least recently used first
        self.idle_since: dict[int, int] = {}
        self.clock = 0
        self.requests: list[list[KVCacheBlock]] = []
        self.moving: dict[int, Residency] = {}
        self.absent = set(range(self.num_extents))
        self.debt = 0
        self.settled = True
        self.take_absent(resident)
        while self.moving:
            self.arrive(min(self.moving))

    # the model

    def blocks_of(self, extent_id: int) -> list[int]:
        return [block.block_id for block in self.pool.blocks if block.block_id // self.size == extent_id]

    def is_free(self, block_id: int) -> bool:
        return block_id in self.clean or block_id in self.cached

    def num_used(self, extent_id: int) -> int:
        return sum(not self.is_free(block_id) for block_id in self.blocks_of(extent_id))

    def rank(self, extent_id: int) -> int:
        """How early an extent with clean blocks is picked from: the higher, the earlier."""
        return -1 if self.is_idle_clean(extent_id) else self.num_used(extent_id)

    def resident(self) -> list[int]:
        return [e for e in range(self.num_extents) if e not in self.absent and e not in self.moving]

    def is_idle_clean(self, extent_id: int) -> bool:
        return all(block_id in self.clean for block_id in self.blocks_of(extent_id))

    def is_idle_cached(self, extent_id: int) -> bool:
        blocks = self.blocks_of(extent_id)
        return all(map(self.is_free, blocks)) and any(block_id in self.cached for block_id in blocks)

    def num_free(self) -> int:
        return max(0, len(self.clean) + len(self.cached) - self.debt)

    def take(self, block_id: int) -> None:
        """Check that this is the block to be taken next, and take it."""
        extent_id = block_id // self.size
        with_clean = {other // self.size for other in self.clean}
        with_free = {other // self.size for other in (*self.clean, *self.cached)}
        if self.debt:
            assert self.num_used(extent_id) == max(map(self.num_used, with_free))
        elif self.clean:
            assert block_id in self.clean
            assert not self.settled or self.rank(extent_id) == max(map(self.rank, with_clean))
        else:
            assert block_id == self.cached[0]
        self.leave(block_id)

    def leave(self, block_id: int) -> None:
        self.clean.discard(block_id)
        if block_id in self.cached:
            self.cached.remove(block_id)
        self.idle_since.pop(block_id // self.size, None)

    def enter(self, block_id: int, *, cached: bool) -> None:
        if cached:
            self.cached.append(block_id)
        else:
            self.clean.add(block_id)
        extent_id = block_id // self.size
        if all(map(self.is_free, self.blocks_of(extent_id))):
            self.clock += 1
            self.idle_since[extent_id] = self.clock

    # what vLLM does

    @rule(n=st.integers(0, 15))
    def allocate(self, n: int) -> None:
        if n > self.num_free():
            with pytest.raises(ValueError, match="Cannot get"):
                self.pool.get_new_blocks(n)
            with pytest.raises(InvariantError, match="blocks taken of"):
                self.queue.popleft_n(n)
            return
        blocks = self.pool.get_new_blocks(n)
        for block in blocks:
            assert block.block_hash is None
            self.take(block.block_id)
        self.settled = False
        self.requests.append(blocks)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Some blocks of a request, as where a window slides on, or all of them."""
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        goes = data.draw(st.lists(st.booleans(), min_size=len(request), max_size=len(request)))
        self.requests.append([block for block, leaves in zip(request, goes, strict=True) if not leaves])
        blocks = [block for block, leaves in zip(request, goes, strict=True) if leaves]
        full = [block for block in blocks if block.ref_cnt == 1 and block.block_hash is None]
        cache(self.pool, full[: data.draw(st.integers(0, len(full)))])
        last = [block for block in reversed(blocks) if block.ref_cnt == 1]
        self.pool.free_blocks(reversed(blocks))
        for block in last:
            if block.block_hash is None:
                self.enter(block.block_id, cached=False)
        for block in last:
            if block.block_hash is not None:
                self.enter(block.block_id, cached=True)
        self.settled = False

    @rule(data=st.data())
    def hit_prefix(self, data: st.DataObject) -> None:
        hashed = [block for block in self.pool.blocks if block.block_hash is not None]
        if not hashed:
            return
        hit = data.draw(st.lists(st.sampled_from(hashed), unique_by=lambda block: block.block_id, max_size=6))
        for block in hit:
            self.leave(block.block_id)
        self.pool.touch(hit)
        self.settled = False
        self.requests.append(hit)

    @rule(data=st.data())
    def vllm_evicts_by_itself(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sets(st.integers(0, len(self.pool.blocks) - 1), max_size=5))
        self.pool.evict_blocks(chosen)  # a queued block keeps its place in the order

    @rule()
    def reset(self) -> None:
        with self.queue.counting_absent():
            done = self.pool.reset_prefix_cache()
        assert done == (not any(self.requests))
        self.queue.forget_cache()
        for block_id in list(self.cached):
            if self.pool.blocks[block_id].block_hash is None:
                self.cached.remove(block_id)
                self.clean.add(block_id)

    # what the agent does

    @rule(n=st.integers(0, 9))
    def take_absent(self, n: int) -> None:
        taken = self.queue.take_absent(min(n, self.queue.extents.room))
        assert taken == sorted(self.absent)[: len(taken)]
        self.absent.difference_update(taken)
        self.moving.update(dict.fromkeys(taken, Residency.MAPPING))

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if not self.moving:
            return
        extent_id = data.draw(st.sampled_from(sorted(self.moving)))
        if self.moving[extent_id] is Residency.MAPPING and data.draw(st.booleans()):
            self.arrive(extent_id)
            return
        if self.moving.pop(extent_id) is Residency.MAPPING:
            self.queue.abandoned([extent_id])
        else:
            self.queue.departed([extent_id])
        self.absent.add(extent_id)

    def arrive(self, extent_id: int) -> None:
        del self.moving[extent_id]
        self.queue.arrived([extent_id])
        for block_id in self.blocks_of(extent_id):
            if block_id:
                self.enter(block_id, cached=False)

    @rule(cached=st.booleans())
    def take_idle(self, cached: bool) -> None:
        fits = self.is_idle_cached if cached else self.is_idle_clean
        candidates = [extent_id for extent_id in self.resident() if fits(extent_id)]
        taken = self.queue.take_idle(cached=cached)
        if not candidates:
            assert taken is None
            return
        assert taken in candidates
        if cached:
            assert taken == min(candidates, key=lambda extent_id: self.idle_since[extent_id])
        for block_id in self.blocks_of(taken):
            self.leave(block_id)
            assert self.pool.blocks[block_id].block_hash is None
        self.moving[taken] = Residency.RETIRING

    @rule(debt=st.sampled_from([0, 0, 1, 3, 8, 30]))
    def set_debt(self, debt: int) -> None:
        self.queue.debt_blocks = self.debt = debt

    @invariant()
    def counts_agree(self) -> None:
        queue = self.queue
        assert (queue.num_clean_blocks, queue.num_cached_blocks) == (len(self.clean), len(self.cached))
        assert queue.num_free_blocks == self.pool.get_num_free_blocks() == self.num_free()
        assert queue.num_used_blocks == len({block.block_id for request in self.requests for block in request})
        assert queue.num_used_blocks <= queue.num_attainable_blocks <= len(self.pool.blocks) - 1
        assert queue.extents.num_resident == len(self.resident())

    @rule()
    def everything_agrees(self) -> None:
        """As the agent looks at every turn, which settles what steps have only noted."""
        self.settled = True
        queue = self.queue
        free = queue.get_all_free_blocks()
        assert len(free) == len(set(ids(free)))
        assert set(ids(free)) == self.clean | set(self.cached)
        assert ids(free)[len(self.clean) :] == self.cached
        assert 0 not in ids(free)
        assert all(self.pool.blocks[block_id].ref_cnt == 0 for block_id in ids(free))
        assert {block_id // self.size for block_id in ids(free)} <= set(self.resident())
        assert not {block.block_id for request in self.requests for block in request} & set(ids(free))
        assert queue.num_idle_clean_extents == sum(map(self.is_idle_clean, self.resident()))
        assert queue.num_idle_cached_extents == sum(map(self.is_idle_cached, self.resident()))

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            self.everything_agrees()


TestQueueBesideModel = QueueBesideModel.TestCase
TestQueueBesideModel.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_nothing_is_free_before_an_extent_arrives() -> None:
    pool = elastic_pool(64, 16)
    assert pool.get_num_free_blocks() == 0
    with pytest.raises(ValueError, match="No free blocks available"):
        pool.free_block_queue.popleft()


def test_the_null_block_is_never_handed_out_and_pins_its_extent() -> None:
    pool = elastic_pool(64, 16, resident=4)
    blocks = pool.get_new_blocks(63)
    assert sorted(ids(blocks)) == list(range(1, 64))
    pool.free_blocks(blocks)
    queue = pool.free_block_queue
    assert [queue.take_idle(cached=False) for _ in range(4)] == [1, 2, 3, None]


def test_blocks_that_were_taken_before_pin_their_extents() -> None:
    pool = BlockPool(64, enable_caching=True, hash_block_size=BLOCK_SIZE)
    sinks = pool.get_new_blocks(17)  # as attention sinks are: for ever
    queue = ElasticFreeQueue(pool, 16)
    pool.free_block_queue = queue
    queue.arrived(queue.take_absent(4))
    assert pool.get_num_free_blocks() == 64 - 1 - len(sinks)
    assert [queue.take_idle(cached=False) for _ in range(3)] == [2, 3, None]
    with pytest.raises(InvariantError, match=r"Pinned extents \[1\]"):
        queue.extents.retire([1])


def test_a_short_last_extent_becomes_idle() -> None:
    pool = elastic_pool(35, 16, resident=3)
    queue = pool.free_block_queue
    assert queue.num_idle_clean_extents == 2
    blocks = pool.get_new_blocks(34)
    assert queue.num_idle_clean_extents == 0
    pool.free_blocks(blocks)
    assert {queue.take_idle(cached=False), queue.take_idle(cached=False)} == {1, 2}
    assert pool.get_num_free_blocks() == 15


def test_blocks_come_from_the_fullest_extent_so_that_the_others_drain() -> None:
    pool = elastic_pool(64, 16, resident=4)
    first = pool.get_new_blocks(15)  # the rest of extent 0
    second, third = pool.get_new_blocks(16), pool.get_new_blocks(4)
    pool.free_blocks(second[:12])  # extent 1 has 4 in use, extent 2 has 4, extent 3 none
    pool.free_blocks(third[:2])  # extent 2 has 2
    settle(pool)
    taken = pool.get_new_blocks(12)
    assert {block.block_id // 16 for block in taken} == {1}
    assert pool.free_block_queue.num_idle_clean_extents == 1
    assert {block.block_id // 16 for block in first} == {0}


def test_what_is_fullest_changes_as_content_is_freed() -> None:
    pool = elastic_pool(48, 16, resident=3)
    blocks = pool.get_new_blocks(47)
    pool.free_blocks([blocks[20], blocks[40]])  # extents 1 and 2, 15 in use each
    cached_content(pool, blocks[21:24])  # extent 1 has 12
    settle(pool)
    assert pool.get_new_blocks(1) == [blocks[40]]
    pool.free_blocks([blocks[41]])
    pool.touch(blocks[21:24])
    pool.free_blocks([blocks[42]])  # extent 1 has 15 again, extent 2 has 14
    settle(pool)
    assert pool.get_new_blocks(1) == [blocks[20]]


def test_what_is_fullest_changes_in_debt() -> None:
    pool = elastic_pool(48, 16, resident=3)
    blocks = pool.get_new_blocks(47)
    queue = pool.free_block_queue
    cached_content(pool, [blocks[20], blocks[40]])  # extents 1 and 2, 15 in use each
    queue.debt_blocks = 1
    cached_content(pool, blocks[21:24])  # extent 1 has 12
    assert pool.get_new_blocks(1) == [blocks[40]]
    pool.touch(blocks[21:24])
    cached_content(pool, blocks[40:43])  # extent 1 has 15 again, extent 2 has 13
    assert pool.get_new_blocks(1) == [blocks[20]]


def test_a_short_last_extent_in_use_throughout_is_not_picked_from_in_debt() -> None:
    pool = elastic_pool(36, 16, resident=3)
    blocks = pool.get_new_blocks(35)
    pool.free_blocks(blocks[:3])
    pool.free_block_queue.debt_blocks = 1
    assert pool.get_new_blocks(2) == blocks[:2]


def test_idle_cached_extents_are_picked_from_before_idle_clean_ones() -> None:
    """The clean ones can be given back at no cost."""
    pool = elastic_pool(64, 16, resident=4)
    blocks = pool.get_new_blocks(15 + 16)
    cached_content(pool, blocks[15:20])
    pool.free_blocks(blocks[20:])
    assert pool.free_block_queue.num_idle_cached_extents == 1
    assert {block.block_id // 16 for block in pool.get_new_blocks(3)} == {1}


def test_clean_blocks_go_before_any_content_is_evicted() -> None:
    pool = elastic_pool(33, 16, resident=2)
    blocks = pool.get_new_blocks(31)
    content = cached_content(pool, blocks[:20])
    pool.free_blocks(blocks[20:])
    pool.get_new_blocks(11)
    assert all(block.block_hash is not None for block in content)
    assert ids(pool.get_new_blocks(2)) == ids(content[:2])


def test_content_is_evicted_in_the_order_of_use() -> None:
    pool = elastic_pool(32, 4, resident=8)
    blocks = pool.get_new_blocks(31)
    first, second = cached_content(pool, blocks[:20]), cached_content(pool, blocks[20:])
    pool.touch(first[:5])
    pool.free_blocks(first[:5])
    assert ids(pool.get_new_blocks(31)) == ids(first[5:] + second + first[:5])


def test_a_retiring_extent_takes_its_content_with_it_and_says_so() -> None:
    pool = elastic_pool(64, 16, resident=4, events=True)
    blocks = pool.get_new_blocks(40)
    cached_content(pool, blocks[:31])
    pool.take_events()
    assert pool.free_block_queue.take_idle(cached=True) == 1
    removed = [event for event in pool.take_events() if isinstance(event, BlockRemoved)]
    assert len(removed) == 16
    assert sum(block.block_hash is not None for block in blocks) == 15


def test_content_that_came_to_a_clean_block_is_evicted_with_its_extent() -> None:
    pool = elastic_pool(64, 16, resident=2)
    block = pool.free_block_queue.get_all_free_blocks()[-1]
    cache(pool, [block])
    assert pool.free_block_queue.take_idle(cached=False) == 1
    assert block.block_hash is None


def test_the_extent_used_least_recently_retires_first() -> None:
    pool = elastic_pool(64, 16, resident=4)
    blocks = pool.get_new_blocks(63)
    cached_content(pool, blocks[:31])  # extents 0 and 1
    cached_content(pool, blocks[31:])  # extents 2 and 3
    pool.touch(blocks[16:17])
    pool.free_blocks(blocks[16:17])  # extent 1 is now the one used last
    queue = pool.free_block_queue
    assert [queue.take_idle(cached=True) for _ in range(4)] == [2, 3, 1, None]


def test_a_block_that_is_not_free_cannot_be_removed() -> None:
    pool = elastic_pool(32, 16, resident=1)
    (block,) = pool.get_new_blocks(1)
    queue = pool.free_block_queue
    queue.arrived(queue.take_absent(1))
    assert queue.take_idle(cached=False) == 1
    for not_free in (block, pool.null_block, pool.blocks[20]):
        with pytest.raises(RuntimeError, match="not free"):
            pool.free_block_queue.remove(not_free)


def test_a_block_freed_twice_is_our_bug_and_named() -> None:
    pool = elastic_pool(32, 16, resident=2)
    blocks = pool.get_new_blocks(31)
    pool.free_block_queue.prepend_n(blocks[20:22])
    pool.free_block_queue.prepend_n(blocks[21:22])
    with pytest.raises(InvariantError, match="extent 1 freed twice"):
        settle(pool)


def test_reset_succeeds_with_most_extents_absent() -> None:
    pool = elastic_pool(1000, 16, resident=3)
    queue = pool.free_block_queue
    content = cached_content(pool, pool.get_new_blocks(40))
    assert not pool.reset_prefix_cache()
    with queue.counting_absent():
        assert pool.reset_prefix_cache()
    queue.forget_cache()
    assert all(block.block_hash is None for block in content)
    assert (queue.num_clean_blocks, queue.num_cached_blocks, queue.num_idle_clean_extents) == (47, 0, 2)


def test_reset_fails_while_a_request_runs_and_then_nothing_is_forgotten() -> None:
    pool = elastic_pool(1000, 16, resident=3)
    blocks = pool.get_new_blocks(2)
    cached_content(pool, blocks[1:])
    with pool.free_block_queue.counting_absent():
        assert not pool.reset_prefix_cache()
    pool.free_block_queue.forget_cache()
    assert pool.free_block_queue.num_cached_blocks == 1


def test_debt_hides_blocks_until_it_is_paid() -> None:
    pool = elastic_pool(64, 16, resident=4)
    queue = pool.free_block_queue
    queue.debt_blocks = 32
    assert pool.get_num_free_blocks() == 31
    pool.get_new_blocks(20)
    queue.debt_blocks = 64
    assert pool.get_num_free_blocks() == 0
    with pytest.raises(ValueError, match="No free blocks"):
        queue.popleft()
    queue.debt_blocks = 0
    assert pool.get_num_free_blocks() == 43


def test_in_debt_the_emptiest_extents_drain_though_all_content_is_cached() -> None:
    """Requests come and go for ever, and everything free is cached: in the order of use nothing would drain."""

    def churn(pool: BlockPool, steps: int) -> int:
        queue, retired = pool.free_block_queue, 0
        running: list[list[KVCacheBlock]] = []
        for _ in range(steps):
            while len(running) > 4 or pool.get_num_free_blocks() < 7:
                cached_content(pool, running.pop(0))
            running.append(pool.get_new_blocks(7))
            while queue.debt_blocks and queue.take_idle(cached=True) is not None:
                retired += 1
                queue.debt_blocks = max(0, queue.debt_blocks - 16)
        return retired

    pool = elastic_pool(12 * 16, 16, resident=12)
    churn(pool, 200)
    pool.free_block_queue.debt_blocks = 8 * 16
    assert churn(pool, 60) == 8
    assert pool.free_block_queue.extents.num_resident == 4


def test_usage_is_a_share_of_what_is_attainable() -> None:
    pool = elastic_pool(160, 16, resident=4)
    queue = pool.free_block_queue
    pool.get_new_blocks(31)
    assert (queue.num_used_blocks, queue.num_attainable_blocks) == (31, 159)
    queue.attainable_extents = 4
    assert queue.num_attainable_blocks == 63
    queue.attainable_extents = 1
    assert queue.num_attainable_blocks == 31


def test_a_walk_goes_on_behind_a_cached_cursor_and_starts_anew_behind_any_other() -> None:
    pool = elastic_pool(64, 16, resident=3)
    queue = pool.free_block_queue
    content = cached_content(pool, pool.get_new_blocks(31))
    every = ids(queue.get_all_free_blocks())
    assert ids(list(queue.iter_blocks_after(content[10]))) == ids(content[11:])
    pool.touch(content[10:11])
    pool.free_blocks(content[10:11])
    assert list(queue.iter_blocks_after(content[10])) == []  # used last, so the walk has come to its end
    retired = queue.take_idle(cached=True)
    assert retired == content[-1].block_id // 16
    left = ids(queue.get_all_free_blocks())
    assert set(left) == {block_id for block_id in every if block_id // 16 != retired}
    assert ids(list(queue.iter_blocks_after(content[-1]))) == left


def test_a_million_blocks_take_little_memory_beyond_vllms_own() -> None:
    pool = BlockPool(1_000_000, enable_caching=True, hash_block_size=BLOCK_SIZE)
    queue = ElasticFreeQueue(pool, 16)
    own = [queue._clean, queue._free, *vars(queue._with_clean).values(), *vars(queue._idle_cached).values()]
    own += [queue.extents._states]
    # Measured 2.7 MB: 8 + 8 bytes of lists, 2 x 12 of links and 1 of state per extent of 16 blocks.
    assert sum(map(sys.getsizeof, own)) < 4_000_000
