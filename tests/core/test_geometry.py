"""Claims of geometry.py, beside a model that looks at every byte."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcached_core.errors import ConfigError, InvariantError
from kvcached_core.geometry import Geometry, Stripe, extent_block_ranges, merge_stripes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def block_major(block_bytes: int, num_blocks: int) -> tuple[list[Stripe], int, int]:
    return [Stripe(0, block_bytes, block_bytes)], num_blocks, block_bytes * num_blocks


def layer_major(block_bytes: int, num_layers: int, num_blocks: int) -> tuple[list[Stripe], int, int]:
    layer_bytes = block_bytes * num_blocks
    stripes = [Stripe(layer * layer_bytes, block_bytes, block_bytes) for layer in range(num_layers)]
    return stripes, num_blocks, layer_bytes * num_layers


def bytes_of(stripes: Iterable[Stripe], blocks: range) -> set[int]:
    return {
        stripe.offset_bytes + block_id * stripe.stride_bytes + byte
        for stripe in stripes
        for block_id in blocks
        for byte in range(stripe.length_bytes)
    }


@st.composite
def stripe_lists(draw: st.DrawFn) -> list[Stripe]:
    """A few stripes anywhere: apart, interleaved within one another's gaps, or overlapping."""
    stripes = []
    for _ in range(draw(st.integers(1, 4))):
        stride = draw(st.integers(1, 40))
        stripes.append(Stripe(draw(st.integers(0, 90)), stride, draw(st.integers(1, stride))))
    return stripes


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    stripes = draw(stripe_lists())
    num_blocks = draw(st.integers(1, 12))
    end = max(stripe.span(range(num_blocks))[1] for stripe in stripes)
    return Geometry(
        num_blocks,
        merge_stripes(stripes),
        end + draw(st.integers(0, 9)),
        draw(st.integers(1, 50)),
        draw(st.integers(1, 5)),
    )


@st.composite
def geometries_with_blocks(draw: st.DrawFn) -> tuple[Geometry, range]:
    geometry = draw(geometries())
    start = draw(st.integers(0, geometry.num_blocks - 1))
    return geometry, range(start, draw(st.integers(start + 1, geometry.num_blocks)))


def assert_ascending_and_apart(ranges: list[tuple[int, int]]) -> None:
    assert all(start < stop for start, stop in ranges)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ranges))


@given(geometries_with_blocks())
def test_byte_ranges_are_the_bytes_of_the_blocks(case: tuple[Geometry, range]) -> None:
    geometry, blocks = case
    ranges = geometry.byte_ranges(blocks)
    assert_ascending_and_apart(ranges)
    assert {byte for start, stop in ranges for byte in range(start, stop)} == bytes_of(geometry.stripes, blocks)


@given(geometries_with_blocks())
def test_page_ranges_are_the_pages_of_those_bytes(case: tuple[Geometry, range]) -> None:
    geometry, blocks = case
    ranges = geometry.page_ranges(blocks)
    assert_ascending_and_apart([(pages.start, pages.stop) for pages in ranges])
    pages = {page for pages in ranges for page in pages}
    assert pages == {byte // geometry.page_bytes for byte in bytes_of(geometry.stripes, blocks)}
    assert max(pages) < geometry.num_pages


@given(geometries(), st.data())
def test_worst_case_pages_is_an_upper_bound(geometry: Geometry, data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, geometry.num_blocks))
    multiple = data.draw(st.integers(1, 4))
    bound = geometry.worst_case_pages(num_blocks, multiple_of=multiple)
    for start in range(0, geometry.num_blocks - num_blocks + 1, multiple):
        assert sum(map(len, geometry.page_ranges(range(start, start + num_blocks)))) <= bound


@given(st.integers(1, 40), st.data())
def test_worst_case_pages_is_reached_by_one_stripe_with_room_for_every_start(stride: int, data: st.DataObject) -> None:
    page, num_blocks = data.draw(st.integers(1, 50)), data.draw(st.integers(1, 6))
    stripe = Stripe(data.draw(st.integers(0, 60)), stride, stride)
    blocks = num_blocks + page
    geometry = Geometry(blocks, (stripe,), stripe.span(range(blocks))[1], page, 1)
    worst = max(
        sum(map(len, geometry.page_ranges(range(start, start + num_blocks))))
        for start in range(blocks - num_blocks + 1)
    )
    assert geometry.worst_case_pages(num_blocks) == worst


@given(geometries())
def test_an_extent_costs_at_most_extent_bytes(geometry: Geometry) -> None:
    for extent_id in range(geometry.num_extents):
        pages = sum(map(len, geometry.page_ranges(geometry.blocks_of(extent_id))))
        assert pages * geometry.page_bytes <= geometry.extent_bytes


