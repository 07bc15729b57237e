"""What must hold on each of two devices, whoever asks: `tests/core` runs it on a stand-in, `tests/gpu` on real ones.

The current device is per thread, and a thread that never set one is on device 0. So whatever asks for "the" device
in a background thread gets the answer of device 0 for a pool on device 1. Here a pool is on one device, memory is
short on one of the two, and the question comes from a thread whose current device is either of them, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvcached_core.arena import Arena
from kvcached_core.backends.cuda import CudaBackend
from kvcached_core.capacity import driver_free, pool_capacity
from kvcached_core.errors import DeviceMemoryError
from kvcached_core.ledger import Ledger

THREADS = ("main", "fresh", "agent")
NUM_PAGES = 8


@dataclass
class Machine:
    """Two devices.

    Attributes:
        driver: `cuda.bindings.driver` or a stand-in.
        fill: Let another process take all that is free on a device.
        drain: Let it give that back.
        page_bytes: Size of the pages that are mapped.
    """

    driver: Any
    fill: Callable[[int], None]
    drain: Callable[[int], None]
    page_bytes: int

    def call(self, name: str, *arguments: Any) -> Any:
        result, *values = getattr(self.driver, name)(*arguments)
        assert result == self.driver.CUresult.CUDA_SUCCESS, (name, result)
        return values[-1] if values else None

    def has_context(self, ordinal: int) -> bool:
        return bool(self.call("cuDevicePrimaryCtxGetState", ordinal))


@dataclass
class Caller:
    """Somebody with a thread and, in it, a current device or none."""

    machine: Machine
    ordinal: int
    device: int | None
    thread: ThreadPoolExecutor | None

    def ask(self, question: Callable[[], Any]) -> Any:
        """The answer, in the caller's thread, whose current device must not have changed."""
        return (
            self._in_thread(question) if self.thread is None else self.thread.submit(self._in_thread, question).result()
        )

    def _in_thread(self, question: Callable[[], Any]) -> Any:
        before = int(self.machine.call("cuCtxGetCurrent"))
        assert bool(before) == (self.device is not None)
        answer = question()
        assert int(self.machine.call("cuCtxGetCurrent")) == before, "the caller's current context has changed"
        return answer


@contextmanager
def caller(machine: Machine, ordinal: int, device: int | None, thread: str) -> Iterator[Caller]:
    """A caller for a pool on ``ordinal``; an agent's thread has worked for the other device before."""
    pool = None if thread == "main" else ThreadPoolExecutor(1)
    it = Caller(machine, ordinal, device, pool)
    if thread == "agent" and pool:
        elsewhere = CudaBackend(1 - ordinal, driver=machine.driver)
        pool.submit(elsewhere.memory).result()
        elsewhere.close()
    run = (lambda function: function()) if pool is None else (lambda function: pool.submit(function).result())
    if device is not None:
        context = machine.call("cuDevicePrimaryCtxRetain", device)
        run(lambda: machine.call("cuCtxSetCurrent", context))
    try:
        yield it
    finally:
        if device is not None:
            run(lambda: machine.call("cuCtxSetCurrent", 0))
            machine.call("cuDevicePrimaryCtxRelease", device)
        if pool is not None:
            pool.shutdown()


@contextmanager
def full(machine: Machine, ordinal: int) -> Iterator[None]:
    machine.fill(ordinal)
    try:
        yield
    finally:
        machine.drain(ordinal)


def check_query(asker: Caller) -> None:
    """The other device is full: the pool's own is not, and says so."""
    backend = CudaBackend(asker.ordinal, driver=asker.machine.driver)
    with full(asker.machine, 1 - asker.ordinal):
        memory = asker.ask(backend.memory)
        assert memory.free_bytes > memory.total_bytes / 2, memory
    with full(asker.machine, asker.ordinal):
        memory = asker.ask(backend.memory)
        assert memory.free_bytes < memory.total_bytes / 2, memory
    asker.ask(backend.close)


