"""A stand-in for the module ``pynvml`` that gives recorded answers, failures included."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

GIB = 1 << 30


class NVMLError(Exception):
    """The base of all failures, as in pynvml."""


class NVMLError_LibraryNotFound(NVMLError):  # pynvml's own names
    pass


class NVMLError_DriverNotLoaded(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_NotFound(NVMLError):
    pass


class NVMLError_Unknown(NVMLError):
    pass


@dataclass
class Recorded:
    """What NVML said of one device. ``instances`` makes it a GPU in MIG mode; a None among them is an empty place."""

    uuid: str
    name: str = "NVIDIA H200"
    total_bytes: int | None = 139 * GIB
    free_bytes: int | None = 100 * GIB
    compute: dict[int, int | None] = field(default_factory=dict)
    graphics: dict[int, int | None] = field(default_factory=dict)
    mps: dict[int, int | None] = field(default_factory=dict)
    knows_mig: bool = True
    instances: list[Recorded | None] | None = None


class RecordedNvml:
    """The functions of ``pynvml`` that `kvcached_core.devices` calls."""

    NVML_DEVICE_MIG_ENABLE = 1
    NVMLError = NVMLError
    NVMLError_LibraryNotFound = NVMLError_LibraryNotFound
    NVMLError_DriverNotLoaded = NVMLError_DriverNotLoaded
    NVMLError_NotSupported = NVMLError_NotSupported
    NVMLError_NotFound = NVMLError_NotFound

    def __init__(self, *devices: Recorded, failure: NVMLError | None = None) -> None:
        self._devices = devices
        self._failure = failure
        self.sessions = 0

    def nvmlInit(self) -> None:
        if self._failure is not None:
            raise self._failure
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        self.sessions -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlDeviceGetCount(self) -> int:
        return len(self._devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Recorded:
        return self._devices[index]

    def nvmlDeviceGetUUID(self, device: Recorded) -> str:
        return device.uuid

    def nvmlDeviceGetName(self, device: Recorded) -> str:
        return device.name

    def nvmlDeviceGetMemoryInfo(self, device: Recorded) -> SimpleNamespace:
        if device.total_bytes is None:
            raise NVMLError_NotSupported
        return SimpleNamespace(total=device.total_bytes, free=device.free_bytes)

    def nvmlDeviceGetMigMode(self, device: Recorded) -> list[int]:
        if not device.knows_mig:
            raise NVMLError_NotSupported
        return [int(device.instances is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Recorded) -> int:
        assert device.instances is not None
        return len(device.instances)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Recorded, index: int) -> Recorded:
        assert device.instances is not None
        instance = device.instances[index]
        if instance is None:
            raise NVMLError_NotFound
        return instance

    def nvmlDeviceGetComputeRunningProcesses(self, device: Recorded) -> list[SimpleNamespace]:
        return _listed(device.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, device: Recorded) -> list[SimpleNamespace]:
        return _listed(device.graphics)

    def nvmlDeviceGetMPSComputeRunningProcesses(self, device: Recorded) -> list[SimpleNamespace]:
        return _listed(device.mps)


def _listed(processes: dict[int, int | None]) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes.items()]