@given(st.integers(1, 24), st.integers(1, 4), st.integers(1, 40), st.integers(1, 24), st.integers(1, 8))
def test_extents_share_no_page_if_it_says_so(block: int, layers: int, blocks: int, page: int, extent: int) -> None:
    stripes, num_blocks, size = layer_major(block, layers, blocks)
    geometry = Geometry(num_blocks, merge_stripes(stripes), size, page, extent)
    pages = [geometry.page_ranges(geometry.blocks_of(extent_id)) for extent_id in range(geometry.num_extents)]
    touched = [page for ranges in pages for run in ranges for page in run]
    assert geometry.extents_share_pages or len(touched) == len(set(touched))


@given(geometries())
def test_every_block_is_in_exactly_one_extent(geometry: Geometry) -> None:
    blocks = [block_id for extent_id in range(geometry.num_extents) for block_id in geometry.blocks_of(extent_id)]
    assert blocks == list(range(geometry.num_blocks))
    assert all(block_id in geometry.blocks_of(geometry.extent_of(block_id)) for block_id in blocks)


@given(geometries(), st.data())
def test_block_ranges_join_neighbours_only(geometry: Geometry, data: st.DataObject) -> None:
    extent_ids = data.draw(st.sets(st.integers(0, geometry.num_extents - 1)))
    ranges = geometry.block_ranges(data.draw(st.permutations(sorted(extent_ids))))
    assert_ascending_and_apart([(blocks.start, blocks.stop) for blocks in ranges])
    assert [b for blocks in ranges for b in blocks] == [b for e in sorted(extent_ids) for b in geometry.blocks_of(e)]


@given(stripe_lists(), st.integers(1, 8))
def test_merging_keeps_every_byte_of_every_block(stripes: list[Stripe], num_blocks: int) -> None:
    merged = merge_stripes(stripes)
    assert len(merged) <= len(stripes)
    for block_id in range(num_blocks):
        blocks = range(block_id, block_id + 1)
        assert bytes_of(merged, blocks) == bytes_of(stripes, blocks)


def test_groups_that_lie_on_one_another_are_one_stripe() -> None:
    assert merge_stripes([Stripe(0, 64, 48), Stripe(0, 64, 64), Stripe(0, 64, 32)]) == (Stripe(0, 64, 64),)


def test_a_block_described_layer_by_layer_is_one_stripe() -> None:
    assert merge_stripes(Stripe(layer * 16, 64, 16) for layer in (2, 0, 3, 1)) == (Stripe(0, 64, 64),)


def test_layers_in_regions_of_their_own_stay_stripes() -> None:
    assert len(merge_stripes(layer_major(16, 4, 8)[0])) == 4


def test_page_ranges_take_time_per_stripe_not_per_block() -> None:
    stripes, num_blocks, size = layer_major(4 * KIB, 32, 4_000_000)
    geometry = Geometry(num_blocks, merge_stripes(stripes), size, 2 * MIB, 512)
    started = time.perf_counter()
    ranges = geometry.page_ranges(range(1, num_blocks - 1))
    # Measured 0.03 ms; looking at 4,000,000 blocks would take seconds.
    assert time.perf_counter() - started < 0.05
    assert len(ranges) == 1


@pytest.mark.parametrize(
    ("blocks", "why"),
    [(range(0), "empty"), (range(-1, 2), "before"), (range(9), "behind"), (range(0, 4, 2), "not consecutive")],
)
def test_a_run_that_is_none_is_refused(blocks: range, why: str) -> None:
    geometry = Geometry(8, (Stripe(0, 4, 4),), 32, 8, 2)
    with pytest.raises(InvariantError, match="no run of blocks"):
        geometry.page_ranges(blocks)


def test_a_stripe_that_ends_behind_the_arena_is_refused() -> None:
    with pytest.raises(InvariantError, match="end at byte 32 of an arena of 31 bytes"):
        Geometry(8, (Stripe(0, 4, 4),), 31, 8, 2)


# What `choose` answers for models as they are, on a device with 2 MiB granularity: page, blocks and bytes per extent.


@pytest.mark.parametrize(
    ("shape", "page_bytes", "blocks_per_extent"),
    [
        pytest.param(block_major(2 * MIB, 70_000), 64 * MIB, 32, id="Llama-8B: 32 blocks are a page"),
        pytest.param(block_major(192 * KIB, 700_000), 60 * MIB, 320, id="Qwen2.5-0.5B: 60 MiB, no page is shared"),
        pytest.param(block_major(27 * 18 * KIB, 200_000), 64 * MIB, 134, id="DeepSeek-V2-Lite MLA: pages are shared"),
        pytest.param(block_major(50 * MIB, 2_000), 50 * MIB, 1, id="linear attention: a block is a page"),
        pytest.param(block_major(37 * MIB, 2_000), 18 * MIB, 1, id="linear attention: a block that fills no pages"),
        pytest.param(layer_major(64 * KIB, 32, 64_000), 8 * MIB, 128, id="Llama-8B layer-major: 32 pages of 8 MiB"),
        pytest.param(layer_major(64 * KIB, 64, 64_000), 4 * MIB, 64, id="64 layers: 64 pages of 4 MiB"),
        pytest.param(layer_major(18 * KIB, 61, 100_000), 4 * MIB, 227, id="DeepSeek-V3 MLA layer-major"),
    ],
)
def test_chosen_for_models(shape: tuple[list[Stripe], int, int], page_bytes: int, blocks_per_extent: int) -> None:
    geometry = Geometry.choose(*shape, granularity_bytes=2 * MIB)
    assert (geometry.page_bytes, geometry.blocks_per_extent) == (page_bytes, blocks_per_extent)


