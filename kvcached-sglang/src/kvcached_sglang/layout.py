"""All elastic pools of one process as one arena and one geometry, so that one rank with one ledger slot holds them.

A model may have several pools (full and sliding-window attention, a draft model's), each an arena of its own with its
own row sizes. Their extents are numbered through, pool after pool, and so are their pages. To the rank a block is one
extent: it never needs to know what is in one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvcached_core.errors import DeviceMemoryError, DriverError, InvariantError

from kvcached_sglang.pools import ElasticPool


@dataclass(frozen=True)
class _Part:
    """One pool in the numbering."""

    pool: ElasticPool
    extents: range
    pages: range


class Layout:
    """The pools' geometries, numbered through. Stands where a rank expects a ``Geometry``; grows by `add` only.

    Attributes:
        blocks_per_extent: 1, since a block of this geometry is an extent of a pool.
    """

    blocks_per_extent = 1

    def __init__(self, granularity_bytes: int) -> None:
        """No pool yet; a rank without memory counts in the device's granularity."""
        self._granularity_bytes = granularity_bytes
        self._parts: list[_Part] = []

    @property
    def page_bytes(self) -> int:
        """Of every pool; the first one's."""
        return self._parts[0].pool.arena.page_bytes if self._parts else self._granularity_bytes

    def add(self, pool: ElasticPool) -> range:
        """Number a pool's extents and pages after those there are.

        Returns:
            The numbers of its extents, in order.
        """
        if self._parts and pool.arena.page_bytes != self.page_bytes:
            raise InvariantError(f"pages of {pool.arena.page_bytes} bytes beside pages of {self.page_bytes}")
        extents = range(self.num_blocks, self.num_blocks + pool.geometry.num_extents)
        pages = range(self.num_pages, self.num_pages + pool.arena.num_pages)
        self._parts.append(_Part(pool, extents, pages))
        return extents

    @property
    def num_blocks(self) -> int:
        """Extents of all pools."""
        return self._parts[-1].extents.stop if self._parts else 0

    @property
    def num_pages(self) -> int:
        """Pages of all pools."""
        return self._parts[-1].pages.stop if self._parts else 0

    def page_ranges(self, blocks: range) -> list[range]:
        """The pages of consecutive extents, in all pools' numbering."""
        return [
            range(part.pages.start + pages.start, part.pages.start + pages.stop)
            for part, extents in self._within(blocks)
            for extent in extents
            for pages in part.pool.geometry.page_ranges(part.pool.geometry.blocks_of(extent))
        ]

    def worst_case_pages(self, num_blocks: int, *, multiple_of: int = 1) -> int:
        """Pages that so many extents take at most, were all of the dearest pool."""
        dearest = max((part.pool.geometry.extent_bytes for part in self._parts), default=self.page_bytes)
        return num_blocks * dearest // self.page_bytes

    def split(self, page_ranges: Iterable[range]) -> list[tuple[ElasticPool, list[range]]]:
        """Page ranges of this numbering as each pool's own; none crosses pools."""
        split: dict[int, list[range]] = {}
        for pages in page_ranges:
            index = next(i for i, part in enumerate(self._parts) if pages.start in part.pages)
            first = self._parts[index].pages.start
            split.setdefault(index, []).append(range(pages.start - first, pages.stop - first))
        return [(self._parts[index].pool, ranges) for index, ranges in split.items()]

    @property
    def pools(self) -> list[ElasticPool]:
        """In the order of their numbers."""
        return [part.pool for part in self._parts]

    def _within(self, blocks: range) -> Iterator[tuple[_Part, range]]:
        """The pools that these extents are of, each with the extents in its own numbering."""
        for part in self._parts:
            start, stop = max(blocks.start, part.extents.start), min(blocks.stop, part.extents.stop)
            if start < stop:
                yield part, range(start - part.extents.start, stop - part.extents.start)


class Arenas:
    """The pools' arenas as one. Stands where a rank expects an ``Arena``."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    @property
    def page_bytes(self) -> int:
        """Of every pool."""
        return self._layout.page_bytes

    @property
    def resident_bytes(self) -> int:
        """Of all pools."""
        return sum(pool.arena.resident_bytes for pool in self._layout.pools)

    def new_pages(self, page_ranges: Iterable[range]) -> int:
        """How many pages a `map` of these ranges would create."""
        return sum(pool.arena.new_pages(ranges) for pool, ranges in self._layout.split(page_ranges))

    def freed_pages(self, page_ranges: Iterable[range]) -> int:
        """How many pages an `unmap` of these ranges would remove."""
        return sum(pool.arena.freed_pages(ranges) for pool, ranges in self._layout.split(page_ranges))

    def map(self, page_ranges: Iterable[range]) -> int:
        """Add a reference to each page, in all pools or in none.

        Returns:
            Pages created.

        Raises:
            DeviceMemoryError, DriverError: Nothing was kept.
        """
        created, done = 0, []
        try:
            for pool, ranges in self._layout.split(page_ranges):
                created += pool.arena.map(ranges)
                done.append((pool, ranges))
        except (DeviceMemoryError, DriverError):
            for pool, ranges in reversed(done):
                pool.arena.unmap(ranges)
            raise
        return created

    def unmap(self, page_ranges: Iterable[range]) -> int:
        """Drop a reference of each page.

        Returns:
            Pages removed.
        """
        return sum(pool.arena.unmap(ranges) for pool, ranges in self._layout.split(page_ranges))

    def seal_guards(self) -> None:
        """Warm-up is over: stray writes beyond resident memory fault from here on."""
        for pool in self._layout.pools:
            pool.arena.seal_guard()

    def close(self) -> None:
        """Unmap everything and give the addresses back."""
        for pool in self._layout.pools:
            pool.arena.close()
