"""SGLang's own allocators, whose free lists hold resident ids only.

What the kernels read stays as it is: a tensor of free page ids. Growth appends a range of ids to it, trimming takes
the ids of whole extents out, and neither happens but where the scheduler calls the tick. Everything is overridden
through ``super()``; the internals of the allocators differ between releases and are left alone.

Three counts:

* ``num_free`` pages are resident and free: the native list. Allocations come from these only.
* ``available_size()`` adds the room that the ledger would let this engine grow into, as long as one step cannot use
  up what is resident: admission and eviction then behave as with a large native pool. In debt it is less than is
  free, so that the engine retracts by its own rules.
* ``conserved_size()`` adds every id that is not resident: what SGLang's leak check adds up to the capacity.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.utils.common import get_num_new_pages

if TYPE_CHECKING:
    from kvcached_sglang.space import Space


class Elastic:
    """Mixed in before one of SGLang's allocators of one id space."""

    free_pages: torch.Tensor
    device: str
    page_size: int
    size: int

    def __init__(self, space: Space, *args: Any, **kwargs: Any) -> None:
        self._space = space
        super().__init__(*args, **kwargs)
        space.free_list = self

    # What SGLang calls

    def clear(self) -> None:
        super().clear()  # type: ignore[misc]
        self.free_pages = self._ids(self._space.resident_ranges())
        if self._space.cleared is not None:
            self._space.cleared(self._space)

    def available_size(self) -> int:
        native: int = super().available_size()  # type: ignore[misc]
        # SGLang asserts that this is at most ``size``; the last extent may be short, and growth may have arrived since.
        return max(0, native + min(self._space.credit_tokens, self._space.absent_tokens))

    # What the tick calls

    @property
    def num_free(self) -> int:
        """Pages that are resident and free."""
        return int(super().available_size()) // self.page_size  # type: ignore[misc]

    def conserved_size(self) -> int:
        """Tokens that are free or not resident."""
        return (self.num_free - self._space.num_resident_blocks) * self.page_size + self.size

    def add(self, ranges: Iterable[range]) -> None:
        """Let the engine use these pages, which have become resident."""
        self.free_pages = torch.cat((self.free_pages, self._ids(ranges)))

    def remove(self, extent_ids: Iterable[int]) -> None:
        """Take the pages of these extents, all of them free, out of use."""
        leaving = torch.tensor(sorted(extent_ids), dtype=torch.int64, device=self.device)
        extents = self.free_pages // self._space.blocks_per_extent
        self.free_pages = self.free_pages[~torch.isin(extents, leaving)]

    def concentrate(self) -> None:
        """Hand out the lowest ids first, so that the highest extents drain. No transfer from the device."""
        self.free_pages = torch.sort(self.free_pages).values

    def free_per_extent(self) -> list[int]:
        """Free pages of every extent. Waits for the device: only where something is to be trimmed."""
        extents = self.free_pages // self._space.blocks_per_extent
        counts: list[int] = torch.bincount(extents, minlength=self._space.extents.num_extents).tolist()
        return counts

    def _ids(self, ranges: Iterable[range]) -> torch.Tensor:
        pieces = [torch.arange(r.start, r.stop, dtype=torch.int64, device=self.device) for r in ranges]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=self.device)


class ElasticTokenAllocator(Elastic, TokenToKVPoolAllocator):
    """One token a page."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        self._space.cover(need_size)
        return super().alloc(need_size)


class ElasticPagedAllocator(Elastic, PagedTokenToKVPoolAllocator):
    """Pages of several tokens.

    0.5.20 and 0.5.21 launch their kernels before they know whether there were pages enough, so there have to be
    before. Like the native code, count exactly only where a bound does not suffice.
    """

    def alloc(self, need_size: int) -> torch.Tensor | None:
        self._space.cover(need_size // self.page_size)
        return super().alloc(need_size)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        if extend_num_tokens // self.page_size + len(prefix_lens) + 1 > self.num_free:
            self._space.cover(
                int(get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu))
            )
        return super().alloc_extend(
            prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, **kwargs
        )

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        if len(seq_lens) > self.num_free:
            self._space.cover(int(get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)))
        return super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)


class ElasticSWAAllocator(SWATokenToKVPoolAllocator):
    """Full and sliding-window attention: two id spaces, the second mapped from the first."""

    def __init__(self, full: Space, swa: Space, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.full_attn_allocator = elastic_like(self.full_attn_allocator, full)
        self.swa_attn_allocator = elastic_like(self.swa_attn_allocator, swa)
        self.clear()


def elastic_like(native: Any, space: Space) -> Elastic:
    """The elastic allocator of a native one's kind, size, device and pool. The native one is not used again."""
    if type(native) is TokenToKVPoolAllocator:
        return ElasticTokenAllocator(
            space, native.size, native.dtype, native.device, native.get_kvcache(), native.need_sort
        )
    return ElasticPagedAllocator(
        space, native.size, native.page_size, native.dtype, native.device, native.get_kvcache(), native.need_sort
    )


def has_elastic_kind(native: Any) -> bool:
    """Whether there is an elastic allocator of this one's exact kind."""
    kinds = (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator)
    if type(native) is SWATokenToKVPoolAllocator:
        parts = (native.full_attn_allocator, native.swa_attn_allocator)
        return (
            not native.need_sort
            and not getattr(native, "_swa_req_ring", False)
            and all(type(p) in kinds for p in parts)
        )
    return type(native) in kinds and not native.need_sort
