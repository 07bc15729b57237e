"""Three 8B-shape models on one card with bursty arrivals: elastic, against a static split of the same KV memory.

    python -m benchmarks.three_models --vllm PYTHON --out build/bench

Static: three native vLLM servers with a third of the KV memory each. Elastic: the same three servers with kvcached,
each allowed all of it, and a plain allocation of another process that leaves no more than that free. Both get the same
bursts, one model after the other, from vLLM's own benchmark program.

Goals on one H200: a 99th percentile of the time to first token at least 5 times lower, and no less throughput.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.neighbour import percentile
from benchmarks.serving import BenchmarkClient, Load, Side, measured, runtime_dir, setup, start, wait_ready, write
from tests.e2e.ballast import ballast
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


BURST = Load("burst", BURST_REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS, concurrency=BURST_REQUESTS)


def load(sides: Sequence[Side], clients: Sequence[BenchmarkClient], out: Path) -> dict[str, Any]:
    """Send every burst on schedule and wait for all; first-token times of all requests, and the throughput.

    A model's burst waits for the end of its last one, as a client that sends one burst after the other does.
    """
    folder = out / "bursts"
    folder.mkdir(exist_ok=True)
    started = time.monotonic()

    def burst(number: int) -> dict[str, Any]:
        with turns[number % NUM_MODELS]:
            return clients[number % NUM_MODELS].run(sides[number % NUM_MODELS], BURST, number, folder)

    turns = [threading.Lock() for _ in sides]
    with ThreadPoolExecutor(ROUNDS * NUM_MODELS) as pool:
        bursts = []
        for number in range(ROUNDS * NUM_MODELS):
            time.sleep(max(0.0, started + number * BURST_SECONDS - time.monotonic()))
            bursts.append(pool.submit(burst, number))
        reports = [each.result() for each in bursts]
    seconds = time.monotonic() - started
    ttfts = [ttft for report in reports for ttft in report["ttfts"]]
    completed = sum(report["completed"] for report in reports)
    return {
        "seconds": seconds,
        "completed": completed,
        "asked": ROUNDS * NUM_MODELS * BURST_REQUESTS,
        "output_tokens_per_second": completed * OUTPUT_TOKENS / seconds,
        "ttft_seconds": {part: percentile(ttfts, value) for part, value in (("p50", 0.5), ("p99", 0.99))},
        "bursts": [asdict(measured(report)) for report in reports],
    }


def run_arm(arm: str, installed: Installed, clients: Sequence[BenchmarkClient], out: Path) -> dict[str, Any]:
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
        for client in clients:
            client.wait_ready()
        if arm == "elastic":
            held = sum(member.resident_bytes for _, member in members(runtime_dir(out)))
            left = KV_BYTES - held + withheld_bytes(runtime_dir(out))
            stack.enter_context(ballast(Nvml(), left, installed.python))
        result = load(sides, clients, out)
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
    plan = f"{ROUNDS * NUM_MODELS} bursts of {BURST_REQUESTS} requests, {INPUT_TOKENS} in, {OUTPUT_TOKENS} out"
    shared = {"KV": f"{KV_BYTES >> 30} GiB", "load": f"{plan}, {BURST_SECONDS:.0f} s apart, one model after the other"}
    document: dict[str, Any] = {"setup": {**setup(installed), **shared}}
    with ExitStack() as stack:
        logs = [out / "logs" / f"client-{number}.log" for number in range(NUM_MODELS)]
        clients = [stack.enter_context(BenchmarkClient(installed, log)) for log in logs]
        for arm in ("static", "elastic"):
            document[arm] = run_arm(arm, installed, clients, out)
            write(out, "three_models", document, _table(document) if "elastic" in document else ())
    return 0


if __name__ == "__main__":
    sys.exit(main())
