"""Three 8B-shape models on one card with bursty arrivals: elastic, against a static split of the same KV memory.

    python -m benchmarks.three_models --vllm PYTHON --out build/bench

Static: three native vLLM servers with a third of the KV memory each. Elastic: the same three servers with kvcached,
each allowed all of it, and a plain allocation of another process that leaves no more than that free. Both get the same
bursts, one model after the other, from vLLM's own benchmark program, whose start-up comes before each burst in both.

Goals on one H200: a 99th percentile of the time to first token at least 5 times lower, and no less throughput.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.neighbour import percentile
from benchmarks.serving import ROOT, Side, runtime_dir, setup, start, wait_ready, write
from tests.e2e.ballast import ballast
from tests.e2e.client import MODEL
from tests.e2e.engines import VLLM, Installed
from tests.e2e.readings import Nvml, members, withheld_bytes

NUM_MODELS = 3
KV_BYTES = 24 << 30
ROUNDS = 2
BURST_REQUESTS = 112
INPUT_TOKENS = 1024
OUTPUT_TOKENS = 512
BURST_SECONDS = 14.0
"""From one burst to the next: about what one takes when it has all of the memory."""
BURST_DEADLINE_SECONDS = 240
TTFT_GOAL = 5.0


def start_burst(side: Side, seed: int, result: Path) -> subprocess.Popen[bytes]:
    """Let vLLM's benchmark program send one burst, all requests at once."""
    command = [
        *(side.installed.python, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "vllm"),
        *("--base-url", f"http://127.0.0.1:{side.server.port}", "--model", MODEL, "--tokenizer", str(side.model)),
        *("--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS), "--ignore-eos"),
        *("--random-output-len", str(OUTPUT_TOKENS), "--random-range-ratio", "0", "--seed", str(seed)),
        *("--num-prompts", str(BURST_REQUESTS), "--request-rate", "inf", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(result.parent), "--result-filename", result.name),
    ]
    with result.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)


def load(sides: Sequence[Side], out: Path, arm: str) -> dict[str, Any]:
    """Send every burst on schedule and wait for all; first-token times of all requests, and the throughput."""
    folder = out / "bursts"
    folder.mkdir(exist_ok=True)
    bursts = []
    started = time.monotonic()
    for number in range(ROUNDS * NUM_MODELS):
        time.sleep(max(0.0, started + number * BURST_SECONDS - time.monotonic()))
        result = folder / f"{arm}-{number}.json"
        result.unlink(missing_ok=True)
        bursts.append((start_burst(sides[number % NUM_MODELS], number, result), result))
    reports = []
    for process, result in bursts:
        if process.wait(timeout=BURST_DEADLINE_SECONDS) != 0:
            raise RuntimeError(f"a burst failed; see {result.with_suffix('.log')}")
        reports.append(json.loads(result.read_text()))
    seconds = time.monotonic() - started
    ttfts = [ttft for report in reports for ttft in report["ttfts"]]
    completed = sum(report["completed"] for report in reports)
    return {
        "seconds": seconds,
        "completed": completed,
        "asked": ROUNDS * NUM_MODELS * BURST_REQUESTS,
        "output_tokens_per_second": completed * OUTPUT_TOKENS / seconds,
        "ttft_seconds": {part: percentile(ttfts, value) for part, value in (("p50", 0.5), ("p99", 0.99))},
        "bursts": [
            {key: report[key] for key in ("duration", "completed", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms")}
            for report in reports
        ],
    }


def run_arm(arm: str, installed: Installed, out: Path) -> dict[str, Any]:
    """Start three servers, load them, stop them."""
    kv_bytes = KV_BYTES if arm == "elastic" else KV_BYTES // NUM_MODELS
    flags = ("--kv-cache-memory-bytes", str(kv_bytes), "--gpu-memory-utilization", "0.15")
    with ExitStack() as stack:
        sides = [
            start(installed, f"{arm}-{number}", out, elastic=arm == "elastic", flags=flags)
            for number in range(NUM_MODELS)
        ]
        for side in sides:
            stack.enter_context(side.server)
        wait_ready(sides)
        if arm == "elastic":
            held = sum(member.resident_bytes for _, member in members(runtime_dir(out)))
            left = KV_BYTES - held + withheld_bytes(runtime_dir(out))
            stack.enter_context(ballast(Nvml(), left, installed.python))
        result = load(sides, out, arm)
    print(f"{arm}: {result}", flush=True)
    return result


def _table(arms: dict[str, Any]) -> Iterator[str]:
    static, elastic = arms["static"], arms["elastic"]
    lower = static["ttft_seconds"]["p99"] / elastic["ttft_seconds"]["p99"]
    more = elastic["output_tokens_per_second"] / static["output_tokens_per_second"]
    yield "| | static split | elastic | | goal |"
    yield "| --- | --- | --- | --- | --- |"
    for part in ("p50", "p99"):
        values = [arm["ttft_seconds"][part] for arm in (static, elastic)]
        goal = f"{TTFT_GOAL:.0f}x lower: {'met' if lower >= TTFT_GOAL else 'missed'}" if part == "p99" else "-"
        yield f"| TTFT {part}, s | {values[0]:.2f} | {values[1]:.2f} | {values[0] / values[1]:.1f}x lower | {goal} |"
    goal = f"no lower: {'met' if more >= 1 else 'missed'}"
    rates = [f"{arm['output_tokens_per_second']:.0f}" for arm in (static, elastic)]
    yield f"| output tokens/s | {rates[0]} | {rates[1]} | {more:.2f}x | {goal} |"
    done = [f"{arm['completed']} of {arm['asked']}" for arm in (static, elastic)]
    yield f"| requests answered | {done[0]} | {done[1]} | | all |"


def main() -> int:
    """Run both arms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    installed = Installed.find(VLLM, arguments.vllm)
    arms = {arm: run_arm(arm, installed, out) for arm in ("static", "elastic")}
    plan = f"{ROUNDS * NUM_MODELS} bursts of {BURST_REQUESTS} requests, {INPUT_TOKENS} in, {OUTPUT_TOKENS} out"
    shared = {"KV": f"{KV_BYTES >> 30} GiB", "load": f"{plan}, {BURST_SECONDS:.0f} s apart, one model after the other"}
    write(out, "three_models", {"setup": {**setup(installed), **shared}, **arms}, _table(arms))
    return 0


if __name__ == "__main__":
    sys.exit(main())
