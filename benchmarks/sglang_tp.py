"""What agreeing costs: SGLang with two tensor-parallel ranks, elastic against native, in one run.

    python -m benchmarks.sglang_tp MODEL_FOLDER [--rounds 6] [--out build/bench/sglang_tp.json]

Both servers stay up and take turns at the same load (decoding, so that steps are many and short), the other one asleep.
The figure is the median over rounds of elastic / native tokens per second; the goal is at least 0.98.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from tests.sglang.engine import MIB, Engine, prompts

REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 8, 32, 160
FLAGS = {"tp_size": 2, "max_total_tokens": 8000, "sleep_on_idle": True}
UNCHECKED = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "0"}


def tokens_per_second(engine: Engine, seed: int) -> float:
    """One load on an engine that does nothing else."""
    load = prompts(REQUESTS, PROMPT_TOKENS, seed=seed)
    started = time.perf_counter()
    engine.generate(load, NEW_TOKENS)
    return REQUESTS * NEW_TOKENS / (time.perf_counter() - started)


def measure(native: Engine, elastic: Engine, rounds: int) -> dict[str, object]:
    """Take turns; the first round of each only warms up."""
    rows = []
    for number in range(rounds + 1):
        order = [native, elastic] if number % 2 else [elastic, native]
        speed = {id(engine): tokens_per_second(engine, number) for engine in order}
        if number:
            rows.append({"native": speed[id(native)], "elastic": speed[id(elastic)]})
            print(
                f"round {number}: native {rows[-1]['native']:.1f}, elastic {rows[-1]['elastic']:.1f} tokens/s",
                flush=True,
            )
    ratios = [row["elastic"] / row["native"] for row in rows]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"rounds": rows, "ratio_p50": statistics.median(ratios), "ratio_quartiles": [quartiles[0], quartiles[-1]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("build/bench/sglang_tp.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        settings = {
            "KVCACHED_STRICT": "1",
            "KVCACHED_HOST_BUDGET": str(64 * MIB),
            "KVCACHED_RUNTIME_DIR": folder,
            **UNCHECKED,
        }
        native = Engine(arguments.model, Path(folder, "native.log"), None, extra=UNCHECKED, **FLAGS)
        elastic = Engine(arguments.model, Path(folder, "elastic.log"), settings, **FLAGS)
        try:
            result = measure(native.wait_ready(), elastic.wait_ready(), arguments.rounds)
        finally:
            native.kill()
            elastic.kill()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2))
    low, high = result["ratio_quartiles"]  # type: ignore[misc]
    print(f"elastic / native: {result['ratio_p50']:.3f} (quartiles {low:.3f} to {high:.3f}); {arguments.out}")


if __name__ == "__main__":
    main()
