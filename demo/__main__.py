"""``python -m demo --model FOLDER``: run it, judge it, and leave a picture, a result and the logs."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from demo.course import Course, run_phases
from demo.engine import Engine, EngineError
from demo.interrupts import postponed, raise_on_signals
from demo.memory import Recorder, Sample
from demo.picture import draw
from demo.reference import Reference, Tokens, reference
from demo.result import conclude
from demo.view import View
from demo.workload import ENGINES, FULL, QUICK, Phase, Scale, phases


def main() -> int:
    arguments = _arguments()
    scale = QUICK if arguments.quick else FULL
    view = View(Console(highlight=False), scale.budget_bytes)
    raise_on_signals()
    arguments.output.mkdir(parents=True, exist_ok=True)
    try:
        return Demo(scale, arguments.model, arguments.output, view).run()
    except EngineError as error:
        view.console.print(f"[bold red]The demo could not finish:[/] {error}")
        return 1
    except KeyboardInterrupt:
        view.console.print("Interrupted: both servers are stopped, and nothing is left.")
        return 130


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s demo --", description="Two vLLM servers on one memory budget.")
    parser.add_argument("--model", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="a tiny model with random weights, and less of everything")
    parser.add_argument("--output", type=Path, default=Path("build/demo"), help="where picture, result and logs go")
    return parser.parse_args()


class Demo:
    """One run."""

    def __init__(self, scale: Scale, model: Path, output: Path, view: View) -> None:
        self._scale = scale
        self._model = model
        self._output = output
        self._view = view
        self._phases = phases(scale)
        self._flags = [
            "--enforce-eager",
            *("--dtype", "bfloat16"),
            *("--max-model-len", "2048"),
            *("--max-num-batched-tokens", "2048"),
            *("--max-num-seqs", "8"),
            *("--kv-cache-memory-bytes", str(scale.budget_bytes)),
        ]

    def run(self) -> int:
        """The native run (or what was kept of one), the elastic run, the judgement. Returns an exit code."""
        native = self._reference()
        if native.kept:
            self._view.say(f"native tokens kept from an earlier run with the same key ({native.key})")
        course, samples = self._run_elastic()
        if native.kept and native.differing(course.tokens()):
            self._view.say("these are not the tokens that were kept: the native servers are asked again")
            native = self._reference(anew=True)
        return self._conclude(course, samples, native)

    def _reference(self, *, anew: bool = False) -> Reference:
        return reference(self._model, self._flags, self._phases, run=self._run_native, anew=anew)

    def _run_native(self) -> Tokens:
        self._view.say("native run: both servers without kvcached, for the tokens to compare with")
        everything = Phase("native", tuple(request for phase in self._phases for request in phase.requests))
        with _runtime_dir() as folder, self._servers("native", Path(folder), {}) as engines:
            course = run_phases(engines, [everything], announce=lambda phase: None, progress=lambda answer: None)
        return course.tokens()

    def _run_elastic(self) -> tuple[Course, list[Sample]]:
        budget = f"{self._scale.budget_bytes // (1 << 20)}MiB"
        self._view.say(f"elastic run: the same two servers, ENABLE_KVCACHED=1, KVCACHED_HOST_BUDGET={budget} for both")
        with _runtime_dir() as folder:
            settings = {
                "ENABLE_KVCACHED": "1",
                "KVCACHED_STRICT": "1",
                "KVCACHED_HOST_BUDGET": budget,
                "KVCACHED_RUNTIME_DIR": folder,
            }
            with self._servers("elastic", Path(folder), settings) as engines:
                return self._record(engines, Path(folder))

    def _conclude(self, course: Course, samples: list[Sample], native: Reference) -> int:
        result = conclude(self._scale, course, samples, native)
        picture = self._output / "memory.png"
        draw(picture, budget_bytes=self._scale.budget_bytes, course=course, samples=samples, model=self._scale.model)
        result.write(self._output / "result.json")
        self._view.conclude(result)
        self._view.console.print(f"\n{picture}\n{self._output / 'result.json'}")
        return 0 if result.good else 1

    def _record(self, engines: Mapping[str, Engine], folder: Path) -> tuple[Course, list[Sample]]:
        recorder = Recorder(folder, notify=self._view.sampled)
        recorder.start()
        try:
            with self._view.live():
                course = run_phases(engines, self._phases, announce=self._view.announce, progress=self._view.answered)
        finally:
            recorder.stop()
        return course, recorder.samples

    @contextmanager
    def _servers(self, run: str, folder: Path, settings: Mapping[str, str]) -> Iterator[dict[str, Engine]]:
        """Both servers, started side by side on a core each and ready; their logs are kept, they are not."""
        cores = sorted(os.sched_getaffinity(0))
        with ExitStack() as stack:
            engines = {}
            for place, name in enumerate(ENGINES):
                environ = {
                    "VLLM_CPU_OMP_THREADS_BIND": str(cores[place % len(cores)]),
                    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
                    **({"KVCACHED_NAME": name, **settings} if settings else {}),
                }
                log = self._output / f"{run}-{name}.log"
                with postponed():
                    engines[name] = Engine(name, self._model, self._flags, folder=folder, log=log, environ=environ)
                    stack.callback(engines[name].stop)
            for engine in engines.values():
                engine.wait_ready()
            self._view.say("both servers are ready")
            yield engines


def _runtime_dir() -> tempfile.TemporaryDirectory[str]:
    """A private directory in memory for the ledger and the servers' sockets."""
    return tempfile.TemporaryDirectory(prefix="kvcached-demo-", dir="/dev/shm")


if __name__ == "__main__":
    sys.exit(main())
