"""SGLang's own allocators over resident ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcached_sglang.allocator import (
    ElasticPagedAllocator,
    ElasticSWAAllocator,
    ElasticTokenAllocator,
    elastic_like,
    has_elastic_kind,
)
from kvcached_sglang.space import Space
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool

from tests.sglang.test_pools import make_mha, rebuild

Make = Callable[..., tuple[Any, Space]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes an elastic allocator and its space; extent 0 is resident."""
    arenas = []

    def build(page_size: int = 1, need_sort: bool = False) -> tuple[Any, Space]:
        pool = make_mha(page_size=page_size)
        elastic = rebuild(pool, page_bytes=4096 if page_size == 1 else 4 * 4096)
        arenas.append(elastic.arena)
        space = Space("full", elastic.geometry, page_size)
        space.back(elastic, range(elastic.geometry.num_extents))
        if page_size == 1:
            native = TokenToKVPoolAllocator(pool.size, pool.dtype, "cpu", pool, need_sort)
        else:
            native = PagedTokenToKVPoolAllocator(pool.size, page_size, pool.dtype, "cpu", pool, need_sort)
        return elastic_like(native, space), space

    yield build
    for arena in arenas:
        arena.close()


def grow(space: Space, num_extents: int = 1) -> list[int]:
    ids = space.extents.take_absent(num_extents)
    space.arrived(ids)
    space.free_list.add(space.usable_ranges(ids))
    return ids


PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 64])


@PAGE_SIZES
def test_only_resident_ids_are_handed_out(make, page_size):
    allocator, space = make(page_size)
    resident = space.num_resident_blocks * page_size
    assert allocator.available_size() == resident
    ids = allocator.alloc(resident)
    assert ids is not None
    assert ids.tolist() == list(range(page_size, page_size + resident))
    assert allocator.alloc(page_size) is None


@PAGE_SIZES
def test_the_padding_page_is_never_handed_out(make, page_size):
    allocator, space = make(page_size)
    ids = allocator.alloc(space.num_resident_blocks * page_size)
    assert int(ids.min()) == page_size


@PAGE_SIZES
def test_growth_adds_the_ids_of_an_extent(make, page_size):
    allocator, space = make(page_size)
    allocator.alloc(allocator.available_size())
    [extent] = grow(space)
    ids = allocator.alloc(space.extent_tokens)
    blocks = space.geometry.blocks_of(extent)
    assert ids.tolist() == list(range(blocks.start * page_size, blocks.stop * page_size))


@PAGE_SIZES
def test_conserved_size_is_the_capacity_less_what_is_used(make, page_size):
    allocator, space = make(page_size)
    grow(space, 2)
    assert allocator.conserved_size() == allocator.size
    allocator.alloc(3 * page_size)
    assert allocator.conserved_size() == allocator.size - 3 * page_size


@PAGE_SIZES
def test_clear_frees_every_resident_id_and_no_other(make, page_size):
    allocator, space = make(page_size)
    grow(space, 2)
    allocator.alloc(allocator.available_size())
    allocator.clear()
    assert allocator.num_free == space.num_resident_blocks
    assert allocator.conserved_size() == allocator.size


@PAGE_SIZES
def test_credit_counts_for_admission_and_gives_no_id(make, page_size):
    allocator, space = make(page_size)
    free = allocator.available_size()
    space.credit_tokens = 10 * page_size
    assert allocator.available_size() == free + 10 * page_size
    assert allocator.alloc(free + page_size) is None


@PAGE_SIZES
def test_debt_hides_free_pages_from_admission_and_allocates_them_still(make, page_size):
    allocator, space = make(page_size)
    free = allocator.available_size()
    space.credit_tokens = -2 * free
    assert allocator.available_size() == 0
    assert allocator.alloc(free) is not None


