"""The pure arithmetic between blocks, extents, bytes and pages of one arena.

A *stripe* says where a run of layers keeps every block: block ``b`` at ``offset + b * stride``, ``length``
bytes long. A block-major layout is one stripe (all layers of a block are one run); a layer-major layout has
a stripe per layer. Every rank derives its own geometry from its own layout and is sent block ranges only,
so ranks may differ (unevenly split layers) without anyone having to know.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvcached_core.errors import ConfigError, InvariantError
from kvcached_core.sizes import format_bytes

_MIB = 1 << 20

# Driver calls cost per handle, not per byte: on an H200 mapping takes 18.9 us per MiB with 2 MiB pages, 1.2 with
# 32 MiB and 0.6 with 64 MiB; behind a guard page, which is unmapped first, 33.7, 2.3 and 1.3. A block-major extent
# is one page; a layer-major one needs a page per stripe, so its pages are smaller to keep the extent under 256 MiB.
_BLOCK_MAJOR_PAGE_BYTES = 64 * _MIB
_LAYER_MAJOR_PAGE_BYTES = 8 * _MIB
_EXTENT_LIMIT_BYTES = 256 * _MIB

# Elasticity needs something to move: an arena has at least this many extents, as far as granularity allows.
_MIN_EXTENTS = 64

# How many page sizes `choose` compares at most.
_MAX_CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class Stripe:
    """Where a run of layers keeps its part of every block.

    Attributes:
        offset_bytes: Of block 0 in the arena.
        stride_bytes: From block ``b`` to block ``b + 1``.
        length_bytes: Of one block, at most ``stride_bytes``.
    """

    offset_bytes: int
    stride_bytes: int
    length_bytes: int

    def __post_init__(self) -> None:
        if self.offset_bytes < 0 or not 0 < self.length_bytes <= self.stride_bytes:
            raise InvariantError(f"Not a stripe: {self!r}; it needs 0 <= offset and 0 < length <= stride.")

    @property
    def gap_bytes(self) -> int:
        """Bytes between the end of one block and the start of the next."""
        return self.stride_bytes - self.length_bytes

    def span(self, blocks: range) -> tuple[int, int]:
        """From the first byte of the first block to behind the last byte of the last."""
        return (
            self.offset_bytes + blocks.start * self.stride_bytes,
            self.offset_bytes + (blocks.stop - 1) * self.stride_bytes + self.length_bytes,
        )

    def pieces(self, blocks: range) -> Iterator[tuple[int, int]]:
        """The bytes of every block, joined where there is no gap between blocks."""
        if self.gap_bytes == 0:
            yield self.span(blocks)
            return
        for block_id in blocks:
            yield self.span(range(block_id, block_id + 1))


def merge_stripes(stripes: Iterable[Stripe]) -> tuple[Stripe, ...]:
    """Join stripes of one stride that overlap or touch, as long as the result is a stripe.

    Hybrid models lay their groups over one another, and a block-major layout may be described layer by
    layer; both are one run of bytes per block.
    """
    merged: list[Stripe] = []
    for stripe in sorted(stripes, key=lambda s: (s.stride_bytes, s.offset_bytes)):
        last = merged[-1] if merged else None
        if last is not None and last.stride_bytes == stripe.stride_bytes:
            last_end = last.offset_bytes + last.length_bytes
            length = max(last_end, stripe.offset_bytes + stripe.length_bytes) - last.offset_bytes
            if stripe.offset_bytes <= last_end and length <= stripe.stride_bytes:
                merged[-1] = Stripe(last.offset_bytes, last.stride_bytes, length)
                continue
        merged.append(stripe)
    return tuple(sorted(merged, key=lambda s: s.offset_bytes))


def extent_block_ranges(extent_ids: Iterable[int], num_blocks: int, blocks_per_extent: int) -> list[range]:
    """The blocks of these extents, ascending, consecutive extents as one range.

    Args:
        extent_ids: In any order, each at most once.
        num_blocks: Of the whole arena; the last extent may be shorter than the others.
        blocks_per_extent: Of every other extent.
    """
    ranges: list[range] = []
    for extent_id in sorted(extent_ids):
        start = extent_id * blocks_per_extent
        stop = min(start + blocks_per_extent, num_blocks)
        if ranges and ranges[-1].stop == start:
            ranges[-1] = range(ranges[-1].start, stop)
        else:
            ranges.append(range(start, stop))
    return ranges


@dataclass(frozen=True)
class Geometry:
    """Blocks, extents, bytes and pages of one arena; immutable and pure.

    Attributes:
        num_blocks: Blocks of the arena, resident or not.
        stripes: Where each block's bytes are; none of them lie on one another (see ``merge_stripes``).
        size_bytes: Of the arena as the engine sees it; a last page may reach beyond it.
        page_bytes: What one map or unmap call handles.
        blocks_per_extent: Blocks that grow and shrink together; the last extent may be shorter.
    """

    num_blocks: int
    stripes: tuple[Stripe, ...]
    size_bytes: int
    page_bytes: int
    blocks_per_extent: int

    def __post_init__(self) -> None:
        if min(self.num_blocks, self.page_bytes, self.blocks_per_extent, len(self.stripes)) < 1:
            raise InvariantError(f"Not a geometry: {self!r}; every count must be at least 1.")
        end = max(stripe.span(range(self.num_blocks))[1] for stripe in self.stripes)
        if end > self.size_bytes:
            raise InvariantError(
                f"{self.num_blocks} blocks end at byte {end} of an arena of {self.size_bytes} bytes: {self.stripes!r}"
            )

    @property
    def num_pages(self) -> int:
        """Pages of the arena; the last one may reach beyond ``size_bytes``."""
        return -(-self.size_bytes // self.page_bytes)

    @property
    def num_extents(self) -> int:
        """Extents of the arena; the last one may be short."""
        return -(-self.num_blocks // self.blocks_per_extent)

    @property
    def extent_bytes(self) -> int:
        """What mapping one extent costs at most: its worst-case pages, none of them mapped yet."""
        return self.worst_case_pages(self.blocks_per_extent, multiple_of=self.blocks_per_extent) * self.page_bytes

    @property
    def extents_share_pages(self) -> bool:
        """Whether a page may hold bytes of two extents; such pages stay while either is resident."""
        return self.num_extents > 1 and any(
            stripe.offset_bytes % self.page_bytes or self.blocks_per_extent * stripe.stride_bytes % self.page_bytes
            for stripe in self.stripes
        )

    def blocks_of(self, extent_id: int) -> range:
        """The blocks of one extent."""
        start = extent_id * self.blocks_per_extent
        return range(start, min(start + self.blocks_per_extent, self.num_blocks))

    def extent_of(self, block_id: int) -> int:
        """The extent that a block belongs to."""
        return block_id // self.blocks_per_extent

    def block_ranges(self, extent_ids: Iterable[int]) -> list[range]:
        """The blocks of these extents, ascending, consecutive extents as one range."""
        return extent_block_ranges(extent_ids, self.num_blocks, self.blocks_per_extent)

    def byte_ranges(self, blocks: range) -> list[tuple[int, int]]:
        """Where the bytes of consecutive blocks are: ``(start, stop)``, ascending, merged and disjoint.

        Takes time per stripe where blocks follow one another without a gap, else per block.
        """
        self._check(blocks)
        return _merge(piece for stripe in self.stripes for piece in stripe.pieces(blocks))

    def page_ranges(self, blocks: range) -> list[range]:
        """The pages that hold any byte of these consecutive blocks: ascending, merged and disjoint.

        Takes time per stripe, not per block: a gap smaller than a page cannot hold a whole page, so all
        pages from the first byte to the last are touched. Only a larger gap is looked at block by block.
        """
        self._check(blocks)
        page = self.page_bytes
        touched = (
            (start // page, -(-stop // page))
            for stripe in self.stripes
            for start, stop in ((stripe.span(blocks),) if stripe.gap_bytes < page else stripe.pieces(blocks))
        )
        return [range(start, stop) for start, stop in _merge(touched)]

    def worst_case_pages(self, num_blocks: int, *, multiple_of: int = 1) -> int:
        """Pages that ``num_blocks`` consecutive blocks touch at most, wherever they start.

        An upper bound in time per stripe. It is reached where the stripes start alike within a page and
        the arena has room for the worst start; pages that two stripes share are counted for both.

        Args:
            num_blocks: Length of the run.
            multiple_of: The run starts at a multiple of this block; an extent's starts at a multiple of
                ``blocks_per_extent``, which often is a page boundary.
        """
        if num_blocks < 1:
            return 0
        pages = sum(_worst_pages(stripe, num_blocks, multiple_of, self.page_bytes) for stripe in self.stripes)
        return min(pages, self.num_pages)

    def _check(self, blocks: range) -> None:
        if blocks.step != 1 or not 0 <= blocks.start < blocks.stop <= self.num_blocks:
            raise InvariantError(f"{blocks!r} is no run of blocks of {self.num_blocks}.")

    @classmethod
    def choose(
        cls,
        stripes: Iterable[Stripe],
        num_blocks: int,
        size_bytes: int,
        *,
        granularity_bytes: int,
        page_bytes: int | None = None,
        target_extent_bytes: int | None = None,
    ) -> Geometry:
        """The geometry with the largest pages that suit this arena.

        An extent is one page per stripe where blocks fit a page, and one block where they do not. Pages
        are multiples of the granularity, not powers of two, so that extents share no page if possible:
        for 192 KiB blocks and a granularity of 2 MiB, 30 MiB pages hold exactly 160 blocks.

        Args:
            stripes: Of every layer; those that lie on or touch one another are merged.
            num_blocks: Blocks of the arena.
            size_bytes: Of the arena.
            granularity_bytes: Of the device; pages are multiples of it.
            page_bytes: Instead of a chosen page size (``KVCACHED_PAGE_SIZE``).
            target_extent_bytes: Instead of a chosen extent size; rounded down to whole blocks.

        Raises:
            ConfigError: ``page_bytes`` is not a multiple of the granularity.
        """
        merged = merge_stripes(stripes)
        if not merged:
            raise InvariantError("A geometry needs at least one stripe.")
        if page_bytes is not None and (page_bytes < 1 or page_bytes % granularity_bytes):
            raise ConfigError(
                f"KVCACHED_PAGE_SIZE={page_bytes} cannot work: pages on this device are multiples of "
                f"{granularity_bytes} bytes ({format_bytes(granularity_bytes)}), e.g. "
                f"{max(1, page_bytes // granularity_bytes) * granularity_bytes}."
            )
        block_bytes = sum(stripe.length_bytes for stripe in merged)
        fixed_blocks = None if target_extent_bytes is None else max(1, target_extent_bytes // block_bytes)
        if page_bytes is not None:
            pages: Sequence[int] = (page_bytes,)
        else:
            pages = _candidate_pages(merged, size_bytes, granularity_bytes, fixed_blocks)
        widest = max(stripe.stride_bytes for stripe in merged)
        candidates = [
            cls(num_blocks, merged, size_bytes, page, min(num_blocks, fixed_blocks or max(1, page // widest)))
            for page in pages
        ]
        separate = [candidate for candidate in candidates if not candidate.extents_share_pages]
        return min(separate or candidates, key=_preference)


def _preference(geometry: Geometry) -> tuple[int, int]:
    """The largest pages are best, but where an extent is one block of several pages, the least memory is."""
    return (geometry.extent_bytes if geometry.blocks_per_extent == 1 else 0, -geometry.page_bytes)


def _candidate_pages(
    stripes: Sequence[Stripe], size_bytes: int, granularity_bytes: int, fixed_blocks: int | None
) -> range:
    """Page sizes worth comparing: from the largest that suits this arena down to a quarter of it."""
    limit = _BLOCK_MAJOR_PAGE_BYTES if len(stripes) == 1 else _LAYER_MAJOR_PAGE_BYTES
    limit = min(limit, _EXTENT_LIMIT_BYTES // len(stripes), size_bytes // _MIN_EXTENTS // len(stripes))
    if fixed_blocks is not None:
        limit = min(limit, fixed_blocks * min(stripe.stride_bytes for stripe in stripes))
    limit_units = max(1, limit // granularity_bytes)
    step_units = 1
    while limit_units // step_units > _MAX_CANDIDATES:
        step_units *= 2
    limit_units -= limit_units % step_units
    lowest_units = max(step_units, limit_units // 4 // step_units * step_units)
    return range(
        lowest_units * granularity_bytes, (limit_units + 1) * granularity_bytes, step_units * granularity_bytes
    )


def _worst_pages(stripe: Stripe, num_blocks: int, multiple_of: int, page_bytes: int) -> int:
    """Pages that a run of blocks touches in one stripe if it starts as badly within a page as it can.

    Starts lie at ``offset + k * multiple_of * stride``, so modulo the page they have the offset's residue
    modulo the greatest common divisor; the largest such residue is the worst.
    """
    if stripe.gap_bytes >= page_bytes:
        if num_blocks > 1:
            return num_blocks * _worst_pages(stripe, 1, 1, page_bytes)
        length = stripe.length_bytes
    else:
        length = (num_blocks - 1) * stripe.stride_bytes + stripe.length_bytes
    divisor = math.gcd(multiple_of * stripe.stride_bytes, page_bytes)
    worst_start = page_bytes - divisor + stripe.offset_bytes % divisor
    return (worst_start + length - 1) // page_bytes + 1


def _merge(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that overlap or touch."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged
