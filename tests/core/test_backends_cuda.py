"""The cuda backend on two devices: every answer is its own device's, whoever asks in whatever thread.

The same claims run on real devices in `tests/gpu`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes.util import find_library
from uuid import UUID

import pytest
from kvcached_core.arena import Arena
from kvcached_core.backends import load_backend
from kvcached_core.backends.cuda import CudaBackend, current_device_id
from kvcached_core.backends.driver import load_driver
from kvcached_core.errors import DeviceMemoryError, DriverError, InvariantError, UnsupportedError

from tests import device_correctness
from tests.device_correctness import Machine

from .fake_driver import MIB, CUresult, CUstreamCaptureMode, FakeDriver, Gpu

PAGE_BYTES = FakeDriver.granularity_bytes


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(Gpu(2 * MIB), Gpu(MIB))


@pytest.mark.parametrize("claim", device_correctness.CLAIMS)
@pytest.mark.parametrize("thread", device_correctness.THREADS)
@pytest.mark.parametrize("callers_device", [None, 0, 1])
@pytest.mark.parametrize("ordinal", [0, 1])
def test_every_answer_is_the_pools_own_devices(
    driver: FakeDriver,
    ordinal: int,
    callers_device: int | None,
    thread: str,
    claim: Callable[[device_correctness.Caller], None],
) -> None:
    machine = Machine(
        driver, lambda device: driver.gpus[device].fill(), lambda device: driver.gpus[device].drain(), PAGE_BYTES
    )
    with device_correctness.caller(machine, ordinal, callers_device, thread) as caller:
        claim(caller)
    assert [gpu.used_bytes for gpu in driver.gpus] == [0, 0]


@pytest.mark.parametrize("visible", ["1", "GPU-{}", "1,0"])
def test_a_device_is_the_same_under_any_number(visible: str) -> None:
    gpus = Gpu(MIB), Gpu(2 * MIB)
    elsewhere = CudaBackend(1, driver=FakeDriver(*gpus))
    here = CudaBackend(0, driver=FakeDriver(*gpus, visible=visible.format(gpus[1].uuid)))
    assert here.device_id == elsewhere.device_id == f"GPU-{gpus[1].uuid}"
    arena = Arena(elsewhere, 8 * PAGE_BYTES, PAGE_BYTES, guard=False)
    arena.map([range(8)])
    assert here.memory().free_bytes == 2 * MIB - 8 * PAGE_BYTES
    arena.close()


def test_a_device_is_named_as_nvidia_smi_names_it() -> None:
    uuid = UUID("3f1c0a7e-0000-1111-2222-333344445555")
    driver = FakeDriver(Gpu(MIB, uuid=uuid), Gpu(MIB, uuid=uuid, name="NVIDIA H200 MIG 1g.18gb"))
    assert [CudaBackend(ordinal, driver=driver).device_id for ordinal in (0, 1)] == [f"GPU-{uuid}", f"MIG-{uuid}"]


def test_the_current_device_is_the_threads_and_asking_creates_nothing(driver: FakeDriver) -> None:
    ids = [f"GPU-{gpu.uuid}" for gpu in driver.gpus]
    before = driver.holdings()
    assert current_device_id(driver) == ids[0]
    assert driver.holdings() == before
    driver.set_device(1)
    assert current_device_id(driver) == ids[1]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(current_device_id, driver).result() == ids[0]
    assert driver.contexts_created == [1]


# --- making and closing ---


def test_a_backend_holds_a_context_and_a_stream_until_it_is_closed(driver: FakeDriver) -> None:
    before = driver.holdings()
    backend = CudaBackend(1, driver=driver)
    stream = driver.make_stream(1)
    assert backend.fence([stream, stream]).done()
    del driver.streams[stream]
    assert driver.holdings()["contexts"] == [0, 1]
    backend.close()
    backend.close()
    assert (driver.holdings(), driver.events) == (before, {})


@pytest.mark.parametrize("result", [CUresult.CUDA_ERROR_INVALID_VALUE, CUresult.CUDA_ERROR_OUT_OF_MEMORY])
def test_a_backend_that_cannot_be_made_leaves_nothing(driver: FakeDriver, result: CUresult) -> None:
    before = driver.holdings()
    driver.inject(None)
    CudaBackend(0, driver=driver).close()
    calls = list(driver.calls)
    for position in range(calls.index("cuStreamCreate") + 1):
        driver.inject(position, result)
        with pytest.raises((DriverError, DeviceMemoryError, UnsupportedError), match=result.name):
            CudaBackend(0, driver=driver)
        assert driver.holdings() == before, calls[position]


def test_a_device_too_full_for_a_context_is_not_told_of_with_the_figures_of_another(driver: FakeDriver) -> None:
    """The driver is asked about a thread's current device, and here that is the other one."""
    driver.set_device(0)
    driver.inject(None)
    CudaBackend(1, driver=driver).close()
    driver.inject(driver.calls.index("cuDevicePrimaryCtxRetain"))
    with pytest.raises(DeviceMemoryError, match=str(driver.gpus[1].uuid)) as error:
        CudaBackend(1, driver=driver)
    assert "How much is free there is not known" in str(error.value)
    assert "MiB" not in str(error.value)


