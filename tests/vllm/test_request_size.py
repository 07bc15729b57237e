"""Claims of request_size.py, beside the managers of vLLM that admit requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcached_vllm.request_size import RequestSize
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

MAX_MODEL_LEN, STEP_TOKENS, ENCODER_TOKENS = 4096, 256, 1500
ATTENTION: dict[str, Any] = {"block_size": 32, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
STATE: dict[str, Any] = {"shapes": ((8, 8),), "dtypes": (torch.float32,)}
FULL = FullAttentionSpec(**ATTENTION)
ALIGNED = MambaSpec(
    block_size=64, mamba_cache_mode="align", num_speculative_blocks=2, num_prefill_checkpoint_blocks=1, **STATE
)
SPECS: dict[str, KVCacheSpec] = {
    "full": FULL,
    "window": SlidingWindowSpec(sliding_window=128, **ATTENTION),
    "chunked": ChunkedLocalAttentionSpec(attention_chunk_size=128, **ATTENTION),
    "ring": CircularBufferSpec(**ATTENTION),
    "cross": CrossAttentionSpec(**ATTENTION),
    "state": MambaSpec(block_size=MAX_MODEL_LEN, mamba_cache_mode="none", num_speculative_blocks=3, **STATE),
    "aligned state": ALIGNED,
}


def size_of(*specs: KVCacheSpec, dcp: int = 1) -> RequestSize:
    vllm_config = SimpleNamespace(
        max_in_flight_tokens=STEP_TOKENS,
        model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
        parallel_config=SimpleNamespace(decode_context_parallel_size=dcp),
        scheduler_config=SimpleNamespace(max_num_encoder_input_tokens=ENCODER_TOKENS),
    )
    groups = [KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(specs)]
    return RequestSize(vllm_config, SimpleNamespace(kv_cache_groups=groups))  # type: ignore[arg-type]


def admitted(spec: KVCacheSpec, num_tokens: int) -> int:
    """Blocks that vLLM wants free before it admits a new request of so many tokens, no prefix of which is cached."""
    manager = get_manager_for_kv_cache_spec(
        spec,
        max_in_flight_tokens=STEP_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        block_pool=BlockPool(1000, enable_caching=True, hash_block_size=32),
        enable_caching=not isinstance(spec, MambaSpec) or spec.mamba_cache_mode == "align",
        kv_cache_group_id=0,
        scheduler_block_size=32,
    )
    counted = ENCODER_TOKENS if isinstance(spec, CrossAttentionSpec) else num_tokens
    return manager.get_num_blocks_to_allocate("new", counted, [], 0, 0, counted, apply_admission_cap=True)


@pytest.mark.parametrize("num_tokens", [1, 64, 65, 1000, MAX_MODEL_LEN])
@pytest.mark.parametrize("name", SPECS)
def test_a_request_is_as_large_as_vllm_admits_it(name: str, num_tokens: int) -> None:
    blocks = size_of(SPECS[name]).blocks(num_tokens)
    if SPECS[name] is ALIGNED:  # beside the state that a step leaves, the one that it began with
        assert admitted(ALIGNED, num_tokens) <= blocks <= 2 + 2 + 1
    else:
        assert blocks == admitted(SPECS[name], num_tokens)


def test_groups_add_up_and_only_what_grows_is_counted_again() -> None:
    hybrid = size_of(FULL, ALIGNED, ALIGNED, SPECS["cross"])
    encoder = -(-ENCODER_TOKENS // 32)
    assert hybrid.blocks(1024) == 32 + 2 * (2 + 3) + encoder
    assert hybrid.more_blocks(1) == 1 + 2
    assert hybrid.more_blocks(1024) == 32 + 2 * 3


def test_context_parallel_ranks_share_a_block_of_attention() -> None:
    assert size_of(FULL, dcp=4).blocks(1024) == 8


def test_a_worker_that_sees_layers_alike_as_one_finds_the_same_as_the_scheduler() -> None:
    uniform = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs={"a": ALIGNED, "b": ALIGNED})
    assert size_of(uniform).blocks(MAX_MODEL_LEN) == size_of(ALIGNED).blocks(MAX_MODEL_LEN)


@pytest.mark.parametrize("num_blocks", [0, 1, 8, 20, 10_000])
def test_the_longest_request_for_some_blocks_takes_no_more_and_a_longer_one_does(num_blocks: int) -> None:
    size = size_of(FULL, ALIGNED)
    longest = size.most_tokens(num_blocks, MAX_MODEL_LEN)
    assert longest == 0 or size.blocks(longest) <= num_blocks
    assert longest == MAX_MODEL_LEN or size.blocks(longest + 1) > num_blocks
