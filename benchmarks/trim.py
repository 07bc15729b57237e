"""How fast an idle server's cached KV is a neighbour's, with two real vLLM servers on one host budget.

    python -m benchmarks.trim --out build/bench

Server A fills the whole budget with cached prefixes and goes idle. Then the first request of server B needs about half
of the budget; the ledger, read every half millisecond, tells when that demand stands in it and when B's lease covers
it. Then A, still idle, has its ceiling lowered to half of what it holds while nobody sends it a request.

Goals on two cores: demand to grant 100 ms (median) and 250 ms (99th percentile).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.models.small import model
from tests.vllm.engine import MIB, prompts, until
from tests.vllm.servers import BUDGET, Host

TOKEN_BYTES = 4096
PROMPT_TOKENS = 7680
"""Of B's request: 30 MiB, admitted whole."""
FILL_TOKENS = 1920
FLAGS = (
    "--max-model-len=8192",
    "--max-num-batched-tokens=8192",
    "--max-num-seqs=16",
    '--hf-overrides={"max_position_embeddings": 8192}',
)
GOALS_MS = {"p50": 100, "p99": 250}
DEADLINE_SECONDS = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Time from a neighbour's demand to its grant.")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--repeats", type=int, default=12)
    given = parser.parse_args()
    with ExitStack() as stack:
        runtime_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcached-bench-", dir="/dev/shm")))
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcached-bench-")))
        host = Host(model("tiny-llama"), logs, runtime_dir, stack)
        for name in ("A", "B"):
            host.start(name, None, *FLAGS)
        for name in ("A", "B"):
            print(f"{name} ready after {host.wait_ready(name):.0f} s", flush=True)
        host.watch()
        host.limit("A")
        found = [measure(host, repeat) for repeat in range(given.repeats)]
    write(given.out / "trim.json", found)


def measure(host: Host, repeat: int) -> dict[str, float]:
    """One demand and one limit; milliseconds."""
    host.drop_caches()
    fill(host, repeat)
    found = demand(host, repeat) | {"limit_ms": limit(host)}
    print(", ".join(f"{name} {value:.1f}" for name, value in found.items()), flush=True)
    return found


def fill(host: Host, seed: int) -> None:
    """A caches prefixes until nothing of the budget is left, and goes idle."""
    host.servings["A"].ask_all(prompts(BUDGET // (FILL_TOKENS * TOKEN_BYTES) + 2, FILL_TOKENS, seed=seed), 1)
    until(lambda: host.member("A").state == "idle", "A idle")
    time.sleep(0.5)


def demand(host: Host, repeat: int) -> dict[str, float]:
    """B's first request: from its sending, and from its demand in the ledger, to the lease that covers it."""
    [prompt] = prompts(1, PROMPT_TOKENS, seed=500_000 + repeat)
    sent = time.perf_counter()
    running = host.servings["B"].ask(prompt, 1)
    asked = _when(lambda: host.member("B").unmet_bytes > 0)
    granted = _when(lambda: host.member("B").lease_bytes >= PROMPT_TOKENS * TOKEN_BYTES)
    running.result()
    return {"request_to_grant_ms": 1e3 * (granted - sent), "demand_to_grant_ms": 1e3 * (granted - asked)}


def limit(host: Host) -> float:
    """A's ceiling is lowered to half of what it holds; milliseconds until it has followed."""
    ceiling_bytes = host.member("A").resident_bytes // 2
    started = time.perf_counter()
    host.ledger.set_limits("A", floor_bytes=0, ceiling_bytes=ceiling_bytes)
    followed = _when(lambda: host.member("A").resident_bytes <= ceiling_bytes)
    host.limit("A")
    return 1e3 * (followed - started)


def _when(condition: Callable[[], bool]) -> float:
    """The moment at which a condition held, looked at every half millisecond."""
    deadline = time.perf_counter() + DEADLINE_SECONDS
    while not condition():
        if time.perf_counter() > deadline:
            raise RuntimeError(f"nothing happened within {DEADLINE_SECONDS} s")
        time.sleep(0.0005)
    return time.perf_counter()


def write(path: Path, found: Sequence[dict[str, float]]) -> None:
    """The result as JSON, and as lines for a reader."""
    figures: dict[str, Any] = {name: _summary([each[name] for each in found]) for name in found[0]}
    grant = figures["demand_to_grant_ms"]
    result = {
        "budget_bytes": BUDGET,
        "asked_bytes": PROMPT_TOKENS * TOKEN_BYTES,
        "repeats": len(found),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "goals_ms": GOALS_MS,
        "met": all(grant[name] <= goal for name, goal in GOALS_MS.items()),
        **figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"| milliseconds, {PROMPT_TOKENS * TOKEN_BYTES // MIB} of {BUDGET // MIB} MiB | median | p99 | goal |")
    print("| --- | --- | --- | --- |")
    for name in figures:
        goal = f"{GOALS_MS['p50']}, {GOALS_MS['p99']}" if name == "demand_to_grant_ms" else ""
        print(f"| {name} | {figures[name]['p50']:.1f} | {figures[name]['p99']:.1f} | {goal} |")


def _summary(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "max": ordered[-1],
    }


if __name__ == "__main__":
    main()
