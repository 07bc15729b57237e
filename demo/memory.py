"""The memory of both servers over time, read from the ledger as any operator's tool would."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvcached_core.ledger import Ledger

from demo.workload import ENGINES

INTERVAL_SECONDS = 0.05


@dataclass(frozen=True)
class Sample:
    """Resident bytes of each server at one moment (``time.monotonic``)."""

    time: float
    resident_bytes: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.resident_bytes.values())


class Recorder(threading.Thread):
    """Samples the ledger until stopped."""

    def __init__(self, runtime_dir: Path, *, notify: Callable[[Sample], None]) -> None:
        super().__init__(name="memory-recorder", daemon=True)
        self.samples: list[Sample] = []
        self._ledger = Ledger.open("host", None, runtime_dir=runtime_dir)
        self._notify = notify
        self._stop_asked = threading.Event()

    def run(self) -> None:
        while not self._stop_asked.wait(INTERVAL_SECONDS):
            sample = self.sample()
            self.samples.append(sample)
            self._notify(sample)

    def sample(self) -> Sample:
        """The servers' resident bytes now."""
        members = {member.name: member for member in self._ledger.snapshot().members}
        resident = {name: members[name].resident_bytes if name in members else 0 for name in ENGINES}
        return Sample(time.monotonic(), resident)

    def stop(self) -> None:
        """Stop sampling; the ledger is closed afterwards."""
        self._stop_asked.set()
        if self.is_alive():
            self.join()
        self._ledger.close()
