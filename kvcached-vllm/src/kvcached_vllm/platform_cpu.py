"""vLLM's CPU platform with elastic KV cache, for machines without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached_core.config import Settings
from vllm.platforms.cpu import CpuPlatform

from kvcached_vllm import qualnames, sizing
from kvcached_vllm.platform import ElasticPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ElasticCpuPlatform(ElasticPlatform, CpuPlatform):
    """Whatever vLLM's own is, ``is_cpu()`` included."""

    stock_worker = qualnames.STOCK_CPU_WORKER
    elastic_worker = qualnames.CPU_WORKER

    @classmethod
    def install(cls, vllm_config: VllmConfig) -> None:
        """Also say how large the KV cache is: unasked, vLLM wants a share of the machine's memory free at once."""
        super().install(vllm_config)
        cache_config = vllm_config.cache_config
        if cache_config.kv_cache_memory_bytes is None:
            cache_config.kv_cache_memory_bytes = sizing.host_virtual_bytes(Settings.load())
