"""What SGLang can do that an elastic KV cache cannot go with, as data: the flag, and why, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """A server argument with which the engine runs natively.

    Attributes:
        argument: Its name in ``ServerArgs``; releases that lack it cannot have it on.
        allowed: The values that kvcached goes with.
        reason: Why not the others, and what to do.
    """

    argument: str
    allowed: tuple[object, ...]
    reason: str

    @property
    def flag(self) -> str:
        """The argument as users type it."""
        return "--" + self.argument.replace("_", "-")


REFUSALS = (
    Refusal("pp_size", (1,), "pipeline stages schedule different batches, so their memory cannot be agreed on"),
    Refusal("nnodes", (1,), "an engine over several hosts has no ledger that all of it can see"),
    Refusal(
        "disaggregation_mode",
        ("null",),
        "its transfer engine registers the whole KV range with the network card, unmapped parts included",
    ),
    Refusal(
        "enable_memory_saver",
        (False,),
        "it maps and unmaps the KV cache too; leave it out: /release_memory_occupation gives the KV cache back without",
    ),
    Refusal("enable_unified_memory", (False,), "its pools move their memory between KV and state by themselves"),
    Refusal("enable_hisparse", (False,), "its device pool is a window of a host pool"),
    Refusal(
        "enable_hierarchical_cache",
        (False,),
        "it sizes its host pool from the device pool's capacity, which is virtual, and copies on streams of its own",
    ),
    Refusal("enable_lmcache", (False,), "it copies KV on streams of its own, which no fence covers"),
    Refusal(
        "enable_unified_cache_external_linker",
        (False,),
        "it hands the KV cache's memory to a store of its own, which no fence covers",
    ),
    Refusal("enable_flexkv", (False,), "it copies KV on streams of its own, which no fence covers"),
    Refusal("kv_canary", ("none", None), "it replaces methods of the pools"),
    Refusal("enable_pdmux", (False,), "prefill and decode then run on streams of their own"),
    Refusal("dllm_algorithm", (None,), "diffusion models have a scheduler path of their own"),
    Refusal("dcp_size", (1,), "decode context parallelism widens the allocator's ids beyond the pool"),
    Refusal("attn_cp_size", (1,), "context parallelism has not been tested with it"),
    Refusal("enable_page_major_kv_layout", (False,), "that pool takes one buffer for all layers by itself"),
    Refusal("enable_kv_cache_sharding", (False,), "it widens the allocator's ids beyond the pool"),
    Refusal("prefill_only_disable_kv_cache", (False,), "there is no KV cache then"),
    Refusal("elastic_ep_backend", (None,), "its ranks come and go"),
)
"""Read against 0.5.20 to 0.5.23; tests/contract checks that each argument exists."""


BALANCE_CHECK = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
"""With it, SGLang ends a server over several GPUs where one has 10 % less free than another, which is usual beside
neighbours; kvcached turns it off unless it is set."""


def refused_arguments(server_args: Any) -> list[str]:
    """Why this server cannot have an elastic KV cache; empty if it can."""
    return [
        f"{refusal.flag}={value}: {refusal.reason}"
        for refusal in REFUSALS
        if (value := getattr(server_args, refusal.argument, refusal.allowed[0])) not in refusal.allowed
    ]


def refused_pools(configurator: Any) -> list[str]:
    """Why this model's KV pools stay native; empty if they are elastic.

    Args:
        configurator: SGLang's ``KVCacheConfigurator``.
    """
    return list(_pool_reasons(configurator))


def _pool_reasons(configurator: Any) -> Iterator[str]:
    from sglang.srt.mem_cache import kv_cache_configurator as sglang

    hf_config = configurator.model_config.hf_config
    if configurator.device not in ("cuda", "cpu"):
        yield f"device {configurator.device}: kvcached maps memory on cuda and cpu"
    if configurator.post_capture_kv_active:
        yield "SGLang backs the KV cache with its own virtual memory (sizing after graph capture), which never unmaps"
    if sglang.is_float4_e2m1fn_x2(configurator.kv_cache_dtype) or configurator.kv_cache_dtype_str == "mxfp8":
        yield f"KV cache dtype {configurator.kv_cache_dtype_str}: block-scaled pools keep their scales apart"
    if sglang.is_deepseek_v4(hf_config):
        yield "DeepSeek-V4's compressed pools"
    elif sglang.is_deepseek_dsa(hf_config):
        yield "DeepSeek sparse attention keeps an index beside its KV cache"
    elif sglang.is_minimax_sparse(hf_config):
        yield "MiniMax sparse attention keeps an index beside its KV cache"
    if configurator.is_hybrid_swa and configurator.model_config.full_attention_layer_ids == []:
        yield "a model without full attention keeps windows only, in an allocator of its own"
    if configurator.use_mla_backend and configurator.is_hybrid_swa:
        yield "sliding-window MLA has not been tested with it"
