"""What a server holds: by the ledger's account, and by the driver's, which knows nothing of kvcached."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

from kvcached_core.ledger import Ledger
from kvcached_core.ledger_statistics import LedgerStatistics, MemberStatistics

from tests.e2e.server import Server

QUIET_SECONDS = 1.0
PATIENCE_SECONDS = 4.0


class Nvml:
    """The driver's own figures, or None for each where there is no NVIDIA device."""

    def __init__(self) -> None:
        self._nvml = _load_nvml()
        self.num_gpus = self._nvml.nvmlDeviceGetCount() if self._nvml else 0

    def process_bytes(self, pids: Iterable[int]) -> int | None:
        """Device memory of these processes, on all devices together; None too where the driver does not say."""
        if self._nvml is None:
            return None
        wanted = set(pids)
        used = [used for pid, used in self._processes() if pid in wanted]
        return None if None in used else sum(filter(None, used))

    def pids(self) -> set[int] | None:
        """Every process that holds memory on a device."""
        return None if self._nvml is None else {pid for pid, _ in self._processes()}

    def free_bytes(self, index: int = 0) -> int | None:
        """What nobody has taken of one device."""
        if self._nvml is None:
            return None
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._nvml.nvmlDeviceGetHandleByIndex(index)).free)

    def description(self) -> dict[str, str]:
        """Name, memory and driver of the devices, for a report's set-up."""
        if self._nvml is None:
            return {"GPUs": "0"}
        handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(self.num_gpus)]
        names = [
            f"{self._nvml.nvmlDeviceGetName(handle)} {self._nvml.nvmlDeviceGetMemoryInfo(handle).total >> 20} MiB"
            for handle in handles
        ]
        driver = self._nvml.nvmlSystemGetDriverVersion()
        return {"GPUs": str(self.num_gpus), "GPU": ", ".join(names), "driver": str(driver)}

    def _processes(self) -> Iterable[tuple[int, int | None]]:
        assert self._nvml is not None
        for index in range(self.num_gpus):
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                yield process.pid, process.usedGpuMemory


def _load_nvml() -> ModuleType | None:
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def members(runtime_dir: Path) -> list[tuple[str, MemberStatistics]]:
    """Every member of every ledger in the directory, with its device."""
    found = []
    for device_id in Ledger.devices(runtime_dir):
        with closing(Ledger.open(device_id, None, runtime_dir=runtime_dir)) as ledger:
            found += [(device_id, member) for member in ledger.snapshot().members]
    return found


def statistics(runtime_dir: Path) -> LedgerStatistics:
    """The one device that has a ledger in the directory.

    Raises:
        ValueError: None has one, or several have.
    """
    (device_id,) = Ledger.devices(runtime_dir)
    with closing(Ledger.open(device_id, None, runtime_dir=runtime_dir)) as ledger:
        return ledger.snapshot()


def withheld_bytes(runtime_dir: Path) -> int:
    """What the driver has free and the ledger grants nobody: headroom, and room for activations of those who run."""
    device = statistics(runtime_dir)
    return device.driver_free_bytes - device.unleased_bytes


class Readings:
    """Reads one server's memory."""

    def __init__(self, server: Server, runtime_dir: Path, name: str) -> None:
        self._server = server
        self._runtime_dir = runtime_dir
        self._name = name
        self._nvml = Nvml()

    def take(self) -> dict[str, Any]:
        """The server's bytes now. ``driver_bytes`` is None where there is no GPU, ``resident_bytes`` 0 for natives."""
        own = [(device, member) for device, member in members(self._runtime_dir) if member.name == self._name]
        return {
            "resident_bytes": sum(member.resident_bytes for _, member in own),
            "driver_bytes": self._nvml.process_bytes(self._server.pids()),
            "members": [
                {"name": member.name, "device": device, "lease_bytes": member.lease_bytes} for device, member in own
            ],
        }

    def settle(self, *, below_bytes: int, deadline_seconds: float) -> dict[str, Any]:
        """Wait until memory no longer leaves; at the deadline, what is there then.

        It no longer leaves when nothing has changed for `QUIET_SECONDS`, or, as long as what is resident is not below
        ``below_bytes``, for `PATIENCE_SECONDS`: giving back begins a moment after the reason for it. What the ledger
        no longer counts as resident but still as leased is being unmapped.
        """
        deadline = time.monotonic() + deadline_seconds
        reading, since = self.take(), time.monotonic()
        while time.monotonic() < deadline:
            time.sleep(0.25)
            now = self.take()
            if now != reading:  # the ledger's figures or the driver's, which come down one after the other
                since = time.monotonic()
            reading = now
            quiet = QUIET_SECONDS if reading["resident_bytes"] < below_bytes else PATIENCE_SECONDS
            leased = sum(member["lease_bytes"] for member in reading["members"])
            if leased <= reading["resident_bytes"] and time.monotonic() - since >= quiet:
                break
        return reading

    def members_named(self) -> list[str]:
        """Members of this server that are in a ledger now, as ``"name on device"``."""
        return [f"{m.name} on {device}" for device, m in members(self._runtime_dir) if m.name == self._name]

    def left_on_device(self, pids: Iterable[int]) -> list[int] | None:
        """Which of these processes hold device memory now; None where there is no GPU."""
        present = self._nvml.pids()
        return None if present is None else sorted(set(pids) & present)
