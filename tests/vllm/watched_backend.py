"""The host backend, watched and disturbed by a test, installed as any third party's backend would be: by entry point.

A test and the processes of its engine share a folder. There, ``calls-PID`` lists every call and its thread;
``fail-PID`` makes every map of that process fail with the words in it; ``skip-PID`` makes it do nothing and say that
it was done; ``hold`` keeps every process from reserving addresses, which an engine does just before its first map.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kvcached_core.backends import DeviceMemory, hookimpl
from kvcached_core.backends.host import HostBackend, HostFence
from kvcached_core.errors import DriverError

FOLDER_VARIABLE = "KVC_TEST_WATCHED"


@hookimpl
def kvcached_make_backend(kind: str, budget_bytes: int | None) -> WatchedBackend | None:
    return WatchedBackend(budget_bytes) if kind == "host" else None


def install(folder: Path) -> dict[str, str]:
    """Make ``folder`` a place where Python finds this backend as an installed one; the variables that do it."""
    metadata = folder / "watched_backend-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: watched-backend\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[kvcached.backends]\nwatched = {__name__}\n")
    path = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
    return {"PYTHONPATH": path, FOLDER_VARIABLE: str(folder)}


def calls(folder: Path, pid: int) -> list[tuple[str, str]]:
    """Every call of a process so far: its name and its thread's."""
    lines = (folder / f"calls-{pid}").read_text().splitlines()
    return [(call, thread) for call, _, thread in (line.partition(" ") for line in lines)]


class WatchedBackend(HostBackend):
    """See above."""

    def __init__(self, budget_bytes: int | None) -> None:
        super().__init__(budget_bytes)
        self._folder = Path(os.environ[FOLDER_VARIABLE])

    def reserve(self, size_bytes: int, alignment_bytes: int) -> int:
        self._note("reserve")
        while (self._folder / "hold").exists():
            time.sleep(0.01)
        return super().reserve(size_bytes, alignment_bytes)

    def map(self, address: int, size_bytes: int, page_bytes: int) -> None:
        self._note("map")
        fails = self._folder / f"fail-{os.getpid()}"
        if fails.exists():
            raise DriverError(fails.read_text(), call="map", result="INJECTED", device_id=self.device_id)
        if not self._skips():
            super().map(address, size_bytes, page_bytes)

    def zero(self, spans: Sequence[tuple[int, int]]) -> None:
        self._note("zero")
        if not self._skips():
            super().zero(spans)

    def unmap(self, address: int, size_bytes: int, page_bytes: int) -> None:
        self._note("unmap")
        super().unmap(address, size_bytes, page_bytes)

    def fence(self, streams: Sequence[int]) -> HostFence:
        self._note("fence")
        return super().fence(streams)

    def memory(self) -> DeviceMemory:
        self._note("memory")
        return super().memory()

    def _skips(self) -> bool:
        return (self._folder / f"skip-{os.getpid()}").exists()

    def _note(self, call: str) -> None:
        with (self._folder / f"calls-{os.getpid()}").open("a") as lines:
            lines.write(f"{call} {threading.current_thread().name}\n")
