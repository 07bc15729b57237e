"""How many blocks requests take, from the model and the flags alone."""

from __future__ import annotations

import bisect
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


class RequestSize:
    """How many blocks requests take, in all groups of a hybrid model together, by vLLM's own bounds.

    Sliding windows and chunked attention hold no more than their window and the tokens in flight. Linear attention
    holds its state, a block for each speculative token, and what the prefix cache saves of a prompt. Cross-attention
    holds what the encoder gave.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._groups = [_group_size(group.kv_cache_spec, vllm_config) for group in kv_cache_config.kv_cache_groups]

    def blocks(self, num_tokens: int) -> int:
        """Blocks that one request of so many tokens holds at most."""
        return sum(group.fixed_blocks + group.more_blocks(num_tokens) for group in self._groups)

    def more_blocks(self, num_tokens: int) -> int:
        """Blocks that a request which has begun takes at most for so many tokens more."""
        return sum(group.more_blocks(num_tokens) for group in self._groups)

    def most_tokens(self, num_blocks: int, max_model_len: int) -> int:
        """Length of the longest request that holds no more than so many blocks, up to ``max_model_len``."""
        return bisect.bisect_right(range(1, max_model_len + 1), num_blocks, key=self.blocks)


@dataclass(frozen=True)
class _GroupSize:
    """What a request takes in one group: some blocks once, others as it grows, up to a bound."""

    tokens_per_block: int
    fixed_blocks: int = 0
    most_blocks: int = sys.maxsize

    def more_blocks(self, num_tokens: int) -> int:
        return min(-(-num_tokens // self.tokens_per_block), self.most_blocks)


def _group_size(spec: KVCacheSpec, vllm_config: VllmConfig) -> _GroupSize:
    if isinstance(spec, UniformTypeKVCacheSpecs):  # a worker's; the scheduler sees the first, and all are alike
        spec = next(iter(spec.kv_cache_specs.values()))
    tokens_per_block = spec.block_size
    if getattr(spec, "dcp_sharded", True):  # 0.30 has no such field: all are
        tokens_per_block *= vllm_config.parallel_config.decode_context_parallel_size
    if isinstance(spec, MambaSpec):
        most = 2 + spec.num_prefill_checkpoint_blocks if spec.mamba_cache_mode == "align" else sys.maxsize
        return _GroupSize(tokens_per_block, spec.num_speculative_blocks, most)
    if isinstance(spec, CrossAttentionSpec):
        encoder_tokens = vllm_config.scheduler_config.max_num_encoder_input_tokens
        return _GroupSize(tokens_per_block, -(-encoder_tokens // tokens_per_block), 0)
    if isinstance(spec, CircularBufferSpec):
        return _GroupSize(tokens_per_block, 1, 0)
    if isinstance(spec, (SlidingWindowSpec, ChunkedLocalAttentionSpec)):
        most = spec.max_admission_blocks_per_request(
            max_in_flight_tokens=vllm_config.max_in_flight_tokens, max_model_len=vllm_config.model_config.max_model_len
        )
        return _GroupSize(tokens_per_block, most_blocks=most)
    return _GroupSize(tokens_per_block)
