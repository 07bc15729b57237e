"""One reserved address range on one device, whose pages come and go by reference."""

from __future__ import annotations

import warnings
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from kvcached_core.errors import ConfigError, DeviceMemoryError, DriverError, InvariantError
from kvcached_core.sizes import format_bytes

if TYPE_CHECKING:
    import torch

    from kvcached_core.backends.base import Backend


MAX_RUN_BYTES = 256 << 20
"""What one call maps or unmaps at most. While the driver is at it, other calls of the process may wait: at about
1 us per MiB, a quarter of a millisecond."""


class Arena:
    """Addresses for a whole KV cache, with memory behind the pages that are referenced.

    A page has one reference for each range that was mapped over it and not unmapped since, so that two extents
    may share the page in which one ends and the other begins. It is resident from its first reference to its last.

    One thread at a time maps and unmaps (`Rank` sees to it); sizes may be read from any thread.

    Args:
        backend: The device.
        size_bytes: At least this many addresses; rounded up to whole pages.
        page_bytes: Size of a page; a multiple of the device's granularity.
        guard: Let the backend stand its guard page behind unmapped addresses. Without, touching one is a fault.

    Attributes:
        address: The first address.
        size_bytes: Addresses in the range, a multiple of ``page_bytes``.
        page_bytes: Size of a page.
        num_pages: Pages that could be resident.

    Raises:
        ConfigError: A size that the device cannot have.
        DeviceMemoryError: The addresses cannot be reserved.
        DriverError: Another failure. Nothing stays reserved.
    """

    def __init__(self, backend: Backend, size_bytes: int, page_bytes: int, *, guard: bool = True) -> None:
        self._closed = True  # until the addresses are there
        if size_bytes <= 0 or page_bytes <= 0 or page_bytes % backend.granularity_bytes:
            raise ConfigError(
                f"an arena of {size_bytes} bytes in pages of {page_bytes}: both must be positive, and the page a"
                f" multiple of {backend.granularity_bytes} bytes on {backend.device_id}."
            )
        self.page_bytes = page_bytes
        self.num_pages = -(-size_bytes // page_bytes)
        self.size_bytes = self.num_pages * page_bytes
        self._backend = backend
        self._guard = guard
        self._references = array("i", [0]) * self.num_pages
        self._num_resident_pages = 0
        self._stranded: set[int] = set()  # resident without a reference: the driver refused to unmap them
        # The largest power of two in the page size: what a page can be aligned to.
        self.address = backend.reserve(self.size_bytes, page_bytes & -page_bytes)
        if guard:
            try:
                backend.set_guard(self.address, self.size_bytes, page_bytes, writable=True)
            except (DeviceMemoryError, DriverError):
                backend.release(self.address, self.size_bytes)
                raise
        self._closed = False

    def __repr__(self) -> str:
        return (
            f"<Arena on {self._backend.device_id}: {self._num_resident_pages} of {self.num_pages} pages of"
            f" {self.page_bytes} bytes resident>"
        )

    def __del__(self) -> None:
        if not self._closed:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=1)

    @property
    def num_resident_pages(self) -> int:
        """Pages with memory behind them now; the guard page is not one."""
        return self._num_resident_pages

    @property
    def resident_bytes(self) -> int:
        """Bytes of the resident pages."""
        return self._num_resident_pages * self.page_bytes

    def new_pages(self, page_ranges: Iterable[range]) -> int:
        """How many pages a `map` of these ranges would create."""
        return len(self._unreferenced(self._checked(page_ranges)))

    def freed_pages(self, page_ranges: Iterable[range]) -> int:
        """How many pages an `unmap` of these ranges would remove."""
        dropped = Counter(self._checked(page_ranges))
        return sum(self._references[page] == count for page, count in dropped.items())

    def map(self, page_ranges: Iterable[range]) -> int:
        """Add one reference to each page of each range, all or none. New pages are resident and hold zeros.

        Args:
            page_ranges: Page numbers. A page that is in two ranges gets two references.

        Returns:
            Pages created.

        Raises:
            DeviceMemoryError: The device has no page. References and residency are as they were.
            DriverError: Another failure; likewise.
            InvariantError: A page outside the arena. Nothing was done.
        """
        pages = self._checked(page_ranges)
        created = self._unreferenced(pages)
        self._create(created)
        for page in pages:
            self._references[page] += 1
        return len(created)

    def unmap(self, page_ranges: Iterable[range]) -> int:
        """Drop one reference of each page of each range; unmap the pages that lost their last.

        Unmapping takes no stream: the caller has waited for a fence behind the last work on these pages.

        Returns:
            Pages removed.

        Raises:
            InvariantError: A page has no such reference. Nothing was done.
            DriverError: The driver refused to unmap some pages. All references are dropped; those pages stay
                resident, and a later `map` of them takes them as they are, and zeroes them.
        """
        pages = self._checked(page_ranges)
        self._drop_references(pages)
        removed = self._unreferenced(pages)
        errors = self._remove(removed)
        if errors:
            raise errors[0]
        return len(removed)

    def tensor(self, offset_bytes: int = 0, size_bytes: int | None = None) -> torch.Tensor:
        """An int8 tensor over a part of the range, resident or not. It dangles once the arena is closed.

        Args:
            offset_bytes: Where it begins.
            size_bytes: Its length; None: to the end of the range.
        """
        self._check_open()
        if size_bytes is None:
            size_bytes = self.size_bytes - offset_bytes
        if offset_bytes < 0 or size_bytes <= 0 or offset_bytes + size_bytes > self.size_bytes:
            raise InvariantError(f"{size_bytes} bytes from {offset_bytes} are not within {self!r}")
        return self._backend.tensor(self.address + offset_bytes, size_bytes)

    def seal_guard(self) -> None:
        """Make the guard page zeros and read-only, once warm-up is over and the device has finished all of it."""
        self._check_open()
        if self._guard:
            self._backend.set_guard(self.address, self.size_bytes, self.page_bytes, writable=False)

    def close(self) -> None:
        """Unmap every page and give the addresses back. Closing again does nothing.

        Raises:
            DriverError: Some pages could not be unmapped, so that the addresses stay reserved. The arena is closed.
        """
        if self._closed:
            return
        self._closed = True
        resident = sorted([*(page for page, count in enumerate(self._references) if count), *self._stranded])
        self._references = array("i", [0]) * self.num_pages
        errors = self._remove(resident)
        if errors:
            raise errors[0]
        self._backend.release(self.address, self.size_bytes)

    def _check_open(self) -> None:
        if self._closed:
            raise InvariantError(f"{self!r} is closed")

    def _checked(self, page_ranges: Iterable[range]) -> list[int]:
        self._check_open()
        pages = list(chain.from_iterable(page_ranges))
        if pages and (min(pages) < 0 or max(pages) >= self.num_pages):
            raise InvariantError(f"pages {min(pages)} to {max(pages)} are not all within {self!r}")
        return pages

    def _drop_references(self, pages: Sequence[int]) -> None:
        references = self._references
        for page in pages:
            references[page] -= 1
        lacking = sorted({page for page in pages if references[page] < 0})
        if lacking:
            for page in pages:
                references[page] += 1
            raise InvariantError(f"pages {lacking} have fewer references than they are to lose, in {self!r}")

    def _unreferenced(self, pages: Iterable[int]) -> list[int]:
        return sorted({page for page in pages if not self._references[page]})

    def _create(self, pages: Sequence[int]) -> None:
        """Map and zero pages that have no reference: all or none."""
        done: list[int] = []
        try:
            for run in self._runs(page for page in pages if page not in self._stranded):
                self._backend.map(*self._span(run), self.page_bytes)
                self._num_resident_pages += len(run)
                done += run
            self._backend.zero([self._span(run) for run in self._runs(pages)])
        except (DeviceMemoryError, DriverError) as error:
            self._remove(done)
            raise self._refused(error, len(pages)) from error
        self._stranded.difference_update(pages)

    def _remove(self, pages: Iterable[int]) -> list[DriverError]:
        """Unmap ascending pages that have no reference; those that the driver keeps are stranded."""
        errors = []
        for run in self._runs(pages):
            try:
                self._backend.unmap(*self._span(run), self.page_bytes)
            except DriverError as error:
                self._stranded.update(run)
                errors.append(error)
            else:
                self._stranded.difference_update(run)
                self._num_resident_pages -= len(run)
        return errors

    def _span(self, run: range) -> tuple[int, int]:
        """(address, bytes) of neighbouring pages."""
        return self.address + run.start * self.page_bytes, len(run) * self.page_bytes

    def _runs(self, pages: Iterable[int]) -> list[range]:
        """These ascending pages, neighbours together as far as one call may take them."""
        longest = max(1, MAX_RUN_BYTES // self.page_bytes)
        runs: list[range] = []
        for page in pages:
            if runs and runs[-1].stop == page and len(runs[-1]) < longest:
                runs[-1] = range(runs[-1].start, page + 1)
            else:
                runs.append(range(page, page + 1))
        return runs

    def _refused(self, error: DeviceMemoryError | DriverError, num_pages: int) -> DeviceMemoryError | DriverError:
        figures = (
            f"{error} It was one of {num_pages} pages of {format_bytes(self.page_bytes)} asked for together: none was"
            f" kept, {format_bytes(self.resident_bytes)} are resident here."
        )
        if isinstance(error, DriverError):
            return DriverError(figures, call=error.call, result=error.result, device_id=error.device_id)
        return DeviceMemoryError(figures)
