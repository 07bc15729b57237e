"""The host as a device: anonymous memory, whose unmapped pages really fault.

Kernel behaviour this relies on (Linux):
- A private anonymous page reads as zeros at its first touch, and again after ``MADV_DONTNEED``, which gives its
  memory back at once (madvise(2)).
- Touching a ``PROT_NONE`` page raises SIGSEGV, as a stray access on a GPU ends its context.
- ``mprotect`` of a part splits the mapping; neighbours of equal protection merge again. The number of mappings of
  a process is bounded by ``vm.max_map_count`` (65530 by default), and ENOMEM is the answer beyond it.
- Where a page holds whole huge pages, those make mapping 1.8 times and unmapping 8 times cheaper (217 and 25 us per
  MiB with 4 KiB pages, 120 and 3 with 2 MiB ones; `benchmarks/driver_costs.py` on 2 cores). Never ask for them
  elsewhere: unmapping a part of a huge page frees nothing until the kernel is short of memory.
- ``MADV_DONTFORK`` keeps a range out of forked children, which would otherwise hold on to pages unmapped here.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcached_core.backends.base import DeviceMemory, hookimpl
from kvcached_core.errors import DeviceMemoryError, DriverError
from kvcached_core.sizes import format_bytes

if TYPE_CHECKING:
    import torch

_PROT_NONE = 0
_PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_WRITE = 23  # Linux 5.14


class Libc:
    """The calls of mman.h that the backend makes; each raises OSError."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._mmap, self._munmap, self._mprotect, self._madvise = libc.mmap, libc.munmap, libc.mprotect, libc.madvise
        self._mmap.restype = address
        self._mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
        self._munmap.argtypes = [address, size]
        self._mprotect.argtypes = self._madvise.argtypes = [address, size, number]

    def mmap(self, size_bytes: int, protection: int, flags: int) -> int:
        address = self._mmap(None, size_bytes, protection, flags, -1, 0)
        if address == ctypes.c_void_p(-1).value:
            raise _os_error()
        return int(address)

    def munmap(self, address: int, size_bytes: int) -> None:
        if self._munmap(address, size_bytes):
            raise _os_error()

    def mprotect(self, address: int, size_bytes: int, protection: int) -> None:
        if self._mprotect(address, size_bytes, protection):
            raise _os_error()

    def madvise(self, address: int, size_bytes: int, advice: int) -> None:
        if self._madvise(address, size_bytes, advice):
            raise _os_error()


