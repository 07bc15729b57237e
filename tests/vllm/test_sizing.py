"""Claims of sizing.py about vLLM's own checks, with its own functions."""

from __future__ import annotations

import pytest
from kvcached_vllm import sizing
from vllm.config import CacheConfig
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker.utils import request_memory

GIB = 1 << 30


def test_an_engine_starts_on_a_card_that_neighbours_have_filled() -> None:
    cache_config = CacheConfig()
    utilization = cache_config.gpu_memory_utilization
    snapshot = MemorySnapshot(total_memory=80 * GIB, free_memory=1 * GIB, device="cpu", auto_measure=False)
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        request_memory(snapshot, cache_config)
    with sizing.no_free_memory_required(cache_config):
        request_memory(snapshot, cache_config)
    assert cache_config.gpu_memory_utilization == utilization
    with pytest.raises(ZeroDivisionError), sizing.no_free_memory_required(cache_config):
        raise ZeroDivisionError
    assert cache_config.gpu_memory_utilization == utilization