def check_growth(asker: Caller) -> None:
    """The other device is full: the pool grows and shrinks all the same."""
    backend = CudaBackend(asker.ordinal, driver=asker.machine.driver)
    with full(asker.machine, 1 - asker.ordinal):
        arena = _arena(backend, asker.machine)
        assert asker.ask(lambda: arena.map([range(NUM_PAGES)])) == NUM_PAGES
        asker.ask(arena.seal_guard)
        assert asker.ask(lambda: arena.unmap([range(NUM_PAGES)])) == NUM_PAGES
        asker.ask(arena.close)
    asker.ask(backend.close)


def check_pressure(asker: Caller) -> None:
    """The pool's own device is full and the other one is not: growing fails whole, and works once there is room."""
    backend = CudaBackend(asker.ordinal, driver=asker.machine.driver)
    arena = _arena(backend, asker.machine)

    def grow_in_vain() -> str:
        try:
            arena.map([range(NUM_PAGES)])
        except DeviceMemoryError as error:
            return str(error)
        raise AssertionError("a full device gave pages")

    with full(asker.machine, asker.ordinal):
        assert f"{backend.device_id}: CUDA_ERROR_OUT_OF_MEMORY" in asker.ask(grow_in_vain)
    assert arena.num_resident_pages == 0
    assert asker.ask(lambda: arena.map([range(NUM_PAGES)])) == NUM_PAGES
    arena.close()
    backend.close()


def check_fence(asker: Caller) -> None:
    """A fence on the default stream means the pool's device's own."""
    backend = CudaBackend(asker.ordinal, driver=asker.machine.driver)
    fence = asker.ask(lambda: backend.fence([0]))
    assert asker.ask(fence.done)
    asker.ask(backend.close)


def check_contexts(asker: Caller) -> None:
    """Whatever a pool does, only its own device has a context because of it, and none once it is closed."""
    backend = CudaBackend(asker.ordinal, driver=asker.machine.driver)
    arena = _arena(backend, asker.machine)
    asker.ask(lambda: (backend.memory(), arena.map([range(2)]), backend.fence([0]).done()))
    expected = {asker.ordinal, asker.device} - {None}
    assert {device for device in (0, 1) if asker.machine.has_context(device)} == expected
    asker.ask(arena.close)
    asker.ask(backend.close)
    assert {device for device in (0, 1) if asker.machine.has_context(device)} == {asker.device} - {None}


def check_capacity(asker: Caller) -> None:
    """What a member may take for its pool is what its own device has; a ceiling holds from the first byte."""
    backend = CudaBackend(asker.ordinal, driver=asker.machine.driver)
    with TemporaryDirectory() as directory:
        total_bytes = backend.memory().total_bytes
        ledger = Ledger.open(
            backend.device_id, total_bytes, runtime_dir=Path(directory, "run"), driver_free=driver_free(backend.memory)
        )
        account = ledger.join("pool", engine="vllm")
        limited = ledger.join("limited", engine="vllm", ceiling_bytes=asker.machine.page_bytes)
        with full(asker.machine, 1 - asker.ordinal):
            capacity = asker.ask(lambda: pool_capacity(backend, account))
            assert (capacity.device_id, capacity.total_bytes) == (backend.device_id, total_bytes)
            assert capacity.may_take_bytes > total_bytes / 2
            assert asker.ask(lambda: pool_capacity(backend, limited)).may_take_bytes == asker.machine.page_bytes
        with full(asker.machine, asker.ordinal):
            assert asker.ask(lambda: pool_capacity(backend, account)).may_take_bytes < total_bytes / 2
        ledger.close()
    asker.ask(backend.close)


CLAIMS = (check_query, check_capacity, check_growth, check_pressure, check_fence, check_contexts)


def _arena(backend: CudaBackend, machine: Machine) -> Arena:
    return Arena(backend, NUM_PAGES * machine.page_bytes, machine.page_bytes)
