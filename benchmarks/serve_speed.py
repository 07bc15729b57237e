"""Throughput, TPOT and TTFT, elastic against native, on an 8B shape.

    python -m benchmarks.serve_speed --vllm PYTHON --sglang PYTHON --ttft --out build/bench

Goals on one H200: at least 0.99 times the native throughput, at most 1.01 times its TPOT. Both sides of an engine run
at once on one card, each with its own memory, and are loaded in turn, native, elastic, elastic, native, so that what
drifts counts for both alike; the one that is not loaded waits. Each run starts from an empty prefix cache: for the
elastic side that means growing from nothing. Decoding is measured once more with the cache as the run before left it,
full of what nobody asks for: that is what elastic memory costs where none is mapped.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import ttft
from benchmarks.serving import (
    BenchmarkClient,
    Load,
    Measured,
    Side,
    add_engine_arguments,
    add_layout_argument,
    engines_named,
    layout_settings,
    measured,
    runtime_dir,
    setup,
    spread,
    start,
    wait_ready,
    write,
)
from tests.e2e.readings import Readings

LOADS = (
    Load("saturated decode", num_prompts=96, input_tokens=128, output_tokens=512, concurrency=96, grown=True),
    Load("prefill-heavy", num_prompts=128, input_tokens=2048, output_tokens=32, concurrency=32),
)
WARM_UP = Load("warm-up", num_prompts=64, input_tokens=512, output_tokens=16, concurrency=64)
ORDER = ("native", "elastic", "elastic", "native")
THROUGHPUT_GOAL = 0.99
TPOT_GOAL = 1.01
IDLE_GOAL_BYTES = 64 << 20
METRICS = ("total_tokens_per_second", "mean_tpot_ms")


def main() -> int:
    """Measure every engine named."""
    arguments = _parser().parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    installed = engines_named(arguments)
    with ExitStack() as stack:
        pairs, clients = {}, {}
        for each in installed:
            name = each.engine.name
            clients[name] = stack.enter_context(BenchmarkClient(each, out / "logs" / f"{name}-client.log"))
            pairs[name] = {
                mode: start(each, f"{name}-{mode}", out, elastic=mode == "elastic", **layout_settings(arguments, name))
                for mode in ("native", "elastic")
            }
            for side in pairs[name].values():
                stack.enter_context(side.server)
        ready = wait_ready(side for pair in pairs.values() for side in pair.values())
        for client in clients.values():
            client.wait_ready()
        layout = {"layout asked of SGLang": arguments.sglang_layout}
        document = {"setup": setup(*installed) | layout, "start_seconds": ready, "engines": {}}
        for name, pair in pairs.items():
            document["engines"][name] = _measure(pair, clients[name], out, arguments)
            # After each: what is measured is kept, should the machine not be there for the next.
            write(out, "serve_speed", document, _tables(document["engines"]))
    return 0


def _measure(
    pair: Mapping[str, Side], client: BenchmarkClient, out: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    scratch = out / "loads"
    scratch.mkdir(exist_ok=True)
    readings = Readings(pair["elastic"].server, runtime_dir(out), pair["elastic"].name)
    result: dict[str, Any] = {"idle_bytes": readings.take()["resident_bytes"], "loads": {}}
    for side in pair.values():
        client.run(side, WARM_UP, 0, scratch)
    for load in LOADS:
        runs: dict[str, list[dict[str, float]]] = {}
        for place, mode in enumerate(ORDER * arguments.rounds):
            pair[mode].reset()
            for kind, seed in ((mode, 1 + place // 2), (f"{mode}, grown", 1001 + place))[: 2 if load.grown else 1]:
                figures = measured(client.run(pair[mode], load, seed, scratch))
                _check_complete(figures, load)
                runs.setdefault(kind, []).append(asdict(figures))
                print(f"{kind}: {pair[mode].name}, {load.name}: {figures}", flush=True)
        result["loads"][load.name] = runs
    for side in pair.values():
        side.reset()
    settled = readings.settle(below_bytes=sys.maxsize, deadline_seconds=10)
    result["idle_bytes_after_load"] = settled["resident_bytes"]
    if arguments.ttft:
        result["ttft"] = ttft.measure(pair["native"], pair["elastic"], out)
    return result


def _check_complete(figures: Measured, load: Load) -> None:
    if figures.completed != load.num_prompts:
        raise RuntimeError(f"{figures.completed} of {load.num_prompts} requests of {load.name!r} were answered")


def _tables(results: Mapping[str, Any]) -> Iterator[str]:
    yield "| load | native tok/s | elastic tok/s | ratio | native TPOT ms | elastic TPOT ms | ratio | goal |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, result in results.items():
        for load, runs in result["loads"].items():
            yield f"{_row(f'{name}, {load}', runs, '')} {_verdict(runs)} |"
            if "elastic, grown" in runs:
                yield f"{_row(f'{name}, {load}, grown', runs, ', grown')} - |"
    if any("ttft" in result for result in results.values()):
        yield from ("", *ttft.HEAD)
        for name, result in results.items():
            yield from ttft.table(name, result["ttft"])
    yield from (
        "",
        "| idle KV footprint | at start MiB | after load and reset MiB | goal |",
        "| --- | --- | --- | --- |",
    )
    for name, result in results.items():
        start_bytes, after = result["idle_bytes"], result["idle_bytes_after_load"]
        verdict = "met" if max(start_bytes, after) <= IDLE_GOAL_BYTES else "missed"
        yield f"| {name} | {start_bytes >> 20} | {after >> 20} | {IDLE_GOAL_BYTES >> 20}: {verdict} |"


def _row(name: str, runs: Mapping[str, list[dict[str, float]]], kind: str) -> str:
    cells = []
    for metric in METRICS:
        native, elastic = ([run[metric] for run in runs[mode + kind]] for mode in ("native", "elastic"))
        cells += [spread(native), spread(elastic), f"{_ratio(runs, metric, kind):.3f}"]
    return f"| {name} | {' | '.join(cells)} |"


def _verdict(runs: Mapping[str, list[dict[str, float]]]) -> str:
    throughput, tpot = (_ratio(runs, metric) for metric in METRICS)
    return "met" if throughput >= THROUGHPUT_GOAL and tpot <= TPOT_GOAL else "missed"


def _ratio(runs: Mapping[str, list[dict[str, float]]], metric: str, kind: str = "") -> float:
    native, elastic = (statistics.median(run[metric] for run in runs[mode + kind]) for mode in ("native", "elastic"))
    return elastic / native


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser)
    add_layout_argument(parser)
    parser.add_argument("--ttft", action="store_true", help="also the first token of a 16k-token prompt")
    parser.add_argument("--rounds", type=int, default=1, help="of native, elastic, elastic, native")
    parser.add_argument("--out", type=Path, required=True)
    return parser


if __name__ == "__main__":
    sys.exit(main())
