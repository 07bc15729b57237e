"""Where tensors lie: every byte of every buffer is its own, and within its block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcached_core.config import Settings
from kvcached_core.errors import InvariantError, UnsupportedError
from kvcached_core.geometry import Geometry, Stripe
from kvcached_sglang.placement import PLACES, Buffer, Placement, Request, Rows, Wanted, token_major

MIB = 1 << 20
GRANULARITY = 256  # of no device; small enough that a drawn pool has many pages


def wanted_mha(layers: int, num_blocks: int, tokens_per_block: int, k: int, v: int, dtype: torch.dtype) -> Wanted:
    """What ``MHATokenToKVPool`` asks for, rows in elements: one tensor a layer where they are of one width."""
    rows, item = num_blocks * tokens_per_block, dtype.itemsize
    if k == v:
        requests = [Request((2, rows, 1, k), dtype)] * layers
        places = [(layer, part * rows * k * item, k) for part in range(2) for layer in range(layers)]
    else:
        requests = [Request((rows, 1, width), dtype) for width in (k, v) for _ in range(layers)]
        places = [(index, 0, request.shape[-1]) for index, request in enumerate(requests)]
    buffers = [Buffer(index, offset, width * item, rows) for index, offset, width in places]
    return Wanted(requests, buffers, num_blocks, tokens_per_block)


def wanted_mla(layers: int, num_blocks: int, tokens_per_block: int, width: int, dtype: torch.dtype) -> Wanted:
    """What ``MLATokenToKVPool`` asks for: one row a layer."""
    rows = num_blocks * tokens_per_block
    buffers = [Buffer(layer, 0, width * dtype.itemsize, rows) for layer in range(layers)]
    return Wanted([Request((rows, 1, width), dtype)] * layers, buffers, num_blocks, tokens_per_block)


@st.composite
def pools(draw: st.DrawFn) -> Wanted:
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
    layers, num_blocks, tokens_per_block = draw(st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 16)))
    k, v = (16 // dtype.itemsize * draw(st.integers(1, 5)) for _ in "kv")
    if draw(st.booleans()):
        return wanted_mla(layers, num_blocks, tokens_per_block, k, dtype)
    return wanted_mha(layers, num_blocks, tokens_per_block, k, draw(st.sampled_from([k, v])), dtype)


@given(pools(), st.sampled_from(sorted(PLACES)), st.sampled_from([None, GRANULARITY, 5 * GRANULARITY]))
def test_every_byte_is_one_buffers_and_in_its_block(wanted: Wanted, layout: str, page_bytes: int | None):
    placement = PLACES[layout](wanted, GRANULARITY, page_bytes)
    owner = torch.zeros(placement.geometry.size_bytes, dtype=torch.uint8)
    for buffer, rows in zip(wanted.buffers, placement.buffers, strict=True):
        assert (rows.row_bytes, rows.num_rows) == (buffer.row_bytes, buffer.num_rows)
        bytes_of = owner.as_strided((rows.num_rows, rows.row_bytes), (rows.stride_bytes, 1), rows.offset_bytes)
        bytes_of += 1
        rows_per_block = rows.num_rows // wanted.num_blocks
        for block in range(wanted.num_blocks):
            within = placement.geometry.byte_ranges(range(block, block + 1))
            for row in range(block * rows_per_block, (block + 1) * rows_per_block):
                start = rows.offset_bytes + row * rows.stride_bytes
                assert any(first <= start and start + rows.row_bytes <= end for first, end in within)
    assert int(owner.max()) == 1
    assert int(owner.sum()) == sum(request.size_bytes for request in wanted.requests)


@given(pools(), st.sampled_from(sorted(PLACES)))
def test_buffers_are_those_parts_of_the_requested_tensors_that_the_pool_takes(wanted: Wanted, layout: str):
    """Indexed as SGLang does: ``fused[0]`` and ``fused[1]``, or the tensor itself."""
    placement = PLACES[layout](wanted, GRANULARITY, None)
    for buffer, rows in zip(wanted.buffers, placement.buffers, strict=True):
        offset, strides = placement.tensors[buffer.request]
        if wanted.has_halves(buffer.request):
            offset += strides[0] * (buffer.offset_bytes > 0)
            strides = strides[1:]
        assert (offset, strides[0]) == (rows.offset_bytes, rows.stride_bytes)


@given(pools())
def test_the_rows_of_a_token_lie_together(wanted: Wanted):
    placement = token_major(wanted, GRANULARITY, None)
    [entry_bytes] = {rows.stride_bytes for rows in placement.buffers}
    ends = [rows.offset_bytes + rows.row_bytes for rows in placement.buffers]
    assert entry_bytes % 32 == 0
    assert max(ends) <= entry_bytes < max(ends) + 32
    assert len(placement.geometry.stripes) == 1


def test_an_idle_8b_server_holds_one_page_of_64_mib():
    """32 layers, 8 KV heads of 128, bfloat16."""
    wanted = wanted_mha(32, 65536 + 1, 1, 1024, 1024, torch.bfloat16)
    geometry = token_major(wanted, 2 * MIB, None).geometry
    assert geometry.page_bytes == 64 * MIB
    assert geometry.extent_bytes == 64 * MIB
    assert not geometry.extents_share_pages
    assert geometry.num_extents == 65536 // 512 + 1


@pytest.mark.parametrize(("layers", "tokens"), [(10, 100_000), (52, 80_000), (52, 16_000)])
def test_a_second_pool_with_the_firsts_pages_can_still_grow_and_shrink(layers: int, tokens: int):
    """Gemma-3-27B: 10 layers of full attention, 52 of windows; the pools' tokens are a flag's business."""
    first = token_major(wanted_mha(10, 100_001, 1, 2048, 2048, torch.bfloat16), 2 * MIB, None).geometry
    second = token_major(wanted_mha(layers, tokens + 1, 1, 2048, 2048, torch.bfloat16), 2 * MIB, first.page_bytes)
    assert second.geometry.num_extents >= 64
    assert second.geometry.extent_bytes <= 2 * first.page_bytes


@pytest.mark.parametrize(
    ("offset", "stride", "row", "apart"),
    [
        pytest.param(16, 64, 16, True, id="in the gaps"),
        pytest.param(48, 64, 16, True, id="up to the next row"),
        pytest.param(48, 64, 32, False, id="onto the next row"),
        pytest.param(8, 64, 16, False, id="onto the same row"),
        pytest.param(16, 32, 16, False, id="at another distance"),
        pytest.param(208, 32, 16, True, id="behind the last row"),
    ],
)
def test_rows_are_apart_where_no_byte_is_in_both(offset: int, stride: int, row: int, apart: bool):
    first, second = Rows(0, 64, 16, 4), Rows(offset, stride, row, 4)
    assert first.is_apart_from(second) == second.is_apart_from(first) == apart


def test_a_tensor_that_is_no_layers_k_nor_v_nor_both_cannot_be_token_major():
    wanted = Wanted([Request((1, 8, 1, 16), torch.uint8)], [Buffer(0, 0, 16, 8)], 8, 1)
    with pytest.raises(UnsupportedError, match=r"shape \(1, 8, 1, 16\) is not the rows of 8 tokens"):
        token_major(wanted, GRANULARITY, None)


ENTRY = Geometry(4, (Stripe(0, 64, 64),), 256, 256, 4)


@pytest.mark.parametrize(
    ("offset", "stride", "row", "wrong"),
    [
        pytest.param(16, 64, 32, "overlap", id="onto the row behind it"),
        pytest.param(32, 64, 16, "overlap", id="onto another"),
        pytest.param(48, 64, 32, "has its blocks", id="into the next token"),
        pytest.param(0, 32, 16, "has its blocks", id="at another distance"),
    ],
)
def test_a_misplaced_buffer_is_found_before_it_is_used(offset: int, stride: int, row: int, wrong: str):
    with pytest.raises(InvariantError, match=wrong):
        Placement(ENTRY, [], [Rows(offset, stride, row, 4), Rows(32, 64, 16, 4)])


def test_the_layouts_are_called_as_the_setting_has_them():
    for name in PLACES:
        assert Settings.load({"KVCACHED_LAYOUT": name}).layout == name
