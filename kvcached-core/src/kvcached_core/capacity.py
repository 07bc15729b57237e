"""How much may be taken? For the device that is meant, from any thread, and without creating anything.

An allocator with a pool here asks for the pool's own device, whatever is current in the thread that asks. One whose
pools are in other processes has only the shared record, and means the device that is current for its caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcached_core.account import Account
from kvcached_core.backends.base import Backend, DeviceMemory
from kvcached_core.backends.cuda import current_device_id
from kvcached_core.devices import inventory
from kvcached_core.errors import InvariantError, UnsupportedError
from kvcached_core.ledger import Ledger


@dataclass(frozen=True)
class Capacity:
    """What one device has for one allocator, at one moment.

    Attributes:
        device_id: Which device.
        may_take_bytes: What it would be granted now, above what it holds.
        total_bytes: Of the device.
    """

    device_id: str
    may_take_bytes: int
    total_bytes: int


def pool_capacity(backend: Backend, account: Account) -> Capacity:
    """What a member may take for its pool in this process.

    Args:
        backend: The pool's.
        account: The member's, in the ledger of that backend's device, which asks that backend what is free.

    Raises:
        LedgerError: The ledger cannot be read.
        DriverError: The device cannot be asked.
    """
    may_take_bytes = account.allowance().may_hold_bytes - account.lease_bytes
    return Capacity(backend.device_id, max(0, may_take_bytes), backend.memory().total_bytes)


def device_capacity(
    device_id: str,
    memory: Callable[[], DeviceMemory],
    *,
    runtime_dir: Path,
    ceiling_bytes: int | None = None,
    headroom_bytes: int = 0,
) -> Capacity:
    """What somebody who holds nothing of a device may take of it. No ledger is made where there is none.

    Args:
        device_id: UUID of the device, or ``host``.
        memory: Asks that very device.
        runtime_dir: The directory of the ledgers.
        ceiling_bytes: What the asker may hold at most; None: all of it.
        headroom_bytes: What is left ungranted where no member says.

    Raises:
        LedgerError: The device's ledger cannot be read.
    """
    now = memory()
    if device_id in Ledger.devices(runtime_dir):
        may_take_bytes = _unleased_bytes(device_id, memory, runtime_dir)
    else:
        may_take_bytes = (now.total_bytes if now.free_bytes is None else now.free_bytes) - headroom_bytes
    if ceiling_bytes is not None:
        may_take_bytes = min(may_take_bytes, ceiling_bytes)
    return Capacity(device_id, max(0, may_take_bytes), now.total_bytes)


def current_device_capacity(
    *,
    runtime_dir: Path,
    ceiling_bytes: int | None = None,
    headroom_bytes: int = 0,
    driver: Any = None,
    nvml: Any = None,
) -> Capacity:
    """What somebody without a pool here may take of the device that is current in the calling thread.

    That device need not have a context in this process and gets none: NVML is asked for its memory.

    Args:
        runtime_dir, ceiling_bytes, headroom_bytes: As for `device_capacity`.
        driver: `cuda.bindings.driver` (default) or a stand-in.
        nvml: `pynvml` (default) or a stand-in.

    Raises:
        UnsupportedError: No driver, no device, or none that NVML knows.
        LedgerError: The device's ledger cannot be read.
    """
    device_id = current_device_id(driver)
    return device_capacity(
        device_id,
        lambda: _memory_by_nvml(device_id, nvml),
        runtime_dir=runtime_dir,
        ceiling_bytes=ceiling_bytes,
        headroom_bytes=headroom_bytes,
    )


def driver_free(memory: Callable[[], DeviceMemory]) -> Callable[[], int] | None:
    """What `Ledger.open` asks a device with: its free bytes; None where only the ledger knows them.

    Args:
        memory: Asks the device, as `Backend.memory` does.
    """
    if memory().free_bytes is None:
        return None

    def free_bytes() -> int:
        answer = memory().free_bytes
        if answer is None:
            raise InvariantError("a device that said what is free does not say it any more")
        return answer

    return free_bytes


def _unleased_bytes(device_id: str, memory: Callable[[], DeviceMemory], runtime_dir: Path) -> int:
    ledger = Ledger.open(device_id, None, runtime_dir=runtime_dir, driver_free=driver_free(memory))
    try:
        return ledger.snapshot().unleased_bytes
    finally:
        ledger.close()


def _memory_by_nvml(device_id: str, nvml: Any) -> DeviceMemory:
    found = inventory(nvml)
    device = found.find(device_id)
    if device is None or device.total_bytes is None:
        reason = found.unavailable.value if found.unavailable else "NVML does not know the device or its memory"
        raise UnsupportedError(
            f"without giving {device_id} a context, its memory cannot be asked: {reason} {found.detail}".rstrip()
        )
    return DeviceMemory(device.free_bytes, device.total_bytes)