class HostBackend:
    """Memory of this machine as a device of a stated size.

    Its total is a budget, which nothing but the leases in the ledger of the device ``"host"`` enforces: the backend
    itself maps what it is asked to, and `memory` does not say what is free.

    Args:
        budget_bytes: The total that all processes of the ledger share; None: the machine's memory.
        libc: Where the calls go.
    """

    device_id = "host"
    granularity_bytes = mmap.PAGESIZE

    def __init__(self, budget_bytes: int | None = None, *, libc: Libc | None = None) -> None:
        self._budget_bytes = _machine_bytes() if budget_bytes is None else budget_bytes
        self._libc = libc or Libc()
        self._mapped_bytes = 0

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def reserve(self, size_bytes: int, alignment_bytes: int) -> int:
        whole_bytes = size_bytes + alignment_bytes - self.granularity_bytes
        try:
            start = self._libc.mmap(whole_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
            address = -(-start // alignment_bytes) * alignment_bytes
            try:
                self._trim(start, address)
                self._trim(address + size_bytes, start + whole_bytes)
                self._libc.madvise(address, size_bytes, mmap.MADV_DONTFORK)
                if alignment_bytes >= _huge_page_bytes():
                    self._libc.madvise(address, size_bytes, mmap.MADV_HUGEPAGE)
            except OSError:
                self._libc.munmap(start, whole_bytes)
                raise
        except OSError as error:
            raise self._failed(error, "mmap", size_bytes) from error
        return address

    def release(self, address: int, size_bytes: int) -> None:
        try:
            self._libc.munmap(address, size_bytes)
        except OSError as error:
            raise self._failed(error, "munmap", size_bytes) from error

    def map(self, address: int, size_bytes: int, page_bytes: int) -> None:
        try:
            self._libc.mprotect(address, size_bytes, _PROT_READ_WRITE)
        except OSError as error:
            raise self._failed(error, "mprotect", size_bytes) from error
        self._mapped_bytes += size_bytes

    def unmap(self, address: int, size_bytes: int, page_bytes: int) -> None:
        # Protection first: a stray write between the two calls then faults instead of taking memory again.
        try:
            self._libc.mprotect(address, size_bytes, _PROT_NONE)
            try:
                self._libc.madvise(address, size_bytes, mmap.MADV_DONTNEED)
            except OSError:
                self._libc.mprotect(address, size_bytes, _PROT_READ_WRITE)
                raise
        except OSError as error:
            raise self._failed(error, "unmapping", size_bytes, memory=False) from error
        self._mapped_bytes -= size_bytes

    def zero(self, spans: Sequence[tuple[int, int]]) -> None:
        for address, size_bytes in spans:
            try:
                self._libc.madvise(address, size_bytes, mmap.MADV_DONTNEED)
                self._populate(address, size_bytes)
            except OSError as error:
                raise self._failed(error, "madvise", size_bytes) from error

    def fence(self, streams: Sequence[int]) -> HostFence:
        return HostFence()

    def memory(self) -> DeviceMemory:
        return DeviceMemory(None, self._budget_bytes)

    def tensor(self, address: int, size_bytes: int) -> torch.Tensor:
        import torch

        return torch.frombuffer((ctypes.c_int8 * size_bytes).from_address(address), dtype=torch.int8)

    def set_guard(self, address: int, size_bytes: int, page_bytes: int, *, writable: bool) -> None:
        pass

    def close(self) -> None:
        pass

    def _trim(self, start: int, stop: int) -> None:
        if stop > start:
            self._libc.munmap(start, stop - start)

    def _populate(self, address: int, size_bytes: int) -> None:
        """Take the memory now, zeroed by the kernel; by writing zeros where it has no call for that."""
        try:
            self._libc.madvise(address, size_bytes, _MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            ctypes.memset(address, 0, size_bytes)

    def _failed(self, error: OSError, call: str, size_bytes: int, *, memory: bool = True) -> Exception:
        name = errno.errorcode.get(error.errno or 0, "?")
        message = (
            f"{call} of {format_bytes(size_bytes)} failed on the host: {name} ({error.strerror}). "
            f"This process has {format_bytes(self._mapped_bytes)} mapped of a budget of "
            f"{format_bytes(self._budget_bytes)}."
        )
        if error.errno != errno.ENOMEM:
            return DriverError(message, call=call, result=name, device_id=self.device_id)
        message += (
            " The machine is out of memory, or the process has more mappings than vm.max_map_count"
            f" ({_max_map_count()}) allows: raise it with sysctl, or take a larger KVCACHED_PAGE_SIZE."
        )
        if memory:
            return DeviceMemoryError(message)
        return DriverError(message, call=call, result=name, device_id=self.device_id)


class HostFence:
    """Work on the host has ended when the call that did it has returned."""

    def done(self) -> bool:
        return True


@hookimpl
def kvcached_make_backend(kind: str, budget_bytes: int | None) -> HostBackend | None:
    return HostBackend(budget_bytes) if kind == "host" else None


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _huge_page_bytes() -> float:
    """Infinite where the kernel has no transparent huge pages."""
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except OSError:
        return math.inf


def _max_map_count() -> str:
    try:
        return Path("/proc/sys/vm/max_map_count").read_text().strip()
    except OSError:
        return "unreadable"


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