@pytest.mark.parametrize("ordinal", [2, -1])
def test_a_device_that_is_not_there_is_refused_with_the_count(driver: FakeDriver, ordinal: int) -> None:
    with pytest.raises(UnsupportedError, match=rf"no device {ordinal}: this process has 2, counted from 0"):
        CudaBackend(ordinal, driver=driver)


def test_a_device_without_virtual_memory_is_refused_before_it_gets_a_context() -> None:
    driver = FakeDriver(Gpu(MIB, virtual_memory=False))
    with pytest.raises(UnsupportedError, match=r"GPU-.* has no virtual memory management"):
        CudaBackend(0, driver=driver)
    assert driver.contexts_created == []


def test_a_process_without_devices_is_told_where_to_look() -> None:
    with pytest.raises(UnsupportedError, match=r"CUDA_ERROR_NO_DEVICE.*CUDA_VISIBLE_DEVICES"):
        CudaBackend(0, driver=FakeDriver())


def test_a_machine_without_the_driver_is_told_so() -> None:
    class NoLibrary:
        def cuInit(self, flags: int) -> None:
            raise RuntimeError("Failed to dlopen libcuda.so.1")

    with pytest.raises(UnsupportedError, match=r"no NVIDIA driver.*libcuda\.so\.1.*--gpus all"):
        CudaBackend(0, driver=NoLibrary())


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'kvcached-core\[cuda\]'"):
        load_backend("cuda")


@pytest.mark.skipif(find_library("cuda") is not None, reason="this machine has an NVIDIA driver")
def test_the_real_package_without_a_driver_is_an_unsupported_machine() -> None:
    pytest.importorskip("cuda.bindings.driver")
    with pytest.raises(UnsupportedError, match="no NVIDIA driver on this machine"):
        load_driver()


# --- fences ---


def test_a_fence_waits_for_all_that_was_launched_before_it_and_nothing_after(driver: FakeDriver) -> None:
    backend = CudaBackend(0, driver=driver)
    first, second = driver.make_stream(0), driver.make_stream(0)
    driver.streams[first].launch()
    fence = backend.fence([first, second])
    driver.streams[second].launch()
    assert not fence.done()
    driver.streams[first].finish()
    assert fence.done()
    assert fence.done()


def test_events_are_used_again_once_their_fence_is_done(driver: FakeDriver) -> None:
    backend = CudaBackend(0, driver=driver)
    stream = driver.make_stream(0)
    for _ in range(10):
        driver.streams[stream].launch()
        fence = backend.fence([stream])
        assert not fence.done()
        driver.streams[stream].finish()
        assert fence.done()
    assert len(driver.events) == 1