def test_an_mla_extent_is_not_the_fewest_blocks_that_fill_whole_pages() -> None:
    # 18 KiB blocks fill whole 32 MiB pages every 16384 blocks: 17 GiB over 61 layers.
    geometry = Geometry.choose(*layer_major(18 * KIB, 61, 100_000), granularity_bytes=2 * MIB)
    assert geometry.blocks_per_extent * 61 * 18 * KIB <= 256 * MIB


@st.composite
def shapes(draw: st.DrawFn) -> tuple[list[Stripe], int, int, int]:
    granularity = draw(st.sampled_from([4 * KIB, 64 * KIB, 2 * MIB]))
    block_bytes = draw(st.integers(1, 64)) * draw(st.sampled_from([512, 18 * KIB, 64 * KIB, 3 * MIB]))
    num_blocks = draw(st.integers(1, 50_000))
    num_layers = draw(st.one_of(st.just(1), st.integers(24, 64)))
    return *layer_major(block_bytes, num_layers, num_blocks), granularity


@given(shapes())
def test_chosen_pages_and_extents_keep_their_bounds(shape: tuple[list[Stripe], int, int, int]) -> None:
    stripes, num_blocks, size, granularity = shape
    geometry = Geometry.choose(stripes, num_blocks, size, granularity_bytes=granularity)
    limit = 64 * MIB if len(geometry.stripes) == 1 else 8 * MIB
    assert geometry.page_bytes % granularity == 0
    assert granularity <= geometry.page_bytes <= max(limit, granularity)
    assert 1 <= geometry.blocks_per_extent <= num_blocks
    stride = max(stripe.stride_bytes for stripe in geometry.stripes)
    if geometry.blocks_per_extent > 1:
        assert geometry.blocks_per_extent * stride <= geometry.page_bytes
        assert geometry.blocks_per_extent * stride * len(geometry.stripes) <= max(256 * MIB, granularity * len(stripes))


@given(shapes())
def test_an_arena_has_extents_to_move(shape: tuple[list[Stripe], int, int, int]) -> None:
    stripes, num_blocks, size, granularity = shape
    geometry = Geometry.choose(stripes, num_blocks, size, granularity_bytes=granularity)
    as_small_as_it_gets = geometry.page_bytes == granularity or geometry.blocks_per_extent == 1
    assert geometry.num_extents >= 64 or as_small_as_it_gets


@pytest.mark.parametrize("num_layers", [1, 24])
@pytest.mark.parametrize("granularity", [4 * KIB, 2 * MIB])
def test_a_cache_of_one_block_has_one_extent(num_layers: int, granularity: int) -> None:
    geometry = Geometry.choose(*layer_major(3000, num_layers, 1), granularity_bytes=granularity)
    assert (geometry.num_extents, geometry.blocks_per_extent, geometry.page_bytes) == (1, 1, granularity)


def test_a_given_page_size_is_kept() -> None:
    geometry = Geometry.choose(*block_major(2 * MIB, 1000), granularity_bytes=2 * MIB, page_bytes=6 * MIB)
    assert (geometry.page_bytes, geometry.blocks_per_extent) == (6 * MIB, 3)


def test_a_block_larger_than_the_given_page_is_an_extent() -> None:
    geometry = Geometry.choose(*block_major(50 * MIB, 100), granularity_bytes=2 * MIB, page_bytes=2 * MIB)
    assert (geometry.blocks_per_extent, geometry.extent_bytes) == (1, 50 * MIB)


@pytest.mark.parametrize(("asked", "fits"), [(3 * MIB, 2 * MIB), (1, 2 * MIB), (0, 2 * MIB), (5 * MIB, 4 * MIB)])
def test_a_page_size_that_cannot_work_is_refused_with_one_that_fits(asked: int, fits: int) -> None:
    with pytest.raises(ConfigError, match=rf"KVCACHED_PAGE_SIZE={asked} cannot work.*e\.g\. {fits}\."):
        Geometry.choose(*block_major(2 * MIB, 100), granularity_bytes=2 * MIB, page_bytes=asked)


@given(st.integers(1, 40))
def test_a_given_extent_size_is_whole_blocks(blocks: int) -> None:
    target = blocks * 4 * 8 * KIB + 5
    geometry = Geometry.choose(*layer_major(8 * KIB, 4, 100), granularity_bytes=4 * KIB, target_extent_bytes=target)
    assert geometry.blocks_per_extent == blocks


def test_extent_ranges_end_with_the_arena() -> None:
    assert extent_block_ranges([3, 0, 2], 13, 4) == [range(4), range(8, 13)]