@PAGE_SIZES
def test_removing_an_extent_takes_its_ids_only(make, page_size):
    allocator, space = make(page_size)
    first, second = grow(space, 2)
    allocator.remove([first])
    left = set((allocator.free_pages // space.blocks_per_extent).tolist())
    assert left == {0, second}


@PAGE_SIZES
def test_free_pages_are_counted_per_extent(make, page_size):
    allocator, space = make(page_size)
    [extent] = grow(space)
    taken = allocator.alloc(page_size)
    counts = allocator.free_per_extent()
    assert counts[0] == space.blocks_per_extent - 2  # the padding page and the one taken
    assert counts[extent] == space.blocks_per_extent
    assert sum(counts) == allocator.num_free
    allocator.free(taken)
    assert allocator.free_per_extent()[0] == space.blocks_per_extent - 1


def test_concentrating_hands_out_the_lowest_ids_first(make):
    allocator, space = make()
    grow(space, 3)
    taken = allocator.alloc(allocator.available_size())
    allocator.free(taken.flip(0))
    allocator.concentrate()
    assert allocator.alloc(5).tolist() == [1, 2, 3, 4, 5]


@PAGE_SIZES
def test_an_allocation_that_would_fail_asks_for_supply_first(make, page_size):
    allocator, space = make(page_size)
    asked = []

    def supply(space: Space, num_blocks: int) -> None:
        asked.append(num_blocks)
        grow(space)

    space.supply = supply
    free = allocator.available_size()
    assert allocator.alloc(free) is not None
    assert asked == []
    assert allocator.alloc(page_size) is not None
    assert asked == [1]


def test_extending_asks_for_exactly_the_pages_it_needs(make):
    allocator, space = make(page_size=64)
    asked = []
    space.supply = lambda _, num_blocks: asked.append(num_blocks)
    lens = torch.tensor([0]), torch.tensor([0]), torch.tensor([200]), torch.tensor([200]), torch.tensor([-1])
    grow(space)
    while allocator.num_free > 4:
        allocator.alloc(64)
    ids = allocator.alloc_extend(*lens, extend_num_tokens=200)  # 4 pages; the bound on them is 5
    assert ids is not None
    assert asked == []
    assert allocator.alloc_extend(*lens, extend_num_tokens=200) is None
    assert asked == [4]


def test_decoding_asks_only_when_a_page_is_needed(make):
    allocator, space = make(page_size=64)
    asked = []
    space.supply = lambda _, num_blocks: asked.append(num_blocks)
    while allocator.num_free:
        allocator.alloc(64)
    within = torch.tensor([130])  # the 130th token lies within its page
    assert allocator.alloc_decode(within, within, torch.tensor([128 + 64])) is not None
    assert asked == []
    across = torch.tensor([129])
    assert allocator.alloc_decode(across, across, torch.tensor([127])) is None
    assert asked == [1]


class _SWAPool(BaseSWAKVPool):
    """The two sub-pools of a hybrid model, as its allocator sees them."""

    swa_req_ring_size = None

    def __init__(self, full: Any, swa: Any) -> None:
        self.full_kv_pool = full
        self.swa_kv_pool = swa
        self.full_to_swa_index_mapping = None

    def register_mapping(self, mapping: torch.Tensor) -> None:
        self.full_to_swa_index_mapping = mapping

    def translate_loc_from_full_to_swa(self, ids: torch.Tensor) -> torch.Tensor:
        return self.full_to_swa_index_mapping[ids]

    def _unused(self, *_: Any) -> Any:
        raise NotImplementedError

    get_state_buf_infos = get_key_buffer = get_kv_buffer = get_value_buffer = set_kv_buffer = _unused


def test_sliding_window_has_a_space_of_its_own(make):
    arenas, spaces = [], []
    pools = [make_mha(), make_mha(size=1024)]
    for name, pool in zip(("full", "swa"), pools, strict=True):
        elastic = rebuild(pool, page_bytes=4096)
        arenas.append(elastic.arena)
        space = Space(name, elastic.geometry, 1)
        space.back(elastic, range(elastic.geometry.num_extents))
        spaces.append(space)
    kv_pool = _SWAPool(*pools)
    native = SWATokenToKVPoolAllocator(4096, 1024, 1, torch.float16, "cpu", kv_pool, False)
    assert has_elastic_kind(native)
    allocator = ElasticSWAAllocator(*spaces, 4096, 1024, 1, torch.float16, "cpu", kv_pool, False)
    assert allocator.full_available_size() == spaces[0].num_resident_blocks
    assert allocator.swa_available_size() == spaces[1].num_resident_blocks
    ids = allocator.alloc(10)
    assert kv_pool.translate_loc_from_full_to_swa(ids).tolist() == list(range(1, 11))
    for space in spaces:
        space.credit_tokens = 1 << 30  # SGLang asserts, as it frees, that no more is available than there is
    allocator.free_group_begin()
    allocator.free(ids)
    allocator.free_group_end()
    assert spaces[1].free_list.conserved_size() == 1024
    for arena in arenas:
        arena.close()


def test_kinds():
    pool = SimpleNamespace()
    assert has_elastic_kind(TokenToKVPoolAllocator(8, torch.float16, "cpu", pool, False))
    assert not has_elastic_kind(TokenToKVPoolAllocator(8, torch.float16, "cpu", pool, True))  # disaggregation
    assert not has_elastic_kind(ElasticTokenAllocator.__new__(ElasticTokenAllocator))
    assert not has_elastic_kind(ElasticPagedAllocator.__new__(ElasticPagedAllocator))
