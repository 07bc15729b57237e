"""What an arena promises on any backend, as one function that tests an implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from threading import Thread
from typing import TYPE_CHECKING

from kvcached_core.arena import Arena
from kvcached_core.backends.base import Backend, DeviceMemory, Fence
from kvcached_core.errors import DeviceMemoryError, DriverError, InvariantError

if TYPE_CHECKING:
    import torch

NUM_PAGES = 8


class FailingBackend:
    """A backend whose n-th call that changes something fails, before it does anything.

    Args:
        backend: Does all else.

    Attributes:
        fail_at: Which call from now on fails (0: the next); None: none.
        make_error: What it raises.
    """

    def __init__(
        self, backend: Backend, make_error: Callable[[], Exception] = lambda: DeviceMemoryError("injected")
    ) -> None:
        self._backend = backend
        self.make_error = make_error
        self.fail_at: int | None = None
        self.device_id = backend.device_id
        self.granularity_bytes = backend.granularity_bytes

    @property
    def device(self) -> torch.device:
        return self._backend.device

    def reserve(self, size_bytes: int, alignment_bytes: int) -> int:
        self._count()
        return self._backend.reserve(size_bytes, alignment_bytes)

    def release(self, address: int, size_bytes: int) -> None:
        self._backend.release(address, size_bytes)

    def map(self, address: int, size_bytes: int, page_bytes: int) -> None:
        self._count()
        self._backend.map(address, size_bytes, page_bytes)

    def unmap(self, address: int, size_bytes: int, page_bytes: int) -> None:
        self._count()
        self._backend.unmap(address, size_bytes, page_bytes)

    def zero(self, spans: Sequence[tuple[int, int]]) -> None:
        self._count()
        self._backend.zero(spans)

    def fence(self, streams: Sequence[int]) -> Fence:
        return self._backend.fence(streams)

    def memory(self) -> DeviceMemory:
        return self._backend.memory()

    def tensor(self, address: int, size_bytes: int) -> torch.Tensor:
        return self._backend.tensor(address, size_bytes)

    def set_guard(self, address: int, size_bytes: int, page_bytes: int, *, writable: bool) -> None:
        self._count()
        self._backend.set_guard(address, size_bytes, page_bytes, writable=writable)

    def close(self) -> None:
        self._backend.close()

    def _count(self) -> None:
        if self.fail_at is None:
            return
        if self.fail_at == 0:
            self.fail_at = None
            raise self.make_error()
        self.fail_at -= 1


def read_through_tensor(arena: Arena, offset_bytes: int) -> int:
    """The byte at an offset, unsigned."""
    return int(arena.tensor(offset_bytes, 1).item()) & 0xFF


def write_through_tensor(arena: Arena, offset_bytes: int, value: int) -> None:
    """Put a byte (0 to 127) at an offset; it is there when this returns: what unmaps next waits for no kernel."""
    if int(arena.tensor(offset_bytes, 1).fill_(value).item()) != value:
        raise AssertionError(f"what was written at {offset_bytes} does not stay there")


def check_arena(
    make_backend: Callable[[], Backend],
    *,
    page_bytes: int | None = None,
    guard: bool = True,
    read: Callable[[Arena, int], int] = read_through_tensor,
    write: Callable[[Arena, int, int], None] = write_through_tensor,
) -> None:
    """Check that arenas on a backend keep their promises; AssertionError says which one is broken.

    Args:
        make_backend: Called once for each promise; the backend is closed after it. Needs room for 9 pages.
        page_bytes: Size of a page; None: the backend's granularity.
        guard: As for `Arena`.
        read: The byte (0 to 255) at an offset of a resident page.
        write: Puts a byte (0 to 127) there, and waits until it is.
    """
    for check in _CHECKS:
        backend = FailingBackend(make_backend())
        try:
            size_bytes = page_bytes or backend.granularity_bytes
            with _opened(Arena(backend, NUM_PAGES * size_bytes, size_bytes, guard=guard)) as arena:
                check(_Subject(arena, backend, read, write))
        finally:
            backend.close()


@contextmanager
def _opened(arena: Arena) -> Iterator[Arena]:
    try:
        yield arena
    finally:
        arena.close()


class _Subject:
    """An arena under test, read and written by page."""

    def __init__(
        self,
        arena: Arena,
        backend: FailingBackend,
        read: Callable[[Arena, int], int],
        write: Callable[[Arena, int, int], None],
    ) -> None:
        self.arena = arena
        self.backend = backend
        self._read = read
        self._write = write

    def ends_of(self, page: int) -> tuple[int, int]:
        """Its first and last byte."""
        page_bytes = self.arena.page_bytes
        return self._read(self.arena, page * page_bytes), self._read(self.arena, (page + 1) * page_bytes - 1)

    def fill(self, page: int, value: int) -> None:
        for offset_bytes in (page * self.arena.page_bytes, (page + 1) * self.arena.page_bytes - 1):
            self._write(self.arena, offset_bytes, value)


def _check_an_arena_begins_empty(it: _Subject) -> None:
    arena = it.arena
    _equal("pages of a fresh arena", (arena.num_pages, arena.num_resident_pages, arena.resident_bytes), (8, 0, 0))
    _equal("its size", arena.size_bytes, NUM_PAGES * arena.page_bytes)
    _equal("its address modulo the granularity", arena.address % it.backend.granularity_bytes, 0)
    _equal("pages that mapping all would create", arena.new_pages([range(8)]), 8)
    _equal("pages that mapping none creates", arena.map([]), 0)


def _check_mapped_pages_are_zero_and_hold_what_is_written(it: _Subject) -> None:
    _equal("pages created", it.arena.map([range(3), range(5, 6)]), 4)
    _equal("resident pages", it.arena.num_resident_pages, 4)
    for page in (0, 1, 2, 5):
        _equal(f"the ends of page {page}", it.ends_of(page), (0, 0))
        it.fill(page, page + 1)
    for page in (0, 1, 2, 5):
        _equal(f"what was written to page {page}", it.ends_of(page), (page + 1, page + 1))


def _check_a_page_that_comes_back_is_zero(it: _Subject) -> None:
    for _ in range(3):
        it.arena.map([range(8)])
        for page in range(8):
            _equal(f"the ends of page {page}", it.ends_of(page), (0, 0))
            it.fill(page, 77)
        _equal("pages removed", it.arena.unmap([range(8)]), 8)
        _equal("resident pages", it.arena.num_resident_pages, 0)


def _check_a_shared_page_stays_until_its_last_reference(it: _Subject) -> None:
    arena = it.arena
    arena.map([range(3)])
    it.fill(2, 42)
    _equal("pages that a range sharing page 2 would create", arena.new_pages([range(2, 5)]), 2)
    _equal("pages it creates", arena.map([range(2, 5)]), 2)
    _equal("what page 2 holds", it.ends_of(2), (42, 42))
    _equal("pages that dropping the first range would remove", arena.freed_pages([range(3)]), 2)
    _equal("pages it removes", arena.unmap([range(3)]), 2)
    _equal("what page 2 holds", it.ends_of(2), (42, 42))
    _equal("pages that dropping the second removes", arena.unmap([range(2, 5)]), 3)


def _check_a_page_named_twice_has_two_references(it: _Subject) -> None:
    arena = it.arena
    _equal("new pages of two ranges that share one", arena.new_pages([range(2), range(1, 3)]), 3)
    _equal("pages they create", arena.map([range(2), range(1, 3)]), 3)
    _equal("pages removed with one of them", arena.unmap([range(2)]), 1)
    arena.map([range(2)])
    _equal("pages that dropping both would remove", arena.freed_pages([range(2), range(1, 3)]), 3)
    _equal("pages removed", arena.unmap([range(2), range(1, 3)]), 3)


def _check_a_map_that_fails_leaves_everything_as_it_was(it: _Subject) -> None:
    arena, ranges = it.arena, [range(2, 6), range(7, 8)]
    arena.map([range(2, 4)])
    it.fill(2, 11)
    for fail_at in count():
        it.backend.fail_at = fail_at
        try:
            created = arena.map(ranges)
        except DeviceMemoryError:
            _equal(f"resident pages after call {fail_at} failed", arena.num_resident_pages, 2)
            _equal("new pages then", arena.new_pages([range(8)]), 6)
            _equal("what page 2 holds then", it.ends_of(2), (11, 11))
        else:
            break
    it.backend.fail_at = None
    _equal("calls of a map of three new pages, two of them neighbours", fail_at, 3)
    _equal("pages created once nothing fails", created, 3)
    _equal("the ends of a page then", it.ends_of(5), (0, 0))
    _equal("pages removed then", arena.unmap(ranges), 3)


def _check_pages_that_cannot_be_unmapped_are_zero_when_they_are_mapped_again(it: _Subject) -> None:
    arena = it.arena
    arena.map([range(7)])
    it.fill(3, 33)
    it.backend.make_error = lambda: DriverError("injected")
    it.backend.fail_at = 1
    apart = [range(1), range(2, 5), range(6, 7)]
    _raises("unmapping pages that the driver keeps", DriverError, lambda: arena.unmap(apart))
    _equal("resident pages after it, of them two in use", arena.num_resident_pages, 5)
    _equal("pages that mapping one of them again would create", arena.new_pages([range(3, 4)]), 1)
    arena.map([range(2, 4)])
    _equal("resident pages then", arena.num_resident_pages, 5)
    _equal("the ends of it then", it.ends_of(3), (0, 0))
    _equal("pages removed, with one that was in use between them", arena.unmap([range(1, 4)]), 3)
    _equal("resident pages after that", arena.num_resident_pages, 2)


def _check_neighbours_come_and_go_one_by_one(it: _Subject) -> None:
    arena = it.arena
    _equal("pages mapped together", arena.map([range(8)]), 8)
    for page in (3, 0, 7):
        _equal("pages removed alone", arena.unmap([range(page, page + 1)]), 1)
    for page in (1, 2, 4, 5, 6):
        it.fill(page, page)
    _equal("pages mapped one by one", [arena.map([range(page, page + 1)]) for page in (3, 0, 7)], [1, 1, 1])
    _equal("what the others hold", [it.ends_of(page)[0] for page in range(8)], [0, 1, 2, 0, 4, 5, 6, 0])
    _equal("pages removed together", arena.unmap([range(8)]), 8)


def _check_what_cannot_be_is_refused_and_changes_nothing(it: _Subject) -> None:
    arena = it.arena
    arena.map([range(2)])
    _raises("mapping beyond the end", InvariantError, lambda: arena.map([range(6, 9)]))
    _raises("mapping before the beginning", InvariantError, lambda: arena.map([range(-1, 1)]))
    _raises("unmapping what is not mapped", InvariantError, lambda: arena.unmap([range(1, 3)]))
    _raises("unmapping twice what has one reference", InvariantError, lambda: arena.unmap([range(2), range(1, 2)]))
    _raises("a tensor beyond the end", InvariantError, lambda: arena.tensor(0, arena.size_bytes + 1))
    _equal("resident pages after all that", arena.num_resident_pages, 2)
    _equal("pages removed", arena.unmap([range(2)]), 2)


def _check_any_thread_may_map(it: _Subject) -> None:
    created: list[int] = []
    thread = Thread(target=lambda: created.append(it.arena.map([range(3)])))
    thread.start()
    thread.join()
    _equal("pages created in a fresh thread", created, [3])
    it.fill(1, 5)
    _equal("what is read in this one", it.ends_of(1), (5, 5))


def _check_pages_are_writable_after_the_guard_is_sealed(it: _Subject) -> None:
    arena = it.arena
    arena.map([range(2)])
    it.fill(0, 9)
    arena.seal_guard()
    arena.map([range(1, 4)])
    for page in range(4):
        it.fill(page, page + 20)
    _equal("what the pages hold", [it.ends_of(page)[0] for page in range(4)], [20, 21, 22, 23])
    arena.unmap([range(1, 4)])
    arena.map([range(2, 3)])
    _equal("the ends of a page that came back", it.ends_of(2), (0, 0))


def _check_the_device_answers_for_its_memory(it: _Subject) -> None:
    memory = it.backend.memory()
    if memory.free_bytes is not None and not 0 <= memory.free_bytes <= memory.total_bytes:
        raise AssertionError(f"free is not between nothing and the total: {memory}")


def _check_a_fence_behind_nothing_is_done(it: _Subject) -> None:
    fence = it.backend.fence([])
    _equal("a fence behind no stream, twice", (fence.done(), fence.done()), (True, True))


def _check_a_closed_arena_holds_nothing_and_refuses(it: _Subject) -> None:
    arena = it.arena
    arena.map([range(8), range(3)])
    arena.close()
    arena.close()
    _equal("resident pages of a closed arena", arena.num_resident_pages, 0)
    _raises("mapping in it", InvariantError, lambda: arena.map([range(1)]))
    _raises("a tensor of it", InvariantError, lambda: arena.tensor())


_CHECKS = (
    _check_an_arena_begins_empty,
    _check_mapped_pages_are_zero_and_hold_what_is_written,
    _check_a_page_that_comes_back_is_zero,
    _check_a_shared_page_stays_until_its_last_reference,
    _check_a_page_named_twice_has_two_references,
    _check_a_map_that_fails_leaves_everything_as_it_was,
    _check_pages_that_cannot_be_unmapped_are_zero_when_they_are_mapped_again,
    _check_neighbours_come_and_go_one_by_one,
    _check_what_cannot_be_is_refused_and_changes_nothing,
    _check_any_thread_may_map,
    _check_pages_are_writable_after_the_guard_is_sealed,
    _check_the_device_answers_for_its_memory,
    _check_a_fence_behind_nothing_is_done,
    _check_a_closed_arena_holds_nothing_and_refuses,
)


def _equal(what: str, seen: object, expected: object) -> None:
    if seen != expected:
        raise AssertionError(f"{what}: {seen!r}, expected {expected!r}")


def _raises(what: str, kind: type[Exception], action: Callable[[], object]) -> None:
    try:
        action()
    except kind:
        return
    raise AssertionError(f"{what} did not raise {kind.__name__}")
