"""SGLang's own figures, kept meaningful: usage is used / attainable, and the leak check still adds up.

SGLang derives what is used from its capacity and ``available_size()``. With a virtual capacity that would call
everything that is not resident used, or available; a router would see either a full or an empty endpoint.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvcached_sglang.space import Space


def of_full(stats: Any, space: Space, growable_bytes: int) -> Any:
    """SGLang's ``PoolStats`` with the figures of full attention made true.

    Args:
        growable_bytes: What the ledger would let this engine grow by now.
    """
    used, attainable = _used(stats.full_evictable_size, space, growable_bytes)
    return replace(
        stats,
        full_num_used=used,
        full_token_usage=used / attainable,
        full_available_size=attainable - used - stats.full_evictable_size,
    )


def of_swa(stats: Any, space: Space, growable_bytes: int) -> Any:
    """SGLang's ``PoolStats`` with the figures of sliding-window attention made true."""
    used, attainable = _used(stats.swa_evictable_size, space, growable_bytes)
    return replace(
        stats,
        swa_num_used=used,
        swa_token_usage=used / attainable,
        swa_available_size=attainable - used - stats.swa_evictable_size,
    )


def conserving_full(stats: Any, space: Space) -> Any:
    """What SGLang's leak check adds up: every page that no request and no cache has, resident or not, is
    available."""
    return replace(stats, full_available_size=space.free_list.conserved_size())


def conserving_swa(stats: Any, space: Space) -> Any:
    """The same for sliding-window attention."""
    return replace(stats, swa_available_size=space.free_list.conserved_size())


def _used(evictable: int, space: Space, growable_bytes: int) -> tuple[int, int]:
    """Tokens that requests use, and tokens that this engine could have now."""
    resident = space.num_resident_blocks * space.tokens_per_block
    used = resident - space.free_tokens - evictable
    growable = growable_bytes // space.extent_bytes * space.extent_tokens
    return used, max(1, min(resident + growable, space.num_usable_tokens))
