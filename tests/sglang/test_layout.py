"""Several pools as one arena and one geometry."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvcached_core.errors import DeviceMemoryError, InvariantError
from kvcached_sglang.layout import Arenas, Layout
from kvcached_sglang.pools import ElasticPool

from tests.sglang.test_pools import make_mha, rebuild

PAGE = 4096


@pytest.fixture
def pools() -> Iterator[list[ElasticPool]]:
    made = [rebuild(make_mha(layer_num=layers), page_bytes=PAGE) for layers in (3, 1)]
    yield made
    for pool in made:
        pool.arena.close()


@pytest.fixture
def layout(pools: list[ElasticPool]) -> Layout:
    layout = Layout(PAGE)
    for pool in pools:
        layout.add(pool)
    return layout


def test_extents_and_pages_are_numbered_through(pools, layout):
    first, second = pools
    assert layout.num_blocks == first.geometry.num_extents + second.geometry.num_extents
    assert layout.num_pages == first.arena.num_pages + second.arena.num_pages
    own = layout.page_ranges(range(first.geometry.num_extents, first.geometry.num_extents + 1))
    assert own[0].start == first.arena.num_pages


def test_every_extent_has_pages_of_its_pool_and_no_other(pools, layout):
    for extent in range(layout.num_blocks):
        [(pool, ranges)] = layout.split(layout.page_ranges(range(extent, extent + 1)))
        in_first = extent < pools[0].geometry.num_extents
        assert pool is (pools[0] if in_first else pools[1])
        number = extent - (0 if in_first else pools[0].geometry.num_extents)
        assert ranges == pool.geometry.page_ranges(pool.geometry.blocks_of(number))


def test_one_order_may_map_in_several_pools(pools, layout):
    arenas = Arenas(layout)
    last_of_first = pools[0].geometry.num_extents - 1
    pages = layout.page_ranges(range(last_of_first, last_of_first + 2))
    assert arenas.map(pages) == arenas.freed_pages(pages)
    assert [pool.arena.resident_bytes for pool in pools] == [pool.geometry.extent_bytes for pool in pools]


def test_an_extent_costs_as_much_as_the_dearest_pools(pools, layout):
    assert layout.worst_case_pages(1) * PAGE == pools[0].geometry.extent_bytes
    assert pools[0].geometry.extent_bytes == 3 * pools[1].geometry.extent_bytes


def test_unmapping_gives_back_what_mapping_took(layout):
    arenas = Arenas(layout)
    pages = layout.page_ranges(range(layout.num_blocks))
    expected = arenas.new_pages(pages)
    created = arenas.map(pages)
    assert created == expected
    assert arenas.resident_bytes == created * PAGE
    assert arenas.freed_pages(pages) == created
    assert arenas.unmap(pages) == created
    assert arenas.resident_bytes == 0


def test_pools_with_other_pages_are_refused(layout):
    other = rebuild(make_mha(), page_bytes=2 * PAGE)
    with pytest.raises(InvariantError, match="beside pages of"):
        layout.add(other)
    other.arena.close()


def test_mapping_across_pools_is_all_or_nothing(pools, layout, monkeypatch):
    arenas = Arenas(layout)

    def refuse(_):
        raise DeviceMemoryError("no page")

    monkeypatch.setattr(pools[1].arena, "map", refuse)
    last_of_first = pools[0].geometry.num_extents - 1
    with pytest.raises(DeviceMemoryError):
        arenas.map(layout.page_ranges(range(last_of_first, last_of_first + 2)))
    assert pools[0].arena.resident_bytes == 0
