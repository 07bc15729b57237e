"""One run of one case: a server from start to exit, and everything that was seen of it, as data."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.e2e.cases import Case
from tests.e2e.client import Client
from tests.e2e.engines import Installed
from tests.e2e.phases import run_phases
from tests.e2e.readings import Readings
from tests.e2e.server import Server, ServerError, free_port

Mode = Literal["native", "elastic"]
MODES: tuple[Mode, ...] = ("native", "elastic")

EXIT_DEADLINE_SECONDS = 90
SETTLE_DEADLINE_SECONDS = 10
ACTIVE_LINE = re.compile(r"kvcached \S+ is on: .*")
LAYOUT_LINE = re.compile(r"kvcached .*, layout (.+), page|Using (\S+) KV cache layout")

# Of memory that is not what it should be: looked for in everything that a server logs.
ERROR_SIGNATURES = re.compile(
    r"CUDA error|illegal memory access|device-side assert|NCCL error|OutOfMemoryError|Segmentation fault"
    r"|memory leak detected|pool memory leak|InvariantError|DriverError"
)
# Of failing work: until the interrupt only, since both engines, unmodified, may log cancelled tasks and a dead engine
# while they shut down.
TRACEBACK = re.compile(
    r"Traceback \(most recent call last\)|\bCRITICAL\b|\bFATAL\b|EngineDeadError|Scheduler hit an exception"
)


@dataclass(frozen=True)
class Place:
    """Where runs happen: folders, and how long a server may take to start.

    Attributes:
        root: The checkout; servers run in it.
        models: One model folder per family.
        logs: Receives ``<case>.<mode>.log``.
        runtime_dir: The ledger's directory, shared by all elastic servers of the matrix.
        settings: ``KVCACHED_*`` for every elastic server.
    """

    root: Path
    models: Path
    logs: Path
    runtime_dir: Path
    settings: Mapping[str, str]
    start_deadline_seconds: float


def run_case(case: Case, mode: Mode, installed: Installed, place: Place) -> dict[str, Any]:
    """Start the server of one case, send every phase, interrupt it; return the record, never raise for the server.

    A native server gets two passes: what differs between them is not asked of the elastic one.
    """
    port = free_port()
    command = case.engine.command(installed.python, place.models / case.family, port, case.flags)
    ours = settings_of(case, place) if mode == "elastic" else {}
    variables = {**case.engine.variables, **case.variables}
    record: dict[str, Any] = {
        "case": case.name,
        "mode": mode,
        "engine": case.engine.name,
        "release": installed.release,
        "family": case.family,
        "tensor_parallel": case.tensor_parallel,
        # As anybody would type it: where this machine keeps its interpreters and models says nothing.
        "command": case.engine.command("python3", Path("models") / case.family, 8000, case.flags),
        "variables": {**variables, **ours},
        "log": f"{case.name}.{mode}.log",
        "started_at": time.time(),
    }
    log = place.logs / record["log"]
    with Server(f"{case.name} {mode}", command, {**variables, **ours}, port=port, log=log, cwd=place.root) as server:
        readings = Readings(server, place.runtime_dir, case.name)
        try:
            record["ready_seconds"] = server.wait_ready(
                case.engine.health_path, deadline_seconds=place.start_deadline_seconds
            )
        except ServerError as error:
            record["ready_error"] = str(error)
            record["log_tail"] = server.log_text()[-2000:]
        else:
            client = Client(port)
            num_passes = 2 if mode == "native" else 1
            record |= _load(client, num_passes, lambda: case.engine.reset(client), readings)
            record["alive_after_load"] = server.alive
        record |= _end(server, readings)
    return record


def settings_of(case: Case, place: Place) -> dict[str, str]:
    """``KVCACHED_*`` of a case's elastic server, and the switch; the native one has none of them."""
    own = {"ENABLE_KVCACHED": "1", "KVCACHED_STRICT": "1", "KVCACHED_NAME": case.name}
    return {**own, "KVCACHED_RUNTIME_DIR": str(place.runtime_dir), **place.settings, **case.settings}


def _load(client: Client, num_passes: int, reset: Callable[[], bool], readings: Readings) -> dict[str, Any]:
    """Send every phase, with the memory read when ready, when full, and after the last reset."""
    taken = {"ready": readings.take()}
    passes: list[dict[str, Any]] = []
    resets: list[bool] = []
    for _ in range(num_passes):
        answers: dict[str, Any] = {}
        for phase, outcome in run_phases(client, reset):
            if isinstance(outcome, bool):
                resets.append(outcome)
            else:
                answers[phase] = [answer.as_json() for answer in outcome]
        passes.append(answers)
        # What is being mapped is in the ledger before it is in the driver.
        taken["full"] = readings.settle(below_bytes=sys.maxsize, deadline_seconds=SETTLE_DEADLINE_SECONDS)
        resets.append(reset())
    taken["after_reset"] = readings.settle(
        below_bytes=taken["full"]["resident_bytes"], deadline_seconds=SETTLE_DEADLINE_SECONDS
    )
    return {"passes": passes, "resets": resets, "readings": taken}


def _end(server: Server, readings: Readings) -> dict[str, Any]:
    """Interrupt the server; say how it ended, what its log holds, and what it left behind."""
    at_signal = server.log.stat().st_size
    pids = server.pids()
    ended = server.interrupt(deadline_seconds=EXIT_DEADLINE_SECONDS)
    text, before = server.log_text(), server.log_text(at_signal)
    active = ACTIVE_LINE.search(text)
    layout = LAYOUT_LINE.search(text)
    return {
        "exit": {"seconds": ended.seconds, "code": ended.code, "left": list(ended.left)},
        "left_on_device": readings.left_on_device(pids),
        "members_after_exit": readings.members_named(),
        "active_line": active.group(0) if active else "",
        "layout": next(filter(None, layout.groups())) if layout else "",
        "error_signatures": _signatures(ERROR_SIGNATURES, text) + _signatures(TRACEBACK, before),
        "cpu_count": os.cpu_count(),
    }


def _signatures(pattern: re.Pattern[str], text: str) -> list[str]:
    found = dict.fromkeys(line.strip()[:300] for line in text.splitlines() if pattern.search(line))
    return list(found)[:10]
