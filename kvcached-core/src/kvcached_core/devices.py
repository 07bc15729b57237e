"""Which NVIDIA devices exist and which processes use them, by UUID.

The only place that asks NVML. Nothing here creates a CUDA context, so the command line can look at a device that an
engine fills to the last byte. NVML knows nothing of PID namespaces: the pids it reports are those of the host, and
`outsiders` says what can be concluded from them and what cannot.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

from kvcached_core.backends.driver import Driver, load_driver

HOST_PID_NAMESPACE = "pid:[4026531836]"
"""The first PID namespace of a machine. Source: linux/proc_ns.h, ``PROC_PID_INIT_INO`` (0xEFFFFFFC)."""


class Unavailable(Enum):
    """Why NVML could not be asked."""

    NO_PACKAGE = "nvidia-ml-py is not installed"
    NO_DRIVER = "no NVIDIA driver on this machine"
    FAILED = "NVML failed"


@dataclass(frozen=True)
class DeviceProcess:
    """One process with memory on a device.

    Attributes:
        pid: In the host's PID namespace, whoever asks.
        used_bytes: None where the driver does not say.
    """

    pid: int
    used_bytes: int | None


@dataclass(frozen=True)
class Device:
    """One device as CUDA programs see it: a GPU, or one MIG instance.

    Attributes:
        device_id: ``GPU-…`` or ``MIG-…``.
        parent_id: The GPU's UUID for a MIG instance, else None.
        total_bytes: None where the driver does not say (memory shared with the CPU).
        mps: A multi-process server runs on it.
    """

    device_id: str
    name: str
    total_bytes: int | None
    free_bytes: int | None
    parent_id: str | None = None
    mps: bool = False
    processes: tuple[DeviceProcess, ...] = ()


@dataclass(frozen=True)
class Inventory:
    """What NVML answered at one moment. Without an answer `unavailable` says why and `devices` is empty."""

    devices: tuple[Device, ...] = ()
    driver_version: str = ""
    unavailable: Unavailable | None = None
    detail: str = ""

    def find(self, device_id: str) -> Device | None:
        """The device of exactly this UUID."""
        return next((device for device in self.devices if device.device_id == device_id), None)


def inventory(nvml: ModuleType | Any | None = None) -> Inventory:
    """Ask NVML for every device and its processes.

    Args:
        nvml: The module to ask; ``pynvml`` when None.

    Returns:
        Everything that could be read. A machine without a driver is an answer, not an error.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return Inventory(unavailable=Unavailable.NO_PACKAGE)
    try:
        with _session(nvml):
            devices = tuple(device for handle in _gpus(nvml) for device in _visible(nvml, handle))
            return Inventory(devices, nvml.nvmlSystemGetDriverVersion())
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded) as error:
        return Inventory(unavailable=Unavailable.NO_DRIVER, detail=str(error))
    except nvml.NVMLError as error:
        return Inventory(unavailable=Unavailable.FAILED, detail=str(error))


@contextmanager
def _session(nvml: Any) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _gpus(nvml: Any) -> Iterator[Any]:
    for index in range(nvml.nvmlDeviceGetCount()):
        yield nvml.nvmlDeviceGetHandleByIndex(index)


def _visible(nvml: Any, gpu: Any) -> Iterator[Device]:
    """The GPU itself or, in MIG mode, its instances: CUDA cannot use the whole GPU then."""
    if not _mig_enabled(nvml, gpu):
        yield _device(nvml, gpu, None)
        return
    gpu_id = nvml.nvmlDeviceGetUUID(gpu)
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
        except nvml.NVMLError_NotFound:
            continue
        yield _device(nvml, instance, gpu_id)


def _mig_enabled(nvml: Any, gpu: Any) -> bool:
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(gpu)
    except nvml.NVMLError_NotSupported:
        return False
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _device(nvml: Any, handle: Any, parent_id: str | None) -> Device:
    total_bytes, free_bytes = _memory(nvml, handle)
    under_mps = _processes(nvml, "nvmlDeviceGetMPSComputeRunningProcesses", handle)
    processes = _processes(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    processes |= _processes(nvml, "nvmlDeviceGetGraphicsRunningProcesses", handle)
    return Device(
        device_id=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        parent_id=parent_id,
        mps=bool(under_mps),
        processes=tuple(DeviceProcess(pid, used) for pid, used in sorted((processes | under_mps).items())),
    )


def _memory(nvml: Any, handle: Any) -> tuple[int | None, int | None]:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError_NotSupported:
        return None, None
    return memory.total, memory.free


def _processes(nvml: Any, query: str, handle: Any) -> dict[int, int | None]:
    try:
        return {process.pid: process.usedGpuMemory for process in getattr(nvml, query)(handle)}
    except nvml.NVMLError_NotSupported:
        return {}


def without_virtual_memory(driver: Any = None) -> tuple[str, ...]:
    """The devices of this process on which pages cannot come and go: their number and name.

    Args:
        driver: `cuda.bindings.driver` when None.

    Raises:
        UnsupportedError: The package, the driver or a device is missing.
    """
    module = load_driver(driver)
    supported = module.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    without = []
    for ordinal in range(Driver(module, "no device").call("cuDeviceGetCount")):
        calls = Driver(module, f"device {ordinal}")
        device = calls.call("cuDeviceGet", ordinal)
        if not calls.call("cuDeviceGetAttribute", supported, device):
            name = calls.call("cuDeviceGetName", 256, device).rstrip(b"\0").decode()
            without.append(f"device {ordinal} ({name})")
    return tuple(without)


@dataclass(frozen=True)
class Outsiders:
    """Processes on a device that are in no ledger.

    Attributes:
        count: At least this many.
        processes: Which ones; empty where the pids could not be compared.
        comparable: False inside a PID namespace: NVML's pids belong to the host there, so only numbers of
            processes were compared.
    """

    count: int
    processes: tuple[DeviceProcess, ...]
    comparable: bool


def outsiders(processes: Sequence[DeviceProcess], member_pids: Iterable[int], proc: Path = Path("/proc")) -> Outsiders:
    """Which processes of a device no ledger knows.

    A member writes its pid as its own PID namespace numbers it. On the host ``/proc/PID/status`` translates
    a host pid to that number, so each process can be told; inside a namespace nothing can.

    Args:
        processes: As NVML lists them.
        member_pids: Of every live member of the device's ledger, one for each process that holds memory.
        proc: The mounted process information.
    """
    known = Counter(set(member_pids))
    if os.readlink(proc / "self/ns/pid") != HOST_PID_NAMESPACE:
        return Outsiders(max(0, len(processes) - known.total()), (), comparable=False)
    strangers = []
    for process in processes:
        inner = _innermost_pid(proc / str(process.pid) / "status")
        if inner is None or not known[inner]:
            strangers.append(process)
        else:
            known[inner] -= 1
    return Outsiders(len(strangers), tuple(strangers), comparable=True)


def _innermost_pid(status: Path) -> int | None:
    """The pid that the process itself sees; None if it has ended. Source: proc_pid_status(5), ``NSpid``."""
    try:
        lines = status.read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return next((int(line.split()[-1]) for line in lines if line.startswith("NSpid:")), None)


def command_of(pid: int, proc: Path = Path("/proc")) -> str:
    """The command line of a process as this machine's /proc numbers it, or "" if it has ended."""
    try:
        words = (proc / str(pid) / "cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return b" ".join(words).decode(errors="replace").strip()
