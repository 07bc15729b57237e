"""Claims of layout.py, on configurations and tensors that vLLM itself makes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcached_core.errors import UnsupportedError
from kvcached_core.geometry import Geometry, Stripe
from kvcached_vllm.layout import bound_tensors, check_tensors, kv_cache_geometry, kv_cache_stripes
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

NUM_BLOCKS = 10
FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float16)
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float16, sliding_window=64)
MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=72, dtype=torch.bfloat16)
# A state that fills part of a page, as linear attention beside full attention has.
STATE = MambaSpec(
    block_size=16, shapes=((3, 40), (2, 8, 8)), dtypes=(torch.float16, torch.float32), page_size_padded=4096
)

MODELS: dict[str, list[tuple[KVCacheSpec, int]]] = {
    "full attention": [(FULL, 3)],
    "one layer": [(FULL, 1)],
    "MLA": [(MLA, 3)],
    "windows and full attention": [(FULL, 2), (WINDOW, 2), (WINDOW, 1)],
    "linear and full attention": [(FULL, 2), (STATE, 2)],
}
BLOCK_OUTERMOST = ("BLHNC", "BLNHC", "BHLNC")
LAYER_OUTERMOST = ("LBHNC", "LBNHC")


def config_of(model: str, layout: str, num_blocks: int = NUM_BLOCKS) -> KVCacheConfig:
    """What vLLM's engine core would send to a worker."""
    groups = [
        KVCacheGroupSpec([f"group{index}.layer{layer}" for layer in range(num_layers)], spec)
        for index, (spec, num_layers) in enumerate(MODELS[model])
    ]
    cache_config = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
        num_gpu_blocks_override=num_blocks,
        prefix_cache_retention_interval=None,
    )
    vllm_config: Any = SimpleNamespace(
        cache_config=cache_config, attention_config=SimpleNamespace(hisparse_config=None)
    )
    return get_kv_cache_config_from_groups(vllm_config, groups, 1 << 30)


def tensors_of(config: KVCacheConfig, layout: str) -> tuple[int, dict[str, torch.Tensor]]:
    """The views that vLLM gives to attention, over one buffer, and its address."""
    views = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[layout])
    layers: Any = {name: SimpleNamespace(kv_cache=view) for name, view in views.items()}
    first = next(iter(views.values()))
    return first.untyped_storage().data_ptr(), dict(bound_tensors(config, layers))


def combinations() -> list[tuple[str, str]]:
    mixed = {"linear and full attention"}  # only block-compact layouts take pages with padding
    return [
        (model, layout)
        for model, layout in itertools.product(MODELS, (*BLOCK_OUTERMOST, *LAYER_OUTERMOST, "LHBNC"))
        if not (model in mixed and layout in ("BHLNC", "LHBNC"))
    ]


@pytest.mark.parametrize(("model", "layout"), combinations())
def test_every_tensor_of_vllm_lies_where_the_geometry_says(model: str, layout: str) -> None:
    config = config_of(model, layout)
    geometry = kv_cache_geometry(config, granularity_bytes=4096)
    address, tensors = tensors_of(config, layout)
    assert tensors
    check_tensors(geometry, address, tensors)


@pytest.mark.parametrize(("model", "layout"), combinations())
def test_a_block_is_its_own_bytes_and_nobody_elses(model: str, layout: str) -> None:
    """Together the blocks are the whole cache, and writing one block through attention's views stays within it."""
    config = config_of(model, layout)
    geometry = kv_cache_geometry(config, granularity_bytes=4096)
    views = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[layout])
    storage = next(iter(views.values())).untyped_storage()
    raw = torch.tensor([], dtype=torch.int8).set_(storage)  # type: ignore[call-overload]
    seen = 0
    for block_id in range(NUM_BLOCKS):
        raw.zero_()
        for view in views.values():
            view[block_id].view(torch.int8).fill_(1)
        inside = torch.zeros_like(raw, dtype=torch.bool)
        for start, stop in geometry.byte_ranges(range(block_id, block_id + 1)):
            inside[start:stop] = True
            seen += stop - start
        assert not raw[~inside].any()
        assert raw[inside].any()
    assert seen <= geometry.size_bytes


@pytest.mark.parametrize("layout", BLOCK_OUTERMOST)
@pytest.mark.parametrize("model", ["full attention", "one layer", "MLA", "windows and full attention"])
def test_block_outermost_is_one_stripe(model: str, layout: str) -> None:
    config = config_of(model, layout)
    stride = config.kv_cache_tensors[0].size // NUM_BLOCKS
    assert kv_cache_stripes(config) == (Stripe(0, stride, stride),)


