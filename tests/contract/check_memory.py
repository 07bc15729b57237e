"""A release's own checks and counts of device memory: what it wants free at start, and what it says that sleeps.

Run with the release's sources first on PYTHONPATH. The driver's calls are stood in for.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm.platforms
from kvcached_vllm import sizing, static
from vllm.config import CacheConfig, VllmConfig
from vllm.device_allocator import AllocationData, cumem
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker.utils import request_memory

GIB = 1 << 30
TAG_TO_BYTES = {"weights": 7 * GIB, "kv_cache": 2 * GIB, "default": GIB}


def check_start() -> None:
    """A card of 80 GiB with 1 GiB free is too little for vLLM, and enough within our context manager."""
    cache_config = CacheConfig()
    utilization = cache_config.gpu_memory_utilization
    snapshot = MemorySnapshot(total_memory=80 * GIB, free_memory=GIB, device="cpu", auto_measure=False)
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        request_memory(snapshot, cache_config)
    with sizing.no_free_memory_required(cache_config):
        request_memory(snapshot, cache_config)
    assert cache_config.gpu_memory_utilization == utilization


def check_share() -> None:
    """The share of the card is what is given, and vLLM's default where nothing is."""
    cache_config = CacheConfig()
    sizing.leave_out_extensible(cache_config)
    assert sizing.utilization(cache_config) == 0.92
    cache_config.gpu_memory_utilization = 0.5
    assert sizing.utilization(cache_config) == 0.5


def check_left_out() -> None:
    """On a GPU, vLLM would grow the KV cache itself from 0.34 on, and does not once that is left out."""
    if not hasattr(VllmConfig, "_resolve_extensible_kv_cache"):
        return
    vllm.platforms.current_platform = SimpleNamespace(is_cuda_alike=lambda: True, is_rocm=lambda: False)
    for asked, left_out, on in ((None, False, True), (None, True, False), (True, True, False)):
        cache_config = CacheConfig(enable_extensible_kv_cache=asked)
        if left_out:
            sizing.leave_out_extensible(cache_config)
        parallel_config = SimpleNamespace(enable_elastic_ep=False)
        whole = SimpleNamespace(cache_config=cache_config, kv_transfer_config=None, parallel_config=parallel_config)
        VllmConfig._resolve_extensible_kv_cache(whole)
        assert cache_config.enable_extensible_kv_cache is on


def check_sleep() -> None:
    """What its allocator puts to sleep is counted, and what a part leaves asleep when it wakes is foreseen."""
    cumem.unmap_and_release = cumem.create_and_map = lambda handle: None
    torch.cuda.empty_cache = torch.accelerator.empty_cache = lambda: None
    torch.cuda.memory_reserved = lambda device: sum(TAG_TO_BYTES.values())
    assert static.asleep_bytes() == 0
    allocator = cumem.CuMemAllocator.instance = cumem.CuMemAllocator()
    for address, (tag, num_bytes) in enumerate(TAG_TO_BYTES.items()):
        allocator.pointer_to_data[address] = AllocationData((0, num_bytes, address, 0), tag)
    assert static.used_bytes(torch.device("cuda", 0)) == 10 * GIB
    allocator.sleep(())
    assert static.used_bytes(torch.device("cuda", 0)) == 0
    left_at_least = static.asleep_bytes(waking=("weights",))
    assert left_at_least == 2 * GIB
    allocator.wake_up(["weights"])
    assert static.asleep_bytes() >= left_at_least
    allocator.wake_up()
    assert static.asleep_bytes() == 0


if __name__ == "__main__":
    check_start()
    check_share()
    check_sleep()
    check_left_out()
    print(f"memory with {Path(vllm.__file__).parents[1].name}")
