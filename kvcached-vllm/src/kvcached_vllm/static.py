"""What a worker holds of its GPU beside the KV cache: weights, activations, graphs."""

from __future__ import annotations

from collections.abc import Collection

import torch
from vllm.device_allocator.cumem import CuMemAllocator

_DEFERRABLE_TAGS = ("weights", "kv_cache")
"""What vLLM leaves asleep when it is not named. Everything else wakes with anything, from 0.33 on."""


def used_bytes(device: torch.device) -> int:
    """What is off the driver's free bytes now: what torch reserved, less what sleeps.

    Torch goes on counting what vLLM's sleep mode gave back to the driver, since its addresses stay reserved.
    """
    return max(0, torch.cuda.memory_reserved(device) - asleep_bytes())


def asleep_bytes(waking: Collection[str] | None = None) -> int:
    """What vLLM's sleep mode gave back to the driver and will want again.

    Args:
        waking: Of this, leave out what a ``wake_up`` with these tags would bring back at most; None: nothing is.
    """
    allocator = CuMemAllocator.instance
    if allocator is None:  # no sleep mode
        return 0
    allocations = tuple(allocator.pointer_to_data.values())  # at once: the engine's thread adds to it meanwhile
    return sum(
        allocation.handle[1]
        for allocation in allocations
        if allocation.is_asleep and not _wakes(allocation.tag, waking)
    )


def _wakes(tag: str, waking: Collection[str] | None) -> bool:
    return waking is not None and (tag in waking or tag not in _DEFERRABLE_TAGS)