@pytest.mark.parametrize("layout", LAYER_OUTERMOST)
@pytest.mark.parametrize(("model", "num_stripes"), [("full attention", 3), ("MLA", 3), ("one layer", 1)])
def test_layer_outermost_is_a_stripe_per_layer(model: str, num_stripes: int, layout: str) -> None:
    assert len(kv_cache_stripes(config_of(model, layout))) == num_stripes


@pytest.mark.parametrize("layout", LAYER_OUTERMOST)
def test_groups_of_a_hybrid_model_lie_on_one_another(layout: str) -> None:
    config = config_of("windows and full attention", layout)
    assert len(config.kv_cache_tensors) == 3
    assert len(kv_cache_stripes(config)) == 2


def test_heads_outside_blocks_are_a_stripe_per_layer_and_head() -> None:
    assert len(kv_cache_stripes(config_of("full attention", "LHBNC"))) == 3 * FULL.num_kv_heads


def test_kernel_blocks_count_as_their_block() -> None:
    config = config_of("full attention", "LBNHC")
    views = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBNHC, kernel_block_sizes=[4])
    address = next(iter(views.values())).untyped_storage().data_ptr()
    assert next(iter(views.values())).shape[0] == 4 * NUM_BLOCKS
    check_tensors(kv_cache_geometry(config, granularity_bytes=4096), address, views)


def test_states_of_linear_attention_are_checked_one_by_one() -> None:
    config = config_of("linear and full attention", "BLNHC")
    address, tensors = tensors_of(config, "BLNHC")
    page = tensors["group1.layer0"].squeeze(1).squeeze(1)
    states = (page[:, :240], page[:, 240 : 240 + 512])
    check_tensors(kv_cache_geometry(config, granularity_bytes=4096), address, {"layer": states})
    elsewhere = (states[0], torch.zeros(NUM_BLOCKS, 8))
    with pytest.raises(UnsupportedError, match="layer other"):
        check_tensors(kv_cache_geometry(config, granularity_bytes=4096), address, {"other": elsewhere})


@pytest.mark.parametrize("layout", ["BLNHC", "LBNHC"])
def test_a_tensor_that_lies_elsewhere_is_refused_with_the_figures(layout: str) -> None:
    config = config_of("full attention", layout)
    address, tensors = tensors_of(config, layout)
    geometry = kv_cache_geometry(config, granularity_bytes=4096)
    lied = Geometry(NUM_BLOCKS, tuple(Stripe(s.offset_bytes, s.stride_bytes // 2, s.stride_bytes // 2)
                                      for s in geometry.stripes), geometry.size_bytes, 4096, 1)  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"layer group0\.layer\d keeps block [01] at bytes \d+ to \d+"):
        check_tensors(lied, address, tensors)


def test_a_wrong_stride_is_found_though_block_0_is_right() -> None:
    config = config_of("one layer", "LBNHC")
    address, tensors = tensors_of(config, "LBNHC")
    (name, view), = tensors.items()  # fmt: skip
    stretched = torch.as_strided(view, (5, *view.shape[1:]), (2 * view.stride(0), *view.stride()[1:]))
    geometry = kv_cache_geometry(config_of("one layer", "LBNHC", num_blocks=5), granularity_bytes=4096)
    with pytest.raises(UnsupportedError, match=f"layer {name} keeps block 1 at bytes"):
        check_tensors(geometry, address, {name: stretched})


def test_a_first_dimension_that_is_no_multiple_of_the_blocks_is_refused() -> None:
    config = config_of("one layer", "LBNHC")
    address, tensors = tensors_of(config, "LBNHC")
    (name, view), = tensors.items()  # fmt: skip
    with pytest.raises(UnsupportedError, match="no multiple of the 10 blocks"):
        check_tensors(kv_cache_geometry(config, granularity_bytes=4096), address, {name: view[:7]})


def test_a_layout_that_is_neither_is_refused_in_words() -> None:
    tensor = KVCacheTensor(size=1000, layers=["odd"], layer_stride=70, block_stride=10)
    with pytest.raises(UnsupportedError, match="neither block- nor layer-outermost"):
        kv_cache_stripes(KVCacheConfig(10, [tensor], []))


def test_a_model_without_kv_cache_is_refused_in_words() -> None:
    with pytest.raises(UnsupportedError, match="no KV cache"):
        kv_cache_stripes(KVCacheConfig(1, [], []))


def test_kv_cache_on_the_host_is_refused_in_words() -> None:
    tensor = KVCacheTensor(size=100, layers=["far"], layer_stride=100, block_stride=10, host_resident=True)
    with pytest.raises(UnsupportedError, match=r"HiSparse.*\['far'\]"):
        kv_cache_stripes(KVCacheConfig(10, [tensor], []))
