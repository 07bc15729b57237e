"""The arena's promises on every backend that runs here, and beside a naive model."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable
from itertools import groupby

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kvcached_core.arena import Arena
from kvcached_core.backends.cuda import CudaBackend
from kvcached_core.backends.host import HostBackend
from kvcached_core.errors import ConfigError, DeviceMemoryError, DriverError, InvariantError
from kvcached_core.testing import FailingBackend, check_arena

from .fake_driver import MIB, CUresult, FakeDriver, Gpu


def read_memory(arena: Arena, offset_bytes: int) -> int:
    return ctypes.c_uint8.from_address(arena.address + offset_bytes).value


def write_memory(arena: Arena, offset_bytes: int, value: int) -> None:
    ctypes.c_uint8.from_address(arena.address + offset_bytes).value = value


@pytest.mark.parametrize("page_bytes", [4096, 64 << 10, 96 << 10])
def test_arenas_on_the_host_keep_their_promises(page_bytes: int) -> None:
    check_arena(lambda: HostBackend(MIB), page_bytes=page_bytes, read=read_memory, write=write_memory)


def test_arenas_on_the_host_keep_their_promises_through_tensors() -> None:
    pytest.importorskip("torch")
    check_arena(lambda: HostBackend(MIB))


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("ordinal", [0, 1])
def test_arenas_on_a_cuda_device_keep_their_promises(ordinal: int, guard: bool) -> None:
    driver = FakeDriver(Gpu(MIB), Gpu(MIB))
    before = driver.holdings()
    check_arena(lambda: CudaBackend(ordinal, driver=driver), guard=guard, read=read_memory, write=write_memory)
    assert driver.holdings() == before


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(Gpu(MIB), Gpu(MIB))


PAGE_BYTES = FakeDriver.granularity_bytes
# Giving the thread back its own context is no step of an operation; see test_a_thread_that_cannot_be_restored_is_lost.
THREAD_CALLS = {"cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode"}


def failing_positions(driver: FakeDriver, calls: list[str]) -> list[int]:
    return [position for position, name in enumerate(calls) if name not in THREAD_CALLS]


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("result", [CUresult.CUDA_ERROR_OUT_OF_MEMORY, CUresult.CUDA_ERROR_INVALID_VALUE])
def test_a_map_undoes_itself_at_every_failing_driver_call(driver: FakeDriver, guard: bool, result: CUresult) -> None:
    arena = Arena(CudaBackend(1, driver=driver), 8 * PAGE_BYTES, PAGE_BYTES, guard=guard)
    arena.map([range(2, 3)])
    before = driver.holdings()
    driver.inject(None)
    arena.map([range(1, 5)])
    calls = list(driver.calls)
    arena.unmap([range(1, 5)])
    assert driver.holdings() == before
    for position in failing_positions(driver, calls):
        driver.inject(position, result)
        with pytest.raises((DeviceMemoryError, DriverError), match=result.name):
            arena.map([range(1, 5)])
        assert driver.holdings() == before, f"call {position}, {calls[position]}"
        assert (arena.num_resident_pages, arena.new_pages([range(8)])) == (1, 7)
        driver.inject(None)
        assert arena.map([range(1, 5)]) == 3
        assert [read_memory(arena, page * PAGE_BYTES) for page in range(1, 5)] == [0, 0, 0, 0]
        assert arena.unmap([range(1, 5)]) == 3
    arena.close()


def test_a_device_that_runs_out_at_page_k_keeps_what_it_had(driver: FakeDriver) -> None:
    arena = Arena(CudaBackend(0, driver=driver), 32 * PAGE_BYTES, PAGE_BYTES)
    arena.map([range(3)])
    before = driver.holdings()
    with pytest.raises(
        DeviceMemoryError,
        match=r"OUT_OF_MEMORY.* 0 B of 1\.00 MiB free.*29 pages of 64\.00 KiB.*none was kept, 192\.00 KiB are",
    ):
        arena.map([range(3, 32)])
    assert driver.holdings() == before
    assert arena.map([range(3, 12)]) == 9
    arena.close()


def test_a_driver_that_fails_from_some_call_on_is_an_error_and_the_arena_ends_closed() -> None:
    def fresh() -> tuple[FakeDriver, Arena]:
        driver = FakeDriver(Gpu(MIB))
        return driver, Arena(CudaBackend(0, driver=driver), 8 * PAGE_BYTES, PAGE_BYTES)

    driver, arena = fresh()
    driver.inject(None)
    arena.map([range(4)])
    num_calls = len(driver.calls)
    arena.close()
    for position in range(num_calls):
        driver, arena = fresh()
        driver.inject(position, CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, on=True)
        with pytest.raises((DriverError, InvariantError), match=r"ILLEGAL_ADDRESS.*restart the engine"):
            arena.map([range(4)])
        with pytest.raises((DriverError, InvariantError), match="ILLEGAL_ADDRESS"):
            arena.close()
        arena.close()


@pytest.mark.parametrize("guard", [True, False])
def test_what_cannot_be_unmapped_stays_accounted_and_comes_back_zeroed(driver: FakeDriver, guard: bool) -> None:
    arena = Arena(CudaBackend(0, driver=driver), 8 * PAGE_BYTES, PAGE_BYTES, guard=guard)
    used_before = driver.gpus[0].used_bytes
    ranges = [range(1), range(2, 4)]
    arena.map(ranges)
    driver.inject(None)
    arena.unmap(ranges)
    calls = list(driver.calls)
    kept = set()
    for position in failing_positions(driver, calls):
        arena.map(ranges)
        write_memory(arena, 2 * PAGE_BYTES, 7)
        driver.inject(position, CUresult.CUDA_ERROR_INVALID_VALUE)
        try:
            arena.unmap(ranges)
        except DriverError:
            kept.add(arena.num_resident_pages)
        else:
            assert calls[position] in {"cuMemMap", "cuMemSetAccess"}, "only the guard page may fail without an error"
        driver.inject(None)
        assert driver.gpus[0].used_bytes == used_before + arena.resident_bytes
        assert arena.new_pages(ranges) == 3
        assert arena.map(ranges) == 3
        assert [read_memory(arena, page * PAGE_BYTES) for page in (0, 2, 3)] == [0, 0, 0]
        assert arena.unmap(ranges) == 3
        assert driver.gpus[0].used_bytes == used_before
    assert kept == {1, 2}, "neighbours are kept together"
    arena.close()


def test_neighbours_share_calls(driver: FakeDriver) -> None:
    """What a page costs alone is its memory and its mapping; all else is per run of neighbours."""
    arena = Arena(CudaBackend(0, driver=driver), 8 * PAGE_BYTES, PAGE_BYTES)
    driver.inject(None)
    arena.map([range(2), range(3, 6)])
    assert [driver.calls.count(name) for name in ("cuMemCreate", "cuMemMap", "cuMemSetAccess")] == [5, 5, 2]
    assert [driver.calls.count(name) for name in ("cuMemUnmap", "cuMemRelease")] == [2, 5]
    driver.inject(None)
    arena.unmap([range(2), range(3, 6)])
    assert [driver.calls.count(name) for name in ("cuMemUnmap", "cuMemMap", "cuMemSetAccess")] == [2, 5, 2]
    arena.close()


def test_one_call_takes_no_more_than_its_share(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcached_core.arena.MAX_RUN_BYTES", 3 * PAGE_BYTES)
    arena = Arena(CudaBackend(0, driver=driver), 8 * PAGE_BYTES, PAGE_BYTES, guard=False)
    driver.inject(None)
    arena.map([range(8)])
    assert driver.calls.count("cuMemSetAccess") == 3
    arena.unmap([range(8)])
    assert driver.calls.count("cuMemUnmap") == 3
    arena.close()


def test_closing_takes_what_could_not_be_unmapped_before(driver: FakeDriver) -> None:
    backend = CudaBackend(0, driver=driver)
    for again in (False, True):
        arena = Arena(backend, 8 * PAGE_BYTES, PAGE_BYTES)
        arena.map([range(4)])
        driver.inject(1, CUresult.CUDA_ERROR_INVALID_VALUE)
        with pytest.raises(DriverError, match="cuMemUnmap"):
            arena.unmap([range(4)])
        driver.inject(None)
        if again:
            arena.map([range(2)])
        arena.close()
        assert (arena.num_resident_pages, driver.gpus[0].used_bytes) == (0, 0)


@pytest.mark.parametrize("guard", [True, False])
def test_an_arena_that_cannot_be_made_leaves_nothing(driver: FakeDriver, guard: bool) -> None:
    backend = CudaBackend(0, driver=driver)
    before = driver.holdings()
    driver.inject(None)
    Arena(backend, 8 * PAGE_BYTES, PAGE_BYTES, guard=guard).close()
    for position in failing_positions(driver, list(driver.calls)):
        driver.inject(position)
        try:
            arena = Arena(backend, 8 * PAGE_BYTES, PAGE_BYTES, guard=guard)
        except DeviceMemoryError:
            assert driver.holdings() == before
        else:
            break  # the arena is there before this call
    assert position > (15 if guard else 0)
    driver.inject(None)
    arena.close()


@pytest.mark.parametrize(("size_bytes", "page_bytes"), [(0, 4096), (-1, 4096), (4096, 0), (1 << 20, 5000)])
def test_a_size_that_cannot_be_is_refused(size_bytes: int, page_bytes: int) -> None:
    with pytest.raises(ConfigError, match=rf"{size_bytes} bytes in pages of {page_bytes}.*multiple of 4096"):
        Arena(HostBackend(MIB), size_bytes, page_bytes)


def test_an_arena_is_rounded_up_to_whole_pages() -> None:
    arena = Arena(HostBackend(MIB), 8193, 4096)
    assert (arena.num_pages, arena.size_bytes) == (3, 12288)
    arena.close()


def test_an_arena_that_is_forgotten_warns() -> None:
    arena = Arena(HostBackend(MIB), 4096, 4096)
    with pytest.warns(ResourceWarning, match="was not closed"):
        arena.__del__()
    arena.close()
    arena.__del__()


NUM_PAGES = 12
page_ranges = st.lists(
    st.tuples(st.integers(0, NUM_PAGES), st.integers(0, NUM_PAGES)).map(lambda ends: range(min(ends), max(ends))),
    max_size=3,
)
fail_at = st.none() | st.integers(0, 8)


def runs(pages: Iterable[int]) -> list[list[int]]:
    """Ascending pages, neighbours together."""
    by_offset = groupby(enumerate(sorted(pages)), key=lambda item: item[1] - item[0])
    return [[page for _, page in run] for _, run in by_offset]


class ArenaBesideModel(RuleBasedStateMachine):
    """An arena with injected failures, beside a count of references per page and what each page should hold."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = FailingBackend(HostBackend(MIB))
        self.arena = Arena(self.backend, NUM_PAGES * 4096, 4096)
        self.orders: list[list[range]] = []
        self.stamps: dict[int, int] = {}
        self.stranded: set[int] = set()
        self.next_stamp = 1

    def references(self) -> Counter[int]:
        return Counter(page for order in self.orders for pages in order for page in pages)

    @rule(order=page_ranges, fail_at=fail_at)
    def map(self, order: list[range], fail_at: int | None) -> None:
        new = {page for pages in order for page in pages} - set(self.references())
        assert self.arena.new_pages(order) == len(new)
        self.backend.make_error = lambda: DeviceMemoryError("injected")
        self.backend.fail_at = fail_at
        try:
            created = self.arena.map(order)
        except DeviceMemoryError:
            return
        finally:
            self.backend.fail_at = None
        assert created == len(new)
        self.orders.append(order)
        self.stranded -= new
        for page in new:
            assert read_memory(self.arena, page * 4096) == 0
            self.stamps[page] = self.next_stamp
            write_memory(self.arena, page * 4096, self.next_stamp)
            self.next_stamp = self.next_stamp % 255 + 1

    @rule(which=st.integers(0, 100), fail_at=fail_at)
    def unmap(self, which: int, fail_at: int | None) -> None:
        if not self.orders:
            return
        order = self.orders.pop(which % len(self.orders))
        gone = {page for pages in order for page in pages} - set(self.references())
        assert self.arena.freed_pages(order) == len(gone)
        self.backend.make_error = lambda: DriverError("injected")
        self.backend.fail_at = fail_at
        try:
            assert self.arena.unmap(order) == len(gone)
        except DriverError:
            assert fail_at is not None
            self.stranded.update(runs(gone)[fail_at])
        finally:
            self.backend.fail_at = None
        for page in gone:
            del self.stamps[page]

    @invariant()
    def what_is_referenced_is_resident_and_untouched(self) -> None:
        assert self.arena.num_resident_pages == len(set(self.references()) | self.stranded)
        assert {page: read_memory(self.arena, page * 4096) for page in self.stamps} == self.stamps

    def teardown(self) -> None:
        self.arena.close()


TestArenaBesideModel = ArenaBesideModel.TestCase
TestArenaBesideModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
