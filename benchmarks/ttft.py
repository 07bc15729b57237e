"""Time to first token of a 16k-token prompt into an empty cache: all unmapped, against native.

    python -m benchmarks.ttft --vllm PYTHON --out build/bench

Goal on one H200: at most 3 ms more than native. ``benchmarks.serve_speed --ttft`` measures the same on servers that it
has already.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.serving import Side, runtime_dir, setup, spread, start, wait_ready, write
from tests.e2e.client import MODEL
from tests.e2e.engines import ENGINES, Installed
from tests.e2e.readings import Readings
from tests.models.text import VOCABULARY_SIZE

PROMPT_TOKENS = 16384
NUM_REPEATS = 12
GOAL_MS = 3.0


def measure(native: Side, elastic: Side, out: Path) -> dict[str, Any]:
    """Alternate between the sides, each time from an empty cache; milliseconds, and what was resident before."""
    readings = Readings(elastic.server, runtime_dir(out), elastic.name)
    times: dict[str, list[float]] = {"native": [], "elastic": []}
    resident = []
    for repeat in range(-1, NUM_REPEATS):  # the first warms both up
        for side, name in ((native, "native"), (elastic, "elastic")):
            side.reset()
            if side is elastic:
                before = readings.settle(below_bytes=sys.maxsize, deadline_seconds=5)
                resident.append(before["resident_bytes"])
            milliseconds = first_token_ms(side.server.port, _prompt(repeat))
            if repeat >= 0:
                times[name].append(milliseconds)
    return {"ms": times, "resident_bytes_before": resident[1:]}


def first_token_ms(port: int, prompt: Sequence[int]) -> float:
    """Stream one completion of one token; milliseconds until the first event with a token."""
    body = {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    started = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {response.read()[:300]!r}")
    while not response.readline().startswith(b"data:"):
        pass
    elapsed = time.perf_counter() - started
    response.read()
    connection.close()
    return 1e3 * elapsed


def table(name: str, result: Mapping[str, Any]) -> Iterator[str]:
    """One row: both sides' medians and ranges, their difference, the goal."""
    native, elastic = result["ms"]["native"], result["ms"]["elastic"]
    added = statistics.median(elastic) - statistics.median(native)
    verdict = "met" if added <= GOAL_MS else "missed"
    resident = max(result["resident_bytes_before"]) >> 20
    yield f"| {name} | {spread(native)} | {spread(elastic)} | {added:+.1f} | +{GOAL_MS:.0f}: {verdict} | {resident} |"


HEAD = (
    f"| TTFT, {PROMPT_TOKENS} tokens | native ms | elastic ms | added ms | goal | MiB resident before |",
    "| --- | --- | --- | --- | --- | --- |",
)


def _prompt(repeat: int) -> list[int]:
    """Tokens of a prompt that shares no block with another repeat's."""
    return [1 + (repeat + 2) * 7919 * (place + 1) % (VOCABULARY_SIZE - 1) for place in range(PROMPT_TOKENS)]


def main() -> int:
    """Measure one engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engine = parser.add_mutually_exclusive_group(required=True)
    for name in ENGINES:
        engine.add_argument(f"--{name}", metavar="PYTHON")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    name = "vllm" if arguments.vllm else "sglang"
    installed = Installed.find(ENGINES[name], getattr(arguments, name))
    with ExitStack() as stack:
        sides = [start(installed, f"{name}-{mode}", out, elastic=mode == "elastic") for mode in ("native", "elastic")]
        for side in sides:
            stack.enter_context(side.server)
        wait_ready(sides)
        result = measure(*sides, out)
    write(out, "ttft", {"setup": setup(installed), name: result}, (*HEAD, *table(name, result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
