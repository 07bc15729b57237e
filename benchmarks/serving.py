"""What the serving benchmarks share: servers of an 8B shape, and load from the engines' own benchmark programs."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from kvcached_core.config import Settings

from tests.e2e.client import MODEL, Client
from tests.e2e.engines import ENGINES, Installed
from tests.e2e.readings import Nvml
from tests.e2e.server import Server, free_port
from tests.models.families import make_shape

ROOT = Path(__file__).resolve().parent.parent
START_DEADLINE_SECONDS = 240
LOAD_DEADLINE_SECONDS = 300

KV_BYTES = 8 << 30
"""Of one server: two engines, each native and elastic, start and stay on one card side by side."""
TOKEN_BYTES = 128 << 10  # 32 layers, 8 KV heads of 128, keys and values in bfloat16
CONTEXT_TOKENS = 20480

# At one token an event the benchmark's own process is what is measured: 128 streams are 10,000 events a second.
EVENTS = ("--stream-interval", "16")
VLLM_FLAGS = (
    *EVENTS,
    *("--load-format", "dummy", "--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "256"),
    *("--gpu-memory-utilization", "0.22", "--kv-cache-memory-bytes", str(KV_BYTES)),
)
SGLANG_FLAGS = (
    *EVENTS,
    *("--load-format", "dummy", "--context-length", str(CONTEXT_TOKENS), "--max-running-requests", "256"),
    # It measures what is free before and after loading, while the others load: the token limit is what counts.
    *("--mem-fraction-static", "0.85", "--max-total-tokens", str(KV_BYTES // TOKEN_BYTES)),
)
FLAGS: Mapping[str, tuple[str, ...]] = {"vllm": VLLM_FLAGS, "sglang": SGLANG_FLAGS}


@dataclass(frozen=True)
class Load:
    """Requests of one size, with so many at a time.

    Attributes:
        grown: Measured also without a reset before.
    """

    name: str
    num_prompts: int
    input_tokens: int
    output_tokens: int
    concurrency: int
    grown: bool = False


@dataclass(frozen=True)
class Measured:
    """What the engine's own benchmark program reported of one load."""

    seconds: float
    completed: int
    total_tokens_per_second: float
    output_tokens_per_second: float
    mean_tpot_ms: float
    median_tpot_ms: float
    median_ttft_ms: float
    p99_ttft_ms: float


@dataclass(frozen=True)
class Side:
    """One running server of a comparison."""

    name: str
    installed: Installed
    server: Server
    model: Path

    def reset(self) -> None:
        """Drop the prefix cache, so that no run profits from one before it.

        Raises:
            RuntimeError: The server refused.
        """
        if not self.installed.engine.reset(Client(self.server.port)):
            raise RuntimeError(f"{self.name} refused to reset its prefix cache; see {self.server.log}")


class BenchmarkClient:
    """The engine's own benchmark program in a process of its own, ready for one load after the other.

    Use it as a context manager. It starts at once and takes jobs when it has imported its engine.
    """

    def __init__(self, installed: Installed, log: Path) -> None:
        self.installed = installed
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                (installed.python, "-m", "benchmarks.serving_client", installed.engine.name),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
            )
        self._ready = False

    def __enter__(self) -> BenchmarkClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def wait_ready(self) -> None:
        """Wait until it takes jobs.

        Raises:
            RuntimeError: It ended before.
        """
        if not self._ready:
            self._expect("ready", self._log)
            self._ready = True

    def run(self, side: Side, load: Load, seed: int, scratch: Path) -> dict[str, Any]:
        """Send one load to one server and wait for its end; the program's own report.

        Raises:
            RuntimeError: It failed; the message says where its log is.
        """
        self.wait_ready()
        result = scratch / f"{side.name}-{load.name}-{seed}.json"
        result.unlink(missing_ok=True)
        log = result.with_suffix(".log")
        argv = _BENCH[self.installed.engine.name](side, load, seed, result)
        assert self._process.stdin is not None
        print(json.dumps({"argv": argv, "log": str(log)}), file=self._process.stdin, flush=True)
        self._expect("done", log)
        report: dict[str, Any] = json.loads(result.read_text().splitlines()[-1])
        return report

    def _expect(self, word: str, log: Path) -> None:
        assert self._process.stdout is not None
        timer = threading.Timer(LOAD_DEADLINE_SECONDS, self._process.kill)
        timer.start()
        try:
            answer = self._process.stdout.readline().strip()
        finally:
            timer.cancel()
        if answer != word:
            raise RuntimeError(f"the benchmark program ended, or took over {LOAD_DEADLINE_SECONDS} s; see {log}")


def vllm_bench(side: Side, load: Load, seed: int, result: Path) -> list[str]:
    """Command line of ``vllm bench serve``."""
    return [
        *("vllm", "bench", "serve", "--backend", "vllm"),
        *("--base-url", f"http://127.0.0.1:{side.server.port}", "--model", MODEL, "--tokenizer", str(side.model)),
        *("--dataset-name", "random", "--random-input-len", str(load.input_tokens)),
        *("--random-output-len", str(load.output_tokens), "--random-range-ratio", "0", "--ignore-eos"),
        *("--num-prompts", str(load.num_prompts), "--max-concurrency", str(load.concurrency), "--seed", str(seed)),
        *("--save-result", "--save-detailed", "--result-dir", str(result.parent), "--result-filename", result.name),
        *("--percentile-metrics", "ttft,tpot", "--metric-percentiles", "50,99", "--disable-tqdm"),
    ]


