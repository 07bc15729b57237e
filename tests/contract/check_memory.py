"""A release's own checks and counts of device memory: what it wants free at start, and what it says that sleeps.

Run with the release's sources first on PYTHONPATH. The driver's calls are stood in for.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import vllm
from kvcached_vllm import sizing, static
from vllm.config import CacheConfig
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
    """The share of the card is vLLM's default where none is given, also where it would have grown the cache itself."""
    cache_config = CacheConfig()
    sizing.leave_out_extensible(cache_config)
    assert sizing.utilization(cache_config) == 0.92
    cache_config.gpu_memory_utilization = 0.5
    assert sizing.utilization(cache_config) == 0.5
    assert not getattr(cache_config, "enable_extensible_kv_cache", False)


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
    print(f"memory with {Path(vllm.__file__).parents[1].name}")