def test_a_fence_on_another_devices_stream_is_refused_and_loses_no_event(driver: FakeDriver) -> None:
    backend = CudaBackend(0, driver=driver)
    mine, others = driver.make_stream(0), driver.make_stream(1)
    for _ in range(2):
        with pytest.raises(DriverError) as caught:
            backend.fence([mine, others])
        assert (caught.value.call, caught.value.result) == ("cuEventRecord", "CUDA_ERROR_INVALID_HANDLE")
        assert caught.value.device_id == backend.device_id
    assert len(driver.events) == 2


def test_no_query_disturbs_a_capture_in_another_thread(driver: FakeDriver) -> None:
    backend = CudaBackend(0, driver=driver)
    arena = Arena(backend, 4 * PAGE_BYTES, PAGE_BYTES)
    fence = backend.fence([driver.make_stream(0)])
    driver.capture = "on"
    assert fence.done()
    assert arena.map([range(4)]) == 4
    arena.close()
    assert driver.capture == "on"
    driver.cuCtxPushCurrent(backend._driver.context)
    assert driver.cuEventQuery(next(iter(driver.events)))[0] == CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    driver.cuCtxPopCurrent()


def test_work_that_failed_is_an_error_that_says_to_restart(driver: FakeDriver) -> None:
    fence = CudaBackend(0, driver=driver).fence([driver.make_stream(0)])
    driver.inject(2, CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
    with pytest.raises(DriverError, match=r"cuEventQuery failed on GPU-.*ILLEGAL_ADDRESS.*restart the engine"):
        fence.done()


# --- the guard page ---


@pytest.fixture
def arena(driver: FakeDriver) -> Iterator[Arena]:
    arena = Arena(CudaBackend(0, driver=driver), 8 * PAGE_BYTES, PAGE_BYTES)
    yield arena
    driver.inject(None)
    arena.close()


def access_to(driver: FakeDriver, arena: Arena) -> str:
    """For each page: w(rite and read), r(ead) or - (fault)."""
    addresses = range(arena.address, arena.address + arena.size_bytes, arena.page_bytes)
    return "".join(
        "w" if driver.can_write(address) else "r" if driver.can_read(address) else "-" for address in addresses
    )


def first_bytes(arena: Arena) -> list[int]:
    from .test_arena import read_memory

    return [read_memory(arena, page * arena.page_bytes) for page in range(arena.num_pages)]


def test_without_a_guard_unmapped_addresses_fault(driver: FakeDriver) -> None:
    arena = Arena(CudaBackend(0, driver=driver), 8 * PAGE_BYTES, PAGE_BYTES, guard=False)
    arena.map([range(2, 4)])
    assert access_to(driver, arena) == "--ww----"
    arena.seal_guard()
    arena.unmap([range(2, 3)])
    assert access_to(driver, arena) == "---w----"
    arena.close()


def test_the_guard_is_writable_until_sealed_and_then_zero_and_read_only(driver: FakeDriver, arena: Arena) -> None:
    arena.map([range(2, 4)])
    assert access_to(driver, arena) == "wwwwwwww"
    arena.seal_guard()
    assert first_bytes(arena) == [0, 0, 0x58, 0x58, 0, 0, 0, 0]
    assert access_to(driver, arena) == "rrwwrrrr"


def test_pages_that_come_after_the_seal_are_writable_and_leave_the_guard_behind(
    driver: FakeDriver, arena: Arena
) -> None:
    arena.seal_guard()
    arena.map([range(1, 5)])
    assert access_to(driver, arena) == "rwwwwrrr"
    arena.unmap([range(2, 4)])
    assert access_to(driver, arena) == "rwrrwrrr"
    assert first_bytes(arena)[2:4] == [0, 0]
    arena.map([range(8)])
    assert access_to(driver, arena) == "wwwwwwww"


def test_an_arena_with_every_page_mapped_can_be_sealed(driver: FakeDriver, arena: Arena) -> None:
    assert access_to(driver, arena) == "wwwwwwww"
    arena.map([range(8)])
    arena.seal_guard()
    arena.unmap([range(8)])
    assert first_bytes(arena) == [0] * 8
    assert access_to(driver, arena) == "rrrrrrrr"


def test_sealing_takes_one_call_for_each_run_of_unmapped_pages(driver: FakeDriver, arena: Arena) -> None:
    arena.map([range(2, 4)])
    driver.inject(None)
    arena.seal_guard()
    assert driver.calls.count("cuMemSetAccess") == 2


@pytest.mark.parametrize("result", [CUresult.CUDA_ERROR_INVALID_VALUE, CUresult.CUDA_ERROR_OUT_OF_MEMORY])
def test_a_seal_that_fails_can_be_repeated(driver: FakeDriver, arena: Arena, result: CUresult) -> None:
    arena.map([range(2, 4)])
    driver.inject(None)
    arena.seal_guard()
    for position, name in enumerate(list(driver.calls)):
        if name in {"cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode"}:
            continue
        driver.inject(position, result)
        with pytest.raises((DriverError, DeviceMemoryError)):
            arena.seal_guard()
        driver.inject(None)
        arena.seal_guard()
        assert access_to(driver, arena) == "rrwwrrrr"


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess"])
def test_a_guard_that_cannot_return_is_reported_and_stands_again_after_the_next_time(
    driver: FakeDriver, arena: Arena, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    arena.seal_guard()
    arena.map([range(3, 4)])
    driver.inject(["cuCtxPushCurrent", "cuMemUnmap", "cuMemMap", "cuMemSetAccess"].index(call))
    assert arena.unmap([range(3, 4)]) == 1
    assert "no guard page behind" in caplog.text
    driver.inject(None)
    assert access_to(driver, arena) == "rrr-rrrr"
    arena.map([range(3, 4)])
    assert access_to(driver, arena) == "rrrwrrrr"
    arena.unmap([range(3, 4)])
    assert access_to(driver, arena) == "rrrrrrrr"


def test_two_arenas_have_a_guard_each(driver: FakeDriver) -> None:
    backend = CudaBackend(0, driver=driver)
    arenas = [Arena(backend, 4 * PAGE_BYTES, PAGE_BYTES) for _ in range(2)]
    arenas[0].seal_guard()
    assert [access_to(driver, arena) for arena in arenas] == ["rrrr", "wwww"]
    arenas[0].close()
    arenas[1].map([range(4)])
    assert driver.gpus[0].used_bytes == 5 * PAGE_BYTES
    arenas[1].close()


# --- the calling thread ---


@pytest.mark.parametrize("name", ["cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode"])
def test_a_thread_that_cannot_be_restored_is_lost(driver: FakeDriver, name: str) -> None:
    backend = CudaBackend(0, driver=driver)
    fence = backend.fence([0])
    driver.inject(None)
    assert fence.done()
    last = len(driver.calls) - 1 - driver.calls[::-1].index(name)
    fence = backend.fence([0])
    driver.inject(last, CUresult.CUDA_ERROR_INVALID_CONTEXT)
    with pytest.raises(InvariantError, match=rf"{name} failed.*another device than it believes"):
        fence.done()


def test_a_thread_that_is_lost_while_a_shortage_is_told_of_is_lost(
    driver: FakeDriver, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    pop = driver.cuCtxPopCurrent
    answers = iter([(CUresult.CUDA_ERROR_INVALID_CONTEXT, None)])
    for expected, message in ((DeviceMemoryError, "The driver reports"), (InvariantError, "another device than it")):
        driver.inject(["cuCtxPushCurrent", "cuMemCreate"].index("cuMemCreate"))
        with pytest.raises(expected, match=message):
            arena.map([range(1)])
        monkeypatch.setattr(driver, "cuCtxPopCurrent", lambda: next(answers, None) or pop())


def test_a_failure_inside_restores_the_thread(driver: FakeDriver) -> None:
    backend = CudaBackend(0, driver=driver)
    driver.set_device(1)
    for position, ask in ((1, backend.memory), (2, lambda: backend.fence([0]))):
        driver.inject(position)
        with pytest.raises(DeviceMemoryError):
            ask()
    assert [context.device for context in driver.stack] == [1]
    assert driver.capture_mode == CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
