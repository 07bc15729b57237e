"""SGLang's prefix cache, as trimming needs it."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from kvcached_sglang.space import Space


class TreeCache:
    """Reads and evicts one scheduler's prefix cache, through its own methods.

    Args:
        tree_cache: SGLang's ``BasePrefixCache``.
        is_split: Whether it counts full and sliding-window attention (or state) apart.
    """

    def __init__(self, tree_cache: Any, *, is_split: bool) -> None:
        self._tree_cache = tree_cache
        self._is_split = is_split

    def evictable(self, space: Space) -> int:
        """Tokens of a space that are cached and that no running request uses."""
        if space.window_tokens is not None:
            return int(self._tree_cache.swa_evictable_size())
        if self._is_split:
            return int(self._tree_cache.full_evictable_size())
        return int(self._tree_cache.evictable_size())

    def evict(self, space: Space, num_tokens: int) -> int:
        """Evict at least so many tokens of a space, least recently used first, if there are as many.

        Returns:
            Tokens of the space that were evicted.
        """
        before = space.free_tokens
        if space.window_tokens is not None:
            self._tree_cache.evict(EvictParams(num_tokens=0, swa_num_tokens=num_tokens))
        else:
            self._tree_cache.evict(EvictParams(num_tokens=num_tokens))
        return space.free_tokens - before
