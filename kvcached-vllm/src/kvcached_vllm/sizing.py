"""How large the KV cache looks to vLLM: from the device's total memory, the model and the flags alone.

What neighbours hold at start plays no part: two engines with the same flags get the same capacity in any order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcached_core.backends import load_backend
from kvcached_core.config import Settings

if TYPE_CHECKING:
    from vllm.config import CacheConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

log = logging.getLogger(__name__)

MAX_BLOCKS = 4_000_000
"""Virtual blocks at most. Each is a Python object in the scheduler (about 200 bytes with its place in our queue):
more would cost start-up time and memory for blocks that no device could hold in use."""

_LEAST_UTILIZATION = 1e-9


def host_total_bytes(settings: Settings) -> int:
    """What the host's engines share: the budget, or all of this machine's memory."""
    machine_bytes = load_backend("host").memory().total_bytes
    return machine_bytes if settings.host_budget is None else settings.host_budget.resolve(machine_bytes)


def host_virtual_bytes(settings: Settings) -> int:
    """The KV capacity of an engine on the host."""
    return host_total_bytes(settings)


def device_virtual_bytes(total_bytes: int, utilization: float, weight_bytes: int) -> int:
    """The KV capacity of an engine on a GPU: its share of the card less its weights.

    Activations are not taken off: they come and go, and the static lease keeps room for them.
    """
    return max(0, int(total_bytes * utilization) - weight_bytes)


def limited(virtual_bytes: int, specs: dict[str, KVCacheSpec]) -> int:
    """The capacity with at most `MAX_BLOCKS` blocks.

    Args:
        virtual_bytes: The capacity wished for.
        specs: Of each layer, as the worker gives them to vLLM.
    """
    block_bytes = sum(spec.page_size_bytes for spec in specs.values())
    return min(virtual_bytes, MAX_BLOCKS * block_bytes)


def utilization(cache_config: CacheConfig) -> float:
    """The share of the card that this engine may use at most. Until 0.33, vLLM's default is in the field itself."""
    return getattr(cache_config, "resolved_gpu_memory_utilization", cache_config.gpu_memory_utilization)


def leave_out_extensible(cache_config: CacheConfig) -> None:
    """Have vLLM reserve no addresses of its own for the KV cache, which from 0.34 on it does unless told not to.

    It would fill them for good at start. It settles an option that was left out only after it has asked the platform.
    """
    if not hasattr(cache_config, "enable_extensible_kv_cache"):
        return
    if cache_config.enable_extensible_kv_cache:
        log.warning("vLLM's extensible KV cache is off, although it was asked for: kvcached takes its place.")
    cache_config.enable_extensible_kv_cache = False


@contextmanager
def no_free_memory_required(cache_config: CacheConfig) -> Iterator[None]:
    """While entered, vLLM finds any amount of free memory enough to start."""
    wanted = cache_config.gpu_memory_utilization
    cache_config.gpu_memory_utilization = _LEAST_UTILIZATION
    try:
        yield
    finally:
        cache_config.gpu_memory_utilization = wanted


@contextmanager
def explicit_capacity(cache_config: CacheConfig, capacity_bytes: int) -> Iterator[None]:
    """While entered, vLLM takes the KV capacity as given, and does not compare free memory before and after."""
    given = cache_config.kv_cache_memory_bytes
    cache_config.kv_cache_memory_bytes = capacity_bytes
    try:
        yield
    finally:
        cache_config.kv_cache_memory_bytes = given