def sglang_bench(side: Side, load: Load, seed: int, result: Path) -> list[str]:
    """Command line of ``python -m sglang.bench_serving``."""
    return [
        *("bench_serving", "--backend", "sglang", "--host", "127.0.0.1"),
        *("--port", str(side.server.port), "--model", str(side.model), "--served-model-name", MODEL),
        *("--dataset-name", "random-ids", "--random-input-len", str(load.input_tokens)),
        *("--random-output-len", str(load.output_tokens), "--random-range-ratio", "1"),
        *("--num-prompts", str(load.num_prompts), "--max-concurrency", str(load.concurrency), "--seed", str(seed)),
        *("--output-file", str(result), "--disable-tqdm", "--warmup-requests", "0", "--tokenize-prompt"),
    ]


_BENCH: Mapping[str, Callable[[Side, Load, int, Path], list[str]]] = {"vllm": vllm_bench, "sglang": sglang_bench}


def measured(report: Mapping[str, Any]) -> Measured:
    """The figures of either program's report; they share most names."""
    total = report.get("total_token_throughput", report.get("total_throughput"))
    if total is None:
        raise ValueError(f"no total throughput in the benchmark's result, which has {sorted(report)}")
    return Measured(
        seconds=report["duration"],
        completed=report["completed"],
        total_tokens_per_second=total,
        output_tokens_per_second=report["output_throughput"],
        mean_tpot_ms=report["mean_tpot_ms"],
        median_tpot_ms=report["median_tpot_ms"],
        median_ttft_ms=report["median_ttft_ms"],
        p99_ttft_ms=report["p99_ttft_ms"],
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """``--vllm PYTHON`` and ``--sglang PYTHON``."""
    for name in ENGINES:
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"interpreter of an environment with {name}")


def add_layout_argument(parser: argparse.ArgumentParser) -> None:
    """``--sglang-layout``, of SGLang's elastic servers; `layout_settings` has what it means."""
    layouts = get_args(Settings.model_fields["layout"].annotation)
    parser.add_argument("--sglang-layout", choices=layouts, default="auto", help="KVCACHED_LAYOUT of SGLang's servers")


def layout_settings(arguments: argparse.Namespace, engine: str) -> dict[str, str]:
    """What `start` is to set for an elastic server of this engine; vLLM's layout is not ours to set."""
    return {"LAYOUT": arguments.sglang_layout} if engine == "sglang" else {}


def engines_named(arguments: argparse.Namespace) -> list[Installed]:
    """Every engine whose interpreter was given."""
    return [Installed.find(engine, python) for name, engine in ENGINES.items() if (python := getattr(arguments, name))]


def start(
    installed: Installed, name: str, out: Path, *, elastic: bool, flags: Sequence[str] = (), **settings: str
) -> Side:
    """Start one 8B-shape server; it is not ready yet.

    Args:
        name: Of its log, and of its member in the ledger.
        settings: ``KVCACHED_*`` of an elastic server, without the prefix.
    """
    model = out / "models" / "8b"
    if not (model / "config.json").exists():
        make_shape(model)
    port = free_port()
    engine = installed.engine
    command = engine.command(installed.python, model, port, (*FLAGS[engine.name], *flags))
    variables = dict(engine.variables)
    if elastic:
        ours = {"NAME": name, "STRICT": "1", "RUNTIME_DIR": str(runtime_dir(out)), **settings}
        variables |= {"ENABLE_KVCACHED": "1", **{f"KVCACHED_{key}": value for key, value in ours.items()}}
    log = out / "logs" / f"{name}.log"
    return Side(name, installed, Server(name, command, variables, port=port, log=log, cwd=ROOT), model)


def wait_ready(sides: Iterable[Side]) -> dict[str, float]:
    """Wait for every server; seconds each took to start."""
    return {
        side.name: side.server.wait_ready(side.installed.engine.health_path, deadline_seconds=START_DEADLINE_SECONDS)
        for side in sides
    }


def runtime_dir(out: Path) -> Path:
    """The ledgers' directory of one benchmark."""
    path = out / "ledger"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def setup(*installed: Installed) -> dict[str, str]:
    """What a result has to say about where it was measured."""
    engines = ", ".join(f"{each.engine.name} {each.release}" for each in installed)
    return {**Nvml().description(), "engines": engines, "shape": "Llama-3.1-8B, dummy weights, bfloat16"}


def spread(values: Sequence[float]) -> str:
    """``"812 (809 to 815)"``: the median and the range of repeated measurements."""
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def write(out: Path, name: str, document: Mapping[str, Any], table: Iterable[str]) -> None:
    """Write ``name.json`` and ``name.md``, and print the table."""
    lines = list(table)
    (out / f"{name}.json").write_text(json.dumps(document, indent=1))
    (out / f"{name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)
