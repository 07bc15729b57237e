"""One CUDA device, through the driver's virtual memory calls.

Driver behaviour this relies on (CUDA Driver API; figures and how they were got: ``docs/design/arena.md``):
- The current context is per thread, and what it is in a thread that never set one is nobody's promise. So every
  method pushes this device's primary context and pops it. The caller's stack is afterwards what it was.
- A handle may be released as soon as it is mapped: its memory lives until the last mapping goes (``cuMemRelease``).
  So unmapping is what frees a page, in one call, and no handle is kept.
- A handle is mapped whole or not at all, at one address or at many (the guard page).
- ``cuMemSetAccess`` and ``cuMemUnmap`` may cover many neighbouring mappings in one call. One that fails is taken to
  have done nothing.
- Unmapping takes no stream and waits for none.
- An event query from another thread breaks a graph capture in mode GLOBAL, unless that thread's own mode is
  THREAD_LOCAL: see `_Undisturbing`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import UUID

from kvcached_core.backends.base import DeviceMemory, hookimpl
from kvcached_core.backends.driver import Driver, Entered, load_driver
from kvcached_core.errors import DeviceMemoryError, DriverError, UnsupportedError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class CudaBackend:
    """One device of this process, with its primary context (shared with torch, created if there was none).

    Args:
        ordinal: The device, as this process numbers them.
        driver: `cuda.bindings.driver` (default) or a stand-in with the same functions.

    Raises:
        UnsupportedError: No driver, no such device, or one without virtual memory management.
        DriverError: The driver failed. Nothing stays behind.
    """

    def __init__(self, ordinal: int = 0, *, driver: Any = None) -> None:
        module = load_driver(driver)
        self._device = _device_of(module, ordinal)
        self.device_id = _uuid_of(module, self._device)
        self._ordinal = ordinal
        self._driver = Driver(module, self.device_id)
        self._call = self._driver.call
        self._require_virtual_memory()
        self._properties = _page_properties(module, ordinal)
        minimum = module.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity_bytes = int(self._call("cuMemGetAllocationGranularity", self._properties, minimum))
        flags = module.CUmemAccess_flags
        self._writable = _access(module, self._properties, flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        self._read_only = _access(module, self._properties, flags.CU_MEM_ACCESS_FLAGS_PROT_READ)
        self._guards: list[_Guard] = []
        self._spare_events: list[Any] = []
        self._driver.context = self._call("cuDevicePrimaryCtxRetain", self._device)
        try:
            with self._driver.entered():
                self._stream = self._call("cuStreamCreate", int(module.CUstream_flags.CU_STREAM_NON_BLOCKING))
        except BaseException:
            self._call("cuDevicePrimaryCtxRelease", self._device)
            raise
        self._closed = False

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cuda", self._ordinal)

    def reserve(self, size_bytes: int, alignment_bytes: int) -> int:
        with self._driver.entered():
            return int(self._call("cuMemAddressReserve", size_bytes, alignment_bytes, 0, 0))

    def release(self, address: int, size_bytes: int) -> None:
        with self._driver.entered():
            guard = self._guard_of(address)
            if guard is not None:
                guard.remove()
                self._guards.remove(guard)
            self._call("cuMemAddressFree", address, size_bytes)

    def map(self, address: int, size_bytes: int, page_bytes: int) -> None:
        guard = self._guard_of(address)
        addresses = range(address, address + size_bytes, page_bytes)
        handles: list[Any] = []
        with self._driver.entered(), ExitStack() as undo:
            undo.callback(self._release_all, handles)
            for _ in addresses:
                handles.append(self._call("cuMemCreate", page_bytes, self._properties, 0))
            if guard is not None:
                undo.callback(guard.cover_if_possible, address, size_bytes)
                guard.uncover(address, size_bytes)
            for page_address, handle in zip(addresses, handles, strict=True):
                self._call("cuMemMap", page_address, page_bytes, 0, handle, 0)
                undo.callback(self._call, "cuMemUnmap", page_address, page_bytes)
            self._call("cuMemSetAccess", address, size_bytes, self._writable, 1)
            self._release_all(handles)
            undo.pop_all()

    def unmap(self, address: int, size_bytes: int, page_bytes: int) -> None:
        guard = self._guard_of(address)
        with self._driver.entered():
            self._call("cuMemUnmap", address, size_bytes)
            if guard is not None:
                guard.cover_if_possible(address, size_bytes)

    def zero(self, spans: Sequence[tuple[int, int]]) -> None:
        with self._undisturbing():
            self._zero(spans)

    def fence(self, streams: Sequence[int]) -> CudaFence:
        events: list[Any] = []
        with self._undisturbing():
            try:
                for stream in streams:
                    events.append(self._event())
                    self._call("cuEventRecord", events[-1], stream)
            except BaseException:
                self._spare_events += events
                raise
        return CudaFence(events, self._event_done, self._spare_events)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(*self._driver.memory())

    def tensor(self, address: int, size_bytes: int) -> torch.Tensor:
        import torch
        from cuda.core import Buffer, MemoryResource

        class Borrowed(MemoryResource):  # type: ignore[misc]  # untyped base
            """Tells DLPack the device, so that nobody asks the driver about a pointer that may be unmapped."""

            device_id = property(lambda _: self._ordinal)
            is_device_accessible = property(lambda _: True)
            is_host_accessible = property(lambda _: False)

            def allocate(self, *_: Any, **__: Any) -> Any:
                raise NotImplementedError("these addresses are an arena's")

            def deallocate(self, *_: Any, **__: Any) -> None:
                """Nothing is owned."""

        with self._driver.entered():
            return torch.from_dlpack(Buffer.from_handle(address, size_bytes, mr=Borrowed())).view(torch.int8)

    def set_guard(self, address: int, size_bytes: int, page_bytes: int, *, writable: bool) -> None:
        with self._undisturbing():
            guard = self._guard_of(address)
            if guard is None:
                guard = _Guard(self._driver, address, size_bytes, page_bytes, self._properties, self._writable)
                self._guards.append(guard)
            if not writable:
                self._zero([(guard.own_address, page_bytes)])
                guard.seal(self._read_only)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._driver.entered():
            while self._spare_events:
                self._call("cuEventDestroy", self._spare_events.pop())
            self._call("cuStreamDestroy", self._stream)
        self._call("cuDevicePrimaryCtxRelease", self._device)

    def _undisturbing(self) -> _Undisturbing:
        return _Undisturbing(self._driver)

    def _release_all(self, handles: list[Any]) -> None:
        """What is mapped then belongs to its mapping, and the rest is gone."""
        while handles:
            self._call("cuMemRelease", handles[-1])
            handles.pop()

    def _require_virtual_memory(self) -> None:
        attribute = self._driver.module.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._call("cuDeviceGetAttribute", attribute, self._device):
            raise UnsupportedError(
                f"{self.device_id} has no virtual memory management (a vGPU, or a driver that lacks it), so that pages"
                " cannot come and go there: run the engine without kvcached on this device."
            )

    def _zero(self, spans: Sequence[tuple[int, int]]) -> None:
        for address, size_bytes in spans:
            self._call("cuMemsetD8Async", address, 0, size_bytes, self._stream)
        self._call("cuStreamSynchronize", self._stream)

    def _guard_of(self, address: int) -> _Guard | None:
        for guard in self._guards:
            if address in guard.addresses:
                return guard
        return None

    def _event(self) -> Any:
        if self._spare_events:
            return self._spare_events.pop()
        return self._call("cuEventCreate", int(self._driver.module.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def _event_done(self, event: Any) -> bool:
        results = self._driver.module.CUresult
        with self._undisturbing():
            (result,) = self._driver.module.cuEventQuery(event)
        if result == results.CUDA_ERROR_NOT_READY:
            return False
        self._driver.check("cuEventQuery", result)
        return True


class CudaFence:
    """Events behind the work of some streams. One thread at a time asks it."""

    def __init__(self, events: list[Any], event_done: Callable[[Any], bool], spare_events: list[Any]) -> None:
        self._events = events
        self._event_done = event_done
        self._spare_events = spare_events

    def done(self) -> bool:
        while self._events:
            if not self._event_done(self._events[-1]):
                return False
            self._spare_events.append(self._events.pop())
        return True


@hookimpl
def kvcached_make_backend(kind: str, ordinal: int) -> CudaBackend | None:
    return CudaBackend(ordinal) if kind == "cuda" else None


def current_device_id(driver: Any = None) -> str:
    """UUID of the calling thread's current device; the first one's where none is current. Creates no context.

    Args:
        driver: `cuda.bindings.driver` (default) or a stand-in.

    Raises:
        UnsupportedError: No driver or no device.
        DriverError: The driver failed.

    Source: CUDA Runtime API, ``cudaSetDevice``: since CUDA 12 it makes the device's primary context current, so the
    driver's view is the runtime's too; a thread that has set none is on device 0.
    """
    module = load_driver(driver)
    result, device = module.cuCtxGetDevice()
    if result == module.CUresult.CUDA_ERROR_INVALID_CONTEXT:
        return _uuid_of(module, _device_of(module, 0))
    Driver(module, "the current device").check("cuCtxGetDevice", result)
    return _uuid_of(module, device)


class _Undisturbing(Entered):
    """Within, also, nothing that this thread does can break a graph capture of another thread.

    Source: CUDA Driver API, ``cuThreadExchangeStreamCaptureMode``. Event queries and stream synchronisation need
    this; creating, mapping, unmapping and memory queries do not (run on an H200 during a capture in mode GLOBAL).
    """

    def __enter__(self) -> None:
        super().__enter__()
        modes = self._driver.module.CUstreamCaptureMode
        try:
            self._mode = self._driver.call(
                "cuThreadExchangeStreamCaptureMode", modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            )
        except BaseException:
            self._leave("cuCtxPopCurrent")
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leave("cuThreadExchangeStreamCaptureMode", self._mode)
        super().__exit__(kind, error, at)


class _Guard:
    """One page that stands behind every unmapped page of a range. Called within the device's context.

    It is also mapped, for good, at an address of its own, where it can be zeroed whatever the range looks like.
    """

    def __init__(
        self, driver: Driver, address: int, size_bytes: int, page_bytes: int, properties: Any, writable: list[Any]
    ) -> None:
        self.addresses = range(address, address + size_bytes)
        self._call = driver.call
        self._page_bytes = page_bytes
        self._access = writable
        self._covered = bytearray(size_bytes // page_bytes)
        with ExitStack() as undo:
            self._handle = self._call("cuMemCreate", page_bytes, properties, 0)
            undo.callback(self._call, "cuMemRelease", self._handle)
            self.own_address = int(self._call("cuMemAddressReserve", page_bytes, 0, 0, 0))
            undo.callback(self._call, "cuMemAddressFree", self.own_address, page_bytes)
            self._call("cuMemMap", self.own_address, page_bytes, 0, self._handle, 0)
            undo.callback(self._call, "cuMemUnmap", self.own_address, page_bytes)
            self._call("cuMemSetAccess", self.own_address, page_bytes, writable, 1)
            undo.callback(self.uncover, address, size_bytes)
            for page_address in self.addresses[::page_bytes]:
                self._alias(page_address)
            self._call("cuMemSetAccess", address, size_bytes, writable, 1)
            undo.pop_all()

    def cover_if_possible(self, address: int, size_bytes: int) -> None:
        """Stand behind pages that were just unmapped. They are unmapped either way: a failure costs the net only."""
        try:
            with ExitStack() as undo:
                undo.callback(self.uncover, address, size_bytes)
                for page_address in range(address, address + size_bytes, self._page_bytes):
                    if not self._covered[self._page_of(page_address)]:
                        self._alias(page_address)
                self._call("cuMemSetAccess", address, size_bytes, self._access, 1)
                undo.pop_all()
        except (DeviceMemoryError, DriverError) as error:
            log.warning(
                "no guard page behind %#x and the %d bytes from there: a stray access would fault until they are"
                " mapped. %s",
                address, size_bytes, error,
            )  # fmt: skip

    def uncover(self, address: int, size_bytes: int) -> None:
        """Step away from these pages, where the guard stands behind them."""
        first = self._page_of(address)
        for start, size in list(self._covered_runs(first, first + size_bytes // self._page_bytes)):
            self._call("cuMemUnmap", start, size)
            page = self._page_of(start)
            self._covered[page : page + size // self._page_bytes] = bytes(size // self._page_bytes)

    def seal(self, read_only: list[Any]) -> None:
        """Refuse writes from now on; mapped pages are not touched."""
        self._access = read_only
        for address, size_bytes in self._covered_runs(0, len(self._covered)):
            self._call("cuMemSetAccess", address, size_bytes, read_only, 1)

    def remove(self) -> None:
        """Give everything back; the range has no mapping afterwards."""
        self.uncover(self.addresses.start, len(self.addresses))
        self._call("cuMemUnmap", self.own_address, self._page_bytes)
        self._call("cuMemAddressFree", self.own_address, self._page_bytes)
        self._call("cuMemRelease", self._handle)

    def _alias(self, address: int) -> None:
        self._call("cuMemMap", address, self._page_bytes, 0, self._handle, 0)
        self._covered[self._page_of(address)] = True

    def _covered_runs(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """(address, bytes) of the neighbouring pages, from the first to before the last, that it stands behind."""
        start = self._covered.find(True, first, last)
        while start >= 0:
            stop = self._covered.find(False, start, last)
            stop = last if stop < 0 else stop
            yield self.addresses[start * self._page_bytes], (stop - start) * self._page_bytes
            start = self._covered.find(True, stop, last)

    def _page_of(self, address: int) -> int:
        return (address - self.addresses.start) // self._page_bytes


def _device_of(module: Any, ordinal: int) -> Any:
    anywhere = Driver(module, f"device {ordinal}")
    count = anywhere.call("cuDeviceGetCount")
    if not 0 <= ordinal < count:
        raise UnsupportedError(f"there is no device {ordinal}: this process has {count}, counted from 0.")
    return anywhere.call("cuDeviceGet", ordinal)


def _uuid_of(module: Any, device: Any) -> str:
    """The UUID as nvidia-smi prints it; that of a MIG instance begins with MIG.

    Source: ``cuDeviceGetUuid`` gives a MIG instance's own UUID, without its kind; the device's name ends in
    "MIG 1g.10gb" or the like.
    """
    anywhere = Driver(module, f"device {int(device)}")
    uuid = UUID(bytes=bytes(anywhere.call("cuDeviceGetUuid", device).bytes))
    name = anywhere.call("cuDeviceGetName", 256, device)
    return f"{'MIG' if b' MIG ' in name else 'GPU'}-{uuid}"


def _page_properties(module: Any, ordinal: int) -> Any:
    properties = module.CUmemAllocationProp()
    properties.type = module.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = module.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    return properties


def _access(module: Any, properties: Any, flags: Any) -> list[Any]:
    access = module.CUmemAccessDesc()
    access.location = properties.location
    access.flags = flags
    return [access]
