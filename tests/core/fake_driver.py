"""A stand-in for `cuda.bindings.driver` with any number of devices, on real memory.

Each handle is a memory file, each mapping a real mapping of it. So an unmapped address really faults, a page that
stands behind two addresses really is one page, a read-only mapping refuses writes, and memory that was not zeroed
holds garbage. Work on a stream happens when the stream is synchronised or finished, never before.

It is stricter than the driver about contexts: a call made while another device's context is current (or none) is
refused, also where the real one would let it pass.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import wraps
from typing import Any
from uuid import UUID, uuid4

MIB = 1 << 20
GARBAGE = 0xA5

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.read.argtypes = _libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900


class CUdevice_attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102


class CUmemAllocationType(IntEnum):
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(IntEnum):
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAccess_flags(IntEnum):
    CU_MEM_ACCESS_FLAGS_PROT_NONE = 0
    CU_MEM_ACCESS_FLAGS_PROT_READ = 1
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemAllocationGranularity_flags(IntEnum):
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


class CUstream_flags(IntEnum):
    CU_STREAM_NON_BLOCKING = 1


class CUevent_flags(IntEnum):
    CU_EVENT_DISABLE_TIMING = 2


class CUstreamCaptureMode(IntEnum):
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1
    CU_STREAM_CAPTURE_MODE_RELAXED = 2


@dataclass
class CUmemLocation:
    type: Any = None
    id: int = 0


@dataclass
class CUmemAllocationProp:
    type: Any = None
    location: CUmemLocation = field(default_factory=CUmemLocation)


@dataclass
class CUmemAccessDesc:
    location: CUmemLocation = field(default_factory=CUmemLocation)
    flags: Any = None


@dataclass
class CUuuid:
    bytes: bytes


@dataclass
class Gpu:
    """A physical device. Processes (`FakeDriver` objects) that share it share its memory."""

    total_bytes: int
    uuid: UUID = field(default_factory=uuid4)
    name: str = "NVIDIA H200"
    virtual_memory: bool = True
    used_bytes: int = 0
    _hoard_bytes: int = 0

    def fill(self) -> None:
        """Let somebody else take all that is free."""
        self._hoard_bytes += self.total_bytes - self.used_bytes
        self.used_bytes = self.total_bytes

    def drain(self) -> None:
        self.used_bytes -= self._hoard_bytes
        self._hoard_bytes = 0


@dataclass(eq=False)
class Context:
    """A primary context."""

    device: int
    references: int = 0

    def __int__(self) -> int:
        return id(self)


@dataclass(eq=False)
class Handle:
    device: int
    size_bytes: int
    file: int
    released: bool = False
    num_mappings: int = 0


@dataclass(eq=False)
class Mapping:
    handle: Handle
    size_bytes: int
    access: int = 0


@dataclass(eq=False)
class Stream:
    device: int
    launched: int = 0
    finished: int = 0
    work: list[Callable[[], None]] = field(default_factory=list)

    def launch(self, work: Callable[[], None] = lambda: None) -> None:
        """Queue a kernel."""
        self.work.append(work)
        self.launched += 1

    def finish(self) -> None:
        """Let everything that is queued happen."""
        for work in self.work:
            work()
        self.work.clear()
        self.finished = self.launched


@dataclass(eq=False)
class Event:
    device: int
    stream: Stream | None = None
    position: int = 0


class Refused(Exception):
    """A driver call that ends in a result other than success."""

    def __init__(self, result: CUresult) -> None:
        self.result = result


def driver_call(num_values: int) -> Callable[[Any], Any]:
    """Make a method look like a driver function: it returns a tuple of the result and its values."""

    def decorate(method: Any) -> Any:
        @wraps(method)
        def call(self: FakeDriver, *arguments: Any) -> tuple[Any, ...]:
            with self.lock:
                try:
                    self.note(method.__name__)
                    values = method(self, *arguments)
                except Refused as refused:
                    return (refused.result, *[None] * num_values)
            if num_values == 0:
                return (CUresult.CUDA_SUCCESS,)
            return (CUresult.CUDA_SUCCESS, *(values if num_values > 1 else [values]))

        return call

    return decorate


class FakeDriver:
    """The driver as one process sees it.

    Args:
        gpus: The machine's devices.
        visible: CUDA_VISIBLE_DEVICES of the process: numbers or UUIDs; None: all.

    Attributes:
        calls: Names of the functions called so far.
        fail_at: Fail the call with this index from the last `inject` on; None: none.
        contexts_created: Devices (as this process numbers them) that have got a context, in order.
        capture: Another thread is capturing a graph in mode GLOBAL: "off", "on", or "broken" by some call since.
    """

    CUresult = CUresult
    CUdevice_attribute = CUdevice_attribute
    CUmemAllocationType = CUmemAllocationType
    CUmemLocationType = CUmemLocationType
    CUmemAccess_flags = CUmemAccess_flags
    CUmemAllocationGranularity_flags = CUmemAllocationGranularity_flags
    CUstream_flags = CUstream_flags
    CUevent_flags = CUevent_flags
    CUstreamCaptureMode = CUstreamCaptureMode
    CUmemAllocationProp = CUmemAllocationProp
    CUmemAccessDesc = CUmemAccessDesc

    granularity_bytes = 64 << 10

    def __init__(self, *gpus: Gpu, visible: str | None = None) -> None:
        self.gpus = [gpus[index] for index in _visible(gpus, visible)]
        self.lock = threading.RLock()
        self.calls: list[str] = []
        self.fail_at: int | None = None
        self.fail_with = CUresult.CUDA_ERROR_OUT_OF_MEMORY
        self.fail_on = False
        self.contexts_created: list[int] = []
        self.capture = "off"
        self.reservations: dict[int, int] = {}
        self.mappings: dict[int, Mapping] = {}
        self.handles: dict[int, Handle] = {}
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self._contexts = [Context(device) for device in range(len(self.gpus))]
        self._default_streams = [Stream(device) for device in range(len(self.gpus))]
        self._ids = itertools.count(0x1000)
        self._thread = threading.local()

    # --- what a test does and sees ---

    def inject(
        self, fail_at: int | None, result: CUresult = CUresult.CUDA_ERROR_OUT_OF_MEMORY, *, on: bool = False
    ) -> None:
        """Fail the n-th call from now (0: the next), and with ``on`` every later one too; None: let all pass."""
        self.calls.clear()
        self.fail_at, self.fail_with, self.fail_on = fail_at, result, on

    def note(self, name: str) -> None:
        index = len(self.calls)
        self.calls.append(name)
        if self.fail_at is not None and (index == self.fail_at or (self.fail_on and index > self.fail_at)):
            raise Refused(self.fail_with)

    def set_device(self, device: int) -> None:
        """What torch.cuda.set_device does in this thread: the device's primary context is current."""
        _, context = self.cuDevicePrimaryCtxRetain(device)
        self.stack[:] = [context]

    @property
    def stack(self) -> list[Context]:
        """The calling thread's contexts, the current one last."""
        if not hasattr(self._thread, "stack"):
            self._thread.stack = []
        return self._thread.stack

    @property
    def capture_mode(self) -> CUstreamCaptureMode:
        return getattr(self._thread, "mode", CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)

    def make_stream(self, device: int) -> int:
        """A stream of the engine's."""
        return self._add(self.streams, Stream(device))

    def can_read(self, address: int) -> bool:
        """Whether a kernel may read there; otherwise it would fault."""
        return _transfer(_libc.write, address)

    def can_write(self, address: int) -> bool:
        """Whether a kernel may write there. If so, the byte becomes 0x58."""
        return _transfer(_libc.read, address)

    def holdings(self) -> dict[str, Any]:
        """Everything that exists, to be compared before and after."""
        return {
            "reservations": dict(self.reservations),
            "mappings": {address: (m.size_bytes, m.access) for address, m in self.mappings.items()},
            "handles": sum(not handle.released for handle in self.handles.values()),
            "used_bytes": [gpu.used_bytes for gpu in self.gpus],
            "streams": len(self.streams),
            "contexts": [context.references for context in self._contexts],
            "stack": list(self.stack),
            "mode": self.capture_mode,
        }

    # --- devices and contexts ---

    @driver_call(0)
    def cuInit(self, flags: int) -> None:
        if not self.gpus:
            raise Refused(CUresult.CUDA_ERROR_NO_DEVICE)

    @driver_call(1)
    def cuDeviceGetCount(self) -> int:
        return len(self.gpus)

    @driver_call(1)
    def cuDeviceGet(self, ordinal: int) -> int:
        self._gpu(ordinal)
        return ordinal

    @driver_call(1)
    def cuDeviceGetUuid(self, device: int) -> CUuuid:
        return CUuuid(self._gpu(device).uuid.bytes)

    @driver_call(1)
    def cuDeviceGetName(self, length: int, device: int) -> bytes:
        return self._gpu(device).name.encode()[:length]

    @driver_call(1)
    def cuDeviceGetAttribute(self, attribute: CUdevice_attribute, device: int) -> int:
        return int(self._gpu(device).virtual_memory)

    @driver_call(1)
    def cuDevicePrimaryCtxRetain(self, device: int) -> Context:
        self._gpu(device)
        context = self._contexts[device]
        if not context.references:
            self.contexts_created.append(device)
        context.references += 1
        return context

    @driver_call(0)
    def cuDevicePrimaryCtxRelease(self, device: int) -> None:
        context = self._contexts[device]
        if not context.references:
            raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
        context.references -= 1

    @driver_call(0)
    def cuCtxPushCurrent(self, context: Context) -> None:
        if not context.references:
            raise Refused(CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED)
        self.stack.append(context)

    @driver_call(1)
    def cuCtxPopCurrent(self) -> Context:
        if not self.stack:
            raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
        return self.stack.pop()

    @driver_call(1)
    def cuCtxGetCurrent(self) -> Context | int:
        return self.stack[-1] if self.stack else 0

    @driver_call(0)
    def cuCtxSetCurrent(self, context: Context | int) -> None:
        self.stack[-1:] = [context] if isinstance(context, Context) else []

    @driver_call(2)
    def cuDevicePrimaryCtxGetState(self, device: int) -> tuple[int, int]:
        return 0, int(self._contexts[device].references > 0)

    @driver_call(1)
    def cuCtxGetDevice(self) -> int:
        return self._current()

    @driver_call(1)
    def cuThreadExchangeStreamCaptureMode(self, mode: CUstreamCaptureMode) -> CUstreamCaptureMode:
        before = self.capture_mode
        self._thread.mode = CUstreamCaptureMode(mode)
        return before

    # --- memory ---

    @driver_call(2)
    def cuMemGetInfo(self) -> tuple[int, int]:
        gpu = self._gpu(self._current())
        return gpu.total_bytes - gpu.used_bytes, gpu.total_bytes

    @driver_call(1)
    def cuMemGetAllocationGranularity(self, properties: CUmemAllocationProp, option: Any) -> int:
        self._gpu(properties.location.id)
        return self.granularity_bytes

    @driver_call(1)
    def cuMemAddressReserve(self, size_bytes: int, alignment_bytes: int, address: int, flags: int) -> int:
        self._current()
        alignment_bytes = alignment_bytes or self.granularity_bytes
        if size_bytes <= 0 or size_bytes % self.granularity_bytes or alignment_bytes & (alignment_bytes - 1):
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        start = _map_nothing(size_bytes + alignment_bytes)
        aligned = -(-start // alignment_bytes) * alignment_bytes
        _unmap(start, aligned - start)
        _unmap(aligned + size_bytes, start + alignment_bytes - aligned)
        self.reservations[aligned] = size_bytes
        return aligned

    @driver_call(0)
    def cuMemAddressFree(self, address: int, size_bytes: int) -> None:
        self._current()
        if self.reservations.get(address) != size_bytes or self._mappings_in(address, size_bytes):
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        del self.reservations[address]
        _unmap(address, size_bytes)

    @driver_call(1)
    def cuMemCreate(self, size_bytes: int, properties: CUmemAllocationProp, flags: int) -> int:
        device = properties.location.id
        self._require_current(device)
        gpu = self._gpu(device)
        if size_bytes <= 0 or size_bytes % self.granularity_bytes:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        if gpu.used_bytes + size_bytes > gpu.total_bytes:
            raise Refused(CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        gpu.used_bytes += size_bytes
        file = os.memfd_create("page")
        os.write(file, bytes([GARBAGE]) * size_bytes)
        return self._add(self.handles, Handle(device, size_bytes, file))

    @driver_call(0)
    def cuMemRelease(self, handle_id: int) -> None:
        handle = self._get(self.handles, handle_id)
        self._require_current(handle.device)
        handle.released = True
        self._reap(handle_id)

    @driver_call(0)
    def cuMemMap(self, address: int, size_bytes: int, offset_bytes: int, handle_id: int, flags: int) -> None:
        handle = self._get(self.handles, handle_id)
        self._require_current(handle.device)
        whole = size_bytes == handle.size_bytes and not offset_bytes and not handle.released
        if not whole or not self._is_reserved(address, size_bytes) or self._mappings_in(address, size_bytes):
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        _map_file(address, size_bytes, handle.file)
        handle.num_mappings += 1
        self.mappings[address] = Mapping(handle, size_bytes)

    @driver_call(0)
    def cuMemSetAccess(self, address: int, size_bytes: int, descriptions: list[CUmemAccessDesc], count: int) -> None:
        (description,) = descriptions
        for mapped_at, mapping in self._whole_mappings(address, size_bytes):
            self._require_current(mapping.handle.device)
            if description.location.id != mapping.handle.device or count != 1:
                raise Refused(CUresult.CUDA_ERROR_INVALID_DEVICE)
            mapping.access = description.flags
            _protect(mapped_at, mapping.size_bytes, description.flags)

    @driver_call(0)
    def cuMemUnmap(self, address: int, size_bytes: int) -> None:
        for mapped_at, mapping in self._whole_mappings(address, size_bytes):
            self._require_current(mapping.handle.device)
            _map_nothing(mapping.size_bytes, mapped_at)
            mapping.handle.num_mappings -= 1
            del self.mappings[mapped_at]
            self._reap(next(key for key, handle in self.handles.items() if handle is mapping.handle))

    @driver_call(0)
    def cuMemsetD8Async(self, address: int, value: int, size_bytes: int, stream_id: int) -> None:
        stream = self._stream(stream_id)
        self._require_current(stream.device)
        for _, mapping in self._whole_mappings(address, size_bytes):
            if mapping.handle.device != stream.device or mapping.access != 3:
                raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        stream.launch(lambda: ctypes.memset(address, value, size_bytes) and None)

    # --- streams and events ---

    @driver_call(1)
    def cuStreamCreate(self, flags: int) -> int:
        return self.make_stream(self._current())

    @driver_call(0)
    def cuStreamDestroy(self, stream_id: int) -> None:
        self._require_current(self._stream(stream_id).device)
        del self.streams[stream_id]

    @driver_call(0)
    def cuStreamSynchronize(self, stream_id: int) -> None:
        stream = self._stream(stream_id)
        self._require_current(stream.device)
        self._disturb_capture()
        stream.finish()

    @driver_call(1)
    def cuEventCreate(self, flags: int) -> int:
        return self._add(self.events, Event(self._current()))

    @driver_call(0)
    def cuEventRecord(self, event_id: int, stream_id: int) -> None:
        event, stream = self._get(self.events, event_id), self._stream(stream_id)
        if event.device != stream.device:
            raise Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
        self._require_current(event.device)
        event.stream, event.position = stream, stream.launched

    @driver_call(0)
    def cuEventQuery(self, event_id: int) -> None:
        event = self._get(self.events, event_id)
        self._require_current(event.device)
        self._disturb_capture()
        if event.stream is not None and event.stream.finished < event.position:
            raise Refused(CUresult.CUDA_ERROR_NOT_READY)

    @driver_call(0)
    def cuEventDestroy(self, event_id: int) -> None:
        self._require_current(self._get(self.events, event_id).device)
        del self.events[event_id]

    # --- inside ---

    def _gpu(self, device: int) -> Gpu:
        if not 0 <= device < len(self.gpus):
            raise Refused(CUresult.CUDA_ERROR_INVALID_DEVICE)
        return self.gpus[device]

    def _current(self) -> int:
        if not self.stack or not self.stack[-1].references:
            raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
        return self.stack[-1].device

    def _require_current(self, device: int) -> None:
        if self._current() != device:
            raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)

    def _disturb_capture(self) -> None:
        if self.capture != "off" and self.capture_mode == CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL:
            self.capture = "broken"
            raise Refused(CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)

    def _add(self, table: dict[int, Any], thing: Any) -> int:
        key = next(self._ids)
        table[key] = thing
        return key

    def _get(self, table: dict[int, Any], key: int) -> Any:
        if key not in table:
            raise Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
        return table[key]

    def _stream(self, stream_id: int) -> Stream:
        return self._get(self.streams, stream_id) if stream_id else self._default_streams[self._current()]

    def _reap(self, handle_id: int) -> None:
        handle = self.handles[handle_id]
        if handle.released and not handle.num_mappings:
            self._gpu(handle.device).used_bytes -= handle.size_bytes
            os.close(handle.file)
            del self.handles[handle_id]

    def _is_reserved(self, address: int, size_bytes: int) -> bool:
        return any(start <= address and address + size_bytes <= start + n for start, n in self.reservations.items())

    def _mappings_in(self, address: int, size_bytes: int) -> list[tuple[int, Mapping]]:
        return sorted(
            (
                (at, mapping)
                for at, mapping in self.mappings.items()
                if at < address + size_bytes and address < at + mapping.size_bytes
            ),
            key=lambda pair: pair[0],
        )

    def _whole_mappings(self, address: int, size_bytes: int) -> list[tuple[int, Mapping]]:
        """The mappings that make up a range exactly, without a hole."""
        found = self._mappings_in(address, size_bytes)
        end = address
        for mapped_at, mapping in found:
            if mapped_at != end:
                raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
            end += mapping.size_bytes
        if end != address + size_bytes or not found:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        return found


def _visible(gpus: tuple[Gpu, ...], visible: str | None) -> list[int]:
    if visible is None:
        return list(range(len(gpus)))
    names = [f"GPU-{gpu.uuid}" for gpu in gpus]
    return [names.index(word) if word.startswith("GPU-") else int(word) for word in visible.split(",")]


def _map_nothing(size_bytes: int, address: int | None = None) -> int:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | (_MAP_FIXED if address else 0)
    return _checked(_libc.mmap(address, size_bytes, 0, flags, -1, 0))


def _map_file(address: int, size_bytes: int, file: int) -> None:
    _checked(_libc.mmap(address, size_bytes, 0, mmap.MAP_SHARED | _MAP_FIXED, file, 0))


def _protect(address: int, size_bytes: int, access: int) -> None:
    assert _libc.mprotect(address, size_bytes, int(access)) == 0, os.strerror(ctypes.get_errno())


def _unmap(address: int, size_bytes: int) -> None:
    if size_bytes:
        assert _libc.munmap(address, size_bytes) == 0, os.strerror(ctypes.get_errno())


def _transfer(call: Any, address: int) -> bool:
    """Let the kernel copy one byte from or to an address: EFAULT where a load or a store would be SIGSEGV."""
    readable, writable = os.pipe()
    try:
        os.write(writable, b"X")
        end = readable if call is _libc.read else writable
        return call(end, address, 1) == 1
    finally:
        os.close(readable)
        os.close(writable)


def _checked(address: int) -> int:
    assert address != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return address
