"""What the plugin refuses, in words, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvcached_core import devices
from kvcached_core.errors import UnsupportedError

from kvcached_vllm import qualnames

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TESTED_CONNECTORS: frozenset[str] = frozenset()
"""KV connectors that have run with an elastic KV cache. Others may register the whole range with a NIC or another
process, which would pin the guard page and read the wrong memory."""


def check(vllm_config: VllmConfig, stock_worker: str, elastic_worker: str) -> None:
    """Raise if this configuration cannot be elastic.

    Raises:
        UnsupportedError: Every reason, with the value found and what to do.
    """
    reasons = list(_reasons(vllm_config, stock_worker, elastic_worker))
    if reasons:
        raise UnsupportedError(" ".join(reasons))


def _reasons(vllm_config: VllmConfig, stock_worker: str, elastic_worker: str) -> Iterator[str]:
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    if parallel.worker_cls not in ("auto", stock_worker, elastic_worker):
        yield f"The worker class {parallel.worker_cls!r} is not vLLM's own: leave --worker-cls out."
    if scheduler.scheduler_cls not in (None, qualnames.SCHEDULER, qualnames.ASYNC_SCHEDULER):
        yield f"The scheduler class {scheduler.scheduler_cls!r} is not vLLM's own: leave --scheduler-cls out."
    if parallel.distributed_executor_backend == "external_launcher":
        yield "The external launcher has no scheduler beside its workers: use the mp executor."
    if parallel.nnodes > 1:
        yield f"{parallel.nnodes} hosts: orders reach the ranks of one host only."
    # Ray places ranks on other hosts without a word about it in the configuration.
    if parallel.use_ray and parallel.world_size > (num_here := len(devices.inventory().devices)):
        yield (
            f"Ray has {parallel.world_size} ranks to place and this host has {num_here} GPUs: orders reach the ranks "
            "of one host only. Use the mp executor."
        )
    if parallel.enable_elastic_ep:
        yield "Elastic expert parallelism resizes the KV cache itself: leave --enable-elastic-ep out."
    if vllm_config.diffusion_config is not None:
        yield "Diffusion models have a scheduler of their own."
    yield from _model_reasons(vllm_config)
    yield from _cache_reasons(vllm_config)


def _model_reasons(vllm_config: VllmConfig) -> Iterator[str]:
    model_config = vllm_config.model_config
    if model_config is None:
        return
    stateless = model_config.attn_type == "attention_free" and not model_config.has_inner_state
    if model_config.attn_type == "encoder_only" or stateless or vllm_config.is_mm_encoder_only:
        yield f"The model {model_config.model!r} has no KV cache: there is nothing to make elastic."


def _cache_reasons(vllm_config: VllmConfig) -> Iterator[str]:
    offloading = vllm_config.cache_config.kv_offloading_size
    if offloading is not None:  # vLLM makes a connector of it, but not before it has asked the platform
        yield (
            f"Offloading {offloading:g} GiB of KV to the host is a KV connector, and none has been tested with elastic "
            "memory: leave --kv-offloading-size out."
        )
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector not in TESTED_CONNECTORS:
        yield (
            f"The KV connector {transfer.kv_connector!r} has not been tested with elastic memory "
            f"(tested: {', '.join(sorted(TESTED_CONNECTORS)) or 'none yet'}): leave --kv-transfer-config out."
        )
    if vllm_config.attention_config.hisparse_config is not None:
        yield "HiSparse keeps KV on the host."
    dtype = str(vllm_config.cache_config.cache_dtype)
    if "per_token_head" in dtype:
        yield f"KV cache dtype {dtype!r} keeps its scales outside the KV cache: use auto or fp8."
