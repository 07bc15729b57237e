"""The ledgers that a command is about: those in the runtime directory, of one device or of all."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kvcached_core.errors import LedgerError
from kvcached_core.ledger import Ledger
from kvcached_core.ledger_statistics import LedgerStatistics, MemberStatistics


@dataclass(frozen=True)
class Unreadable:
    """A ledger that is there and cannot be used."""

    device_id: str
    reason: str


@dataclass(frozen=True)
class Snapshots:
    """All devices at about one moment."""

    devices: tuple[LedgerStatistics, ...]
    unreadable: tuple[Unreadable, ...]


@dataclass
class Ledgers:
    """The open ledgers of a runtime directory. Close it, or use it as a context.

    Attributes:
        prefix: The beginning of a UUID, in either case; None: every device.
    """

    runtime_dir: Path
    prefix: str | None = None
    _open: dict[str, Ledger] = field(default_factory=dict)

    def __enter__(self) -> Ledgers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every ledger."""
        with ExitStack() as stack:
            for ledger in self._open.values():
                stack.callback(ledger.close)
            self._open = {}

    def snapshots(self) -> Snapshots:
        """Every device now; devices that appeared since the last time are included.

        Raises:
            LedgerError: A device was asked for and none fits.
        """
        devices, unreadable = [], []
        for device_id in self._device_ids():
            try:
                devices.append(self.ledger(device_id).snapshot())
            except LedgerError as error:
                self._forget(device_id)
                unreadable.append(Unreadable(device_id, str(error)))
        return Snapshots(tuple(devices), tuple(unreadable))

    def of_member(self, name: str) -> list[Ledger]:
        """The ledgers, one or several, in which a member of this name lives.

        Raises:
            LedgerError: There is none, or a ledger cannot be read.
        """
        found = self.snapshots()
        having = [device.device_id for device in found.devices if ranks_of(device, name)]
        if having:
            return [self.ledger(device_id) for device_id in having]
        names = sorted({member.name for device in found.devices for member in device.members})
        problems = "".join(f" {each.reason}." for each in found.unreadable)
        raise LedgerError(f"no member {name!r} in {self.runtime_dir}. Members: {', '.join(names) or 'none'}.{problems}")

    def ledger(self, device_id: str) -> Ledger:
        """The open ledger of a device.

        Raises:
            LedgerError: It is not there or cannot be used.
        """
        if device_id not in self._open:
            self._open[device_id] = Ledger.open(device_id, None, runtime_dir=self.runtime_dir)
        return self._open[device_id]

    def _forget(self, device_id: str) -> None:
        ledger = self._open.pop(device_id, None)
        if ledger is not None:
            ledger.close()

    def _device_ids(self) -> Iterable[str]:
        present = Ledger.devices(self.runtime_dir)
        if self.prefix is None:
            return present
        fitting = [device_id for device_id in present if device_id.lower().startswith(self.prefix.lower())]
        if not fitting:
            raise LedgerError(
                f"no device beginning with {self.prefix!r} has a ledger in {self.runtime_dir}. "
                f"Devices: {', '.join(present) or 'none'}"
            )
        return fitting


def ranks_of(device: LedgerStatistics, name: str) -> list[MemberStatistics]:
    """The slots of a member on a device: one, or one for each of its ranks there."""
    return [member for member in device.members if member.name == name]
