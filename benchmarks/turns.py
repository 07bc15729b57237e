"""What an agent that wakes up costs an engine's thread that sets the pace.

    python -m benchmarks.turns --out build/bench

One of vLLM's real schedulers over elastic memory, all of it resident, as in ``benchmarks.step``; but here its thread
never pauses. Between ``schedule`` and ``update_from_output`` it works for some milliseconds on small tensors, and lets
go of the interpreter's lock for a moment with each, as an engine does that launches a model. So what another thread of
the process takes is added to the step. It runs in turn with an agent that

* never wakes up,
* looks around every 20 ms, whether there is anything to see or not,
* wakes up as it does: a step that finds all calm lets it sleep on (``wake.py``).

Written: ``turns.json``, per kind the mean microseconds of a step, the agent's turns per second, and the ratio of its
steps to those of the first kind in the same round. Goal: at most 1 % more than with an agent that never wakes up.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from kvcached_core.orders import TICK_SECONDS
from kvcached_core.wake import Alarm
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from benchmarks.step import WARM_UP_STEPS, Driven, elastic
from tests.models.families import make_shape

GOAL_RATIO = 1.01
NUM_BLOCKS = 100_000
NEVER_SECONDS = 3600.0
WORK = {"short": 400, "long": 1500}  # operations of a step


class Restless(Alarm):
    """Rings every period, also where all is calm."""

    def snooze(self, is_calm: Callable[[], bool]) -> None:
        return


ALARMS: Mapping[str, Callable[[], Alarm]] = {
    "never": lambda: Alarm(NEVER_SECONDS),
    "every 20 ms": lambda: Restless(TICK_SECONDS),
    "as it is": lambda: Alarm(TICK_SECONDS),
}


class Working(Driven):
    """A scheduler whose thread works where that of `Driven` sleeps."""

    def __init__(self, driven: Driven, operations: int) -> None:
        super().__init__(driven.scheduler, driven.after_step)
        self._operations = operations
        self._tensor = torch.zeros(16)
        self._alarms = {kind: make() for kind, make in ALARMS.items()}

    def work(self) -> None:
        for _ in range(self._operations):
            self._tensor.add_(1.0)

    def steps(self, kind: str, num_steps: int) -> dict[str, float]:
        """So many steps with one kind of alarm."""
        agent = self.scheduler._agent  # type: ignore[attr-defined]
        agent._alarm, before = self._alarms[kind], agent._alarm
        before.ring()
        time.sleep(2 * TICK_SECONDS)  # it sleeps by the other one now
        turns, started = agent.statistics.turns, time.perf_counter()
        for _ in range(num_steps):
            self.step()
        seconds = time.perf_counter() - started
        return {
            "step_us": seconds / num_steps * 1e6,
            "turns_per_second": (agent.statistics.turns - turns) / seconds,
        }


def measure(scratch: Path, operations: int, steps: int, rounds: int) -> dict[str, dict[str, float]]:
    """Every kind in every round, in an order that changes; medians of the rounds."""
    model = Path(scratch, "model")
    make_shape(model)
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in ALARMS}
    with elastic(model, NUM_BLOCKS, scratch) as driven:
        working = Working(driven, operations)
        gc.collect()
        gc.freeze()  # as the engine core does once it is set up
        for _ in range(WARM_UP_STEPS):
            working.step()
        for number in range(rounds):
            kinds = list(ALARMS)
            random.Random(number).shuffle(kinds)
            for kind in kinds:
                runs[kind].append(working.steps(kind, steps))
        gc.unfreeze()
    medians = {
        kind: {name: statistics.median(run[name] for run in each) for name in each[0]} for kind, each in runs.items()
    }
    for kind, figures in medians.items():  # of each round, since a machine drifts
        ratios = (run["step_us"] / never["step_us"] for run, never in zip(runs[kind], runs["never"], strict=True))
        figures["ratio"] = statistics.median(ratios)
    return medians


def table(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterator[str]:
    yield "| work | the agent wakes up | step us | ratio | turns a second | goal |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for work, kinds in results.items():
        for kind, figures in kinds.items():
            verdict = "-" if kind != "as it is" else "met" if figures["ratio"] <= GOAL_RATIO else "missed"
            cells = (f"{figures['step_us']:.0f}", f"{figures['ratio']:.3f}", f"{figures['turns_per_second']:.1f}")
            yield f"| {work} | {kind} | {' | '.join(cells)} | {verdict} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure short and long steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    out: Path = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    init_none_hash(sha256)
    results: dict[str, Any] = {}
    for work, operations in WORK.items():
        with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
            os.environ["KVCACHED_RUNTIME_DIR"] = scratch
            results[work] = measure(Path(scratch), operations, given.steps, given.rounds)
    (out / "turns.json").write_text(json.dumps(results, indent=1))
    print("\n".join(table(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
