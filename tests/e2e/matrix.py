"""Run the correctness matrix, or a part of it, and write its report.

    python -m tests.e2e.matrix --vllm PYTHON --sglang PYTHON --cases 'vllm-gqa-*' --out build/e2e
    python -m tests.e2e.matrix --vllm PYTHON --cpu --out build/e2e-cpu

Resumable: a run that is complete in the output folder is not repeated, so GPU time may come in slices. Several
servers run side by side on one GPU (``--parallel``); each has the memory of its flags, whatever its neighbours do.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.e2e.cases import Case, cpu_cases, gpu_cases, select
from tests.e2e.checks import Outcome, check_case
from tests.e2e.engines import ENGINES, Installed
from tests.e2e.readings import Nvml
from tests.e2e.report import read_records, summary, write_report
from tests.e2e.run import MODES, Mode, Place, run_case
from tests.e2e.server import kill_all
from tests.models.families import make_model

ROOT = Path(__file__).resolve().parents[2]


def main(words: Sequence[str] | None = None) -> int:
    """Run what is asked for; 0 when every check of it passed."""
    arguments = _parser().parse_args(words)
    out: Path = arguments.out.resolve()
    nvml = Nvml()
    every_case = cpu_cases() if arguments.cpu else gpu_cases()
    cases = select(every_case, arguments.cases)
    if not cases:
        print(f"no case is named like {' '.join(arguments.cases)}", file=sys.stderr)
        return 2
    installed = {
        name: Installed.find(engine, python) for name, engine in ENGINES.items() if (python := getattr(arguments, name))
    }
    place = _prepare(arguments, out, cases)
    runnable = [case for case in cases if case.engine.name in installed and not case.why_not(nvml.num_gpus)]
    matrix = Matrix(lambda case, mode: run_case(case, mode, installed[case.engine.name], place), out / "runs")
    matrix.run(runnable, parallel=arguments.parallel, budget_seconds=arguments.budget_seconds)
    setup = {
        **nvml.description(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "elastic servers also have": ", ".join(f"{n}={v}" for n, v in place.settings.items())
        or "no setting but a name",
        "side by side": str(arguments.parallel),
    }
    # Of everything in the folder, not of this slice alone; the exit code is this slice's.
    findings = write_report(out, every_case, read_records(out / "runs"), setup)
    checks = [check for case in cases for check in findings.get(case.name, ())]
    print(f"{out / 'report.md'}: {summary(checks)}", flush=True)
    missing = matrix.missing(runnable)
    if missing:
        print(f"not run yet, resume with the same command: {', '.join(missing)}", flush=True)
    return int(bool(missing) or any(check.outcome is Outcome.FAIL for check in checks))


class Matrix:
    """Runs cases and keeps each finished run as one file.

    Args:
        run: Makes the record of one run.
        runs: The folder of the files.
    """

    def __init__(self, run: Callable[[Case, Mode], dict[str, Any]], runs: Path) -> None:
        self._run = run
        self._runs = runs
        self._turn = threading.Condition()
        self._running: set[Path] = set()
        self._longest_seconds = 0.0
        self._stopped = False
        runs.mkdir(parents=True, exist_ok=True)

    def run(self, cases: Sequence[Case], *, parallel: int, budget_seconds: float) -> None:
        """Run what is missing, so many servers side by side.

        No run is started that would not end within the budget if it took as long as the longest before it.
        """
        deadline = time.monotonic() + budget_seconds
        with ThreadPoolExecutor(parallel) as pool:
            workers = [pool.submit(self._work, cases, deadline) for _ in range(parallel)]
            try:
                for worker in workers:
                    worker.result()
            except KeyboardInterrupt:
                # The servers have sessions of their own, so they did not get the interrupt.
                self._stopped = True
                kill_all()
                raise

    def missing(self, cases: Iterable[Case]) -> list[str]:
        return [f"{case.name}.{mode}" for case in cases for mode in MODES if not self._file(case, mode).exists()]

    def _work(self, cases: Sequence[Case], deadline: float) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._next(cases) or not self._running)
                work = self._next(cases)
                if self._stopped or work is None or time.monotonic() + self._longest_seconds > deadline:
                    return
                self._running.add(self._file(*work))
            started = time.monotonic()
            try:
                self._run_one(*work)
            finally:
                with self._turn:
                    self._running.discard(self._file(*work))
                    self._longest_seconds = max(self._longest_seconds, time.monotonic() - started)
                    self._turn.notify_all()

    def _next(self, cases: Sequence[Case]) -> tuple[Case, Mode] | None:
        """The elastic run of the first case whose native one is there, else the next native run.

        A case's two servers never start together: they would compile the same code at once, and what the native one
        compiled the elastic one finds ready. And cases are complete one after the other, should the budget end.
        """
        for case in cases:
            if self._file(case, "native").exists() and self._is_due(case, "elastic"):
                return case, "elastic"
        return next(((case, "native") for case in cases if self._is_due(case, "native")), None)

    def _is_due(self, case: Case, mode: Mode) -> bool:
        file = self._file(case, mode)
        return file not in self._running and not file.exists()

    def _file(self, case: Case, mode: Mode) -> Path:
        return self._runs / f"{case.name}.{mode}.json"

    def _record(self, case: Case, mode: Mode) -> dict[str, Any] | None:
        file = self._file(case, mode)
        return json.loads(file.read_text()) if file.exists() else None

    def _run_one(self, case: Case, mode: Mode) -> None:
        started = time.monotonic()
        record = self._run(case, mode)
        if self._stopped:
            return  # it was cut short
        scratch = self._file(case, mode).with_suffix(".tmp")
        scratch.write_text(json.dumps(record))
        scratch.rename(self._file(case, mode))
        ready = f"ready after {record['ready_seconds']:.0f} s" if "ready_seconds" in record else record["ready_error"]
        checks = check_case(self._record(case, "native"), self._record(case, "elastic"))
        failed = [check.name for check in checks if check.of in (mode, "both") and check.outcome is Outcome.FAIL]
        verdict = f"failed: {', '.join(failed)}" if failed else "good"
        with self._turn:
            print(f"{time.monotonic() - started:5.0f} s  {case.name} {mode}: {ready}; {verdict}", flush=True)


def _prepare(arguments: argparse.Namespace, out: Path, cases: Iterable[Case]) -> Place:
    models: Path = arguments.models.resolve()
    for family in dict.fromkeys(case.family for case in cases):
        make_model(family, models / family, num_layers=6 if arguments.cpu else None)
    runtime_dir: Path = arguments.runtime_dir or out / "ledger"
    runtime_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Place(
        root=ROOT,
        models=models,
        logs=out / "logs",
        runtime_dir=runtime_dir,
        settings={"KVCACHED_HOST_BUDGET": "2GiB"} if arguments.cpu else {},
        start_deadline_seconds=arguments.start_seconds,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment with vLLM and kvcached-vllm")
    parser.add_argument("--sglang", metavar="PYTHON", help="the same with SGLang")
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="PATTERN", help="shell patterns of case names")
    parser.add_argument("--cpu", action="store_true", help="the cases that run without a GPU, on shallower models")
    parser.add_argument("--out", type=Path, required=True, help="records, logs and the report; what is there is kept")
    parser.add_argument("--models", type=Path, default=Path("/tmp/kvcached-models"), help="made here once")
    parser.add_argument("--runtime-dir", type=Path, help="the ledgers' directory (default: in the output folder)")
    parser.add_argument("--parallel", type=int, default=1, help="servers side by side")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="start no run that would end later")
    parser.add_argument("--start-seconds", type=float, default=300, help="how long a server may take to start")
    return parser


if __name__ == "__main__":
    # SIGINT too: a shell starts background jobs with it ignored, and the servers would inherit that.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
