"""The elastic pair: two servers on one device, each in turn needing more than its half.

    python -m tests.e2e.pair --vllm PYTHON --sglang PYTHON --out build/pair
    python -m tests.e2e.pair --vllm PYTHON --cpu --out build/pair-cpu

Server A is vLLM with a GQA model, B is SGLang with a linear-attention hybrid (on a CPU: vLLM with a sliding-window
model). Both have the same ceiling, and together they can have no more: on a large GPU a third process takes the rest
with one plain allocation, so the driver itself has no more to give. Loads are sized from a calibration to need 70 % of
what is free. Each phase's memory is read four times a second, in the ledger and in the driver.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.ballast import ballast
from tests.e2e.checks import CRASHED, IDLE_FOOTPRINT_BYTES, Check, Outcome
from tests.e2e.client import Answer, Client
from tests.e2e.engines import ENGINES, SGLANG, VLLM, Engine, Installed
from tests.e2e.phases import Prompts
from tests.e2e.readings import Nvml, Readings, statistics, withheld_bytes
from tests.e2e.report import summary
from tests.e2e.run import ERROR_SIGNATURES, EXIT_DEADLINE_SECONDS
from tests.e2e.server import Server, free_port, kill_all_and_interrupt
from tests.models.families import make_model
from tests.models.text import document

ROOT = Path(__file__).resolve().parents[2]
LOAD_SHARE = 0.7
SAMPLE_SECONDS = 0.25
RELEASE_DEADLINE_SECONDS = 15


@dataclass(frozen=True)
class Role:
    """One of the two servers."""

    name: str
    engine: Engine
    family: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Scale:
    """How large the experiment is.

    Attributes:
        ceiling_bytes: Of each server, and of both together.
        prompt_words, output_tokens: Of one request of a load.
        probe_tokens: Of one greedy probe.
        calibration_requests: Enough for the cache to grow by several extents.
    """

    ceiling_bytes: int
    prompt_words: int
    output_tokens: int
    probe_tokens: int
    calibration_requests: int
    variables: Mapping[str, str] = field(default_factory=dict)


GPU_SCALE = Scale(8 << 30, 3000, 1024, 64, 16)
CPU_SCALE = Scale(96 << 20, 300, 24, 16, 40, {"VLLM_CPU_OMP_THREADS_BIND": "0", "OMP_NUM_THREADS": "1"})

GPU_ROLES = (
    Role("A", VLLM, "gqa", ("--max-num-seqs", "128", "--gpu-memory-utilization", "0.2")),
    Role(
        "B",
        SGLANG,
        "linear",
        ("--max-running-requests", "128", "--mem-fraction-static", "0.3", "--max-mamba-cache-size", "640"),
    ),
)
CPU_ROLES = tuple(
    Role(name, VLLM, family, ("--max-num-seqs", "16", "--kv-cache-memory-bytes", str(1 << 30), "--enforce-eager"))
    for name, family in (("A", "gqa"), ("B", "swa"))
)


class Timeline:
    """Both servers' memory over time, read in the background."""

    def __init__(self, readings: Mapping[str, Readings], nvml: Nvml, runtime_dir: Path) -> None:
        self.phase = "start"
        self._runtime_dir = runtime_dir
        self.samples: list[dict[str, Any]] = []
        self._readings = readings
        self._nvml = nvml
        self._started = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="timeline")

    def __enter__(self) -> Timeline:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def peak(self, phase: str, name: str) -> dict[str, Any]:
        """The sample of a phase at which this server held most."""
        return max((s for s in self.samples if s["phase"] == phase), key=lambda sample: sample[name])

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            sample: dict[str, Any] = {"seconds": time.monotonic() - self._started, "phase": self.phase}
            sample |= {name: reading.take()["resident_bytes"] for name, reading in self._readings.items()}
            sample["grantable_bytes"] = statistics(self._runtime_dir).unleased_bytes
            self.samples.append(sample | {"driver_free_bytes": self._nvml.free_bytes()})


class Pair:
    """The two running servers and what is asked of them."""

    def __init__(
        self, roles: Sequence[Role], servers: Mapping[str, Server], readings: Mapping[str, Readings], scale: Scale
    ) -> None:
        self._engines = {role.name: role.engine for role in roles}
        self._clients = {name: Client(server.port, timeout_seconds=600) for name, server in servers.items()}
        self._readings = readings
        self._scale = scale
        self.num_requests: dict[str, int] = {}
        self.request_bytes: dict[str, int] = {}

    def calibrate(self, name: str) -> None:
        """Find how many distinct requests need ``LOAD_SHARE`` of what is free.

        Raises:
            RuntimeError: The cache did not grow under the calibration's load.
        """
        count = self._scale.calibration_requests
        idle = self.reset(name)
        self.load(name, "calibration", count)
        grown = self._readings[name].take()["resident_bytes"] - idle
        if grown < count:
            raise RuntimeError(f"{count} requests made {name} grow from {idle >> 20} MiB by {grown} bytes")
        self.request_bytes[name] = grown // count
        self.num_requests[name] = math.ceil(LOAD_SHARE * self._scale.ceiling_bytes / self.request_bytes[name])
        self.reset(name)

    def load(self, name: str, seed: str, num_requests: int | None = None) -> list[Answer]:
        """Distinct long prompts, all at once; the engine queues what is beyond its batch limit."""
        count = num_requests or self.num_requests[name]
        prompts: Prompts = [
            (f"{seed}{n}", document(self._scale.prompt_words, f"{name} {seed} {n}")) for n in range(count)
        ]
        return self._clients[name].complete_all(prompts, self._scale.output_tokens)

    def load_both(self, seed: str) -> dict[str, list[Answer]]:
        with ThreadPoolExecutor(len(self._clients)) as pool:
            loads = {name: pool.submit(self.load, name, seed) for name in self._clients}
        return {name: load.result() for name, load in loads.items()}

    def probe(self, name: str) -> list[Answer]:
        """Four greedy completions, one at a time, from an empty cache."""
        self.reset(name)
        client, words = self._clients[name], (10, 40, 200, 400)
        return [client.complete(f"probe{n}", document(n, f"probe {n}"), self._scale.probe_tokens) for n in words]

    def reset(self, name: str) -> int:
        """Drop the prefix cache and wait for the memory; bytes resident then."""
        before = self._readings[name].take()["resident_bytes"]
        self._engines[name].reset(self._clients[name])
        settled = self._readings[name].settle(below_bytes=before, deadline_seconds=RELEASE_DEADLINE_SECONDS)
        return int(settled["resident_bytes"])


def run_pair(pair: Pair, timeline: Timeline, squeeze: Callable[[], None]) -> dict[str, Any]:
    """Every phase in order; what was answered, and what was resident after each reset.

    Args:
        squeeze: Takes the rest of the device. Called after the calibration, in which both engines have allocated what
            they need beside their caches.
    """
    record: dict[str, Any] = {"answers": {}, "resident_after": {}, "phase_seconds": {}}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        timeline.phase, started = name, time.monotonic()
        yield
        time.sleep(2 * SAMPLE_SECONDS)
        record["phase_seconds"][name] = round(time.monotonic() - started, 1)
        timeline.phase = "between"
        print(f"{record['phase_seconds'][name]:6.1f} s  {name}", flush=True)

    with phase("calibrate"):
        for name in ("A", "B"):
            pair.calibrate(name)
    squeeze()
    with phase("probe_before"):
        record["probes_before"] = {name: pair.probe(name) for name in ("A", "B")}
    for name in ("A", "B"):
        with phase(f"{name}_reset_before"):
            pair.reset(name)
        with phase(f"{name}_loaded"):
            record["answers"][f"{name}_loaded"] = {name: pair.load(name, "load")}
        with phase(f"{name}_reset"):
            record["resident_after"][name] = pair.reset(name)
    with phase("contended"):
        record["answers"]["contended"] = pair.load_both("contended")
    with phase("probe_after"):
        record["probes_after"] = {name: pair.probe(name) for name in ("A", "B")}
    return record


def check_pair(record: dict[str, Any], timeline: Timeline, ceiling_bytes: int) -> Iterator[Check]:
    """What the pair has to show."""

    def check(name: str, holds: bool, detail: str = "", of: str = "both") -> Check:
        return Check(name, of, Outcome.PASS if holds else Outcome.FAIL, detail)

    for phase, answers in record["answers"].items():
        for name, ours in answers.items():
            errors = [f"{answer.prompt}: {answer.error}" for answer in ours if answer.error]
            detail = f"{len(ours) - len(errors)} of {len(ours)}; {'; '.join(errors[:2])}".rstrip("; ")
            yield check(f"{phase}_requests_ok", not errors, detail, name)
    a_peak, b_peak = timeline.peak("A_loaded", "A"), timeline.peak("B_loaded", "B")
    free = a_peak["grantable_bytes"]
    filled = f"{a_peak['A'] >> 20} MiB of {ceiling_bytes >> 20}"
    yield check("filled_memory", a_peak["A"] >= 0.9 * LOAD_SHARE * ceiling_bytes, filled, "A")
    after = record["resident_after"]["A"]
    released = after <= max(IDLE_FOOTPRINT_BYTES, 0.05 * a_peak["A"])
    yield check("released_memory", released, f"{after >> 20} MiB after the reset", "A")
    detail = f"{b_peak['B'] >> 20} MiB; {free >> 20} were free at A's peak"
    yield check("used_memory_past_what_was_free", b_peak["B"] - a_peak["B"] > free, detail, "B")
    for name, before in record["probes_before"].items():
        pairs = zip(before, record["probes_after"][name], strict=True)
        same = sum(bool(one.tokens) and one.tokens == other.tokens for one, other in pairs)
        yield check("probes_unchanged", same == len(before), f"{same} of {len(before)}", name)


def main(words: Sequence[str] | None = None) -> int:
    """Run the pair; 0 when every check passed."""
    arguments = _parser().parse_args(words)
    scale, roles = (CPU_SCALE, CPU_ROLES) if arguments.cpu else (GPU_SCALE, GPU_ROLES)
    out: Path = arguments.out.resolve()
    runtime_dir = out / "ledger"
    runtime_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    installed = {role.name: Installed.find(role.engine, getattr(arguments, role.engine.name)) for role in roles}
    nvml = Nvml()
    checks: list[Check] = []
    with ExitStack() as stack:
        servers = {
            role.name: stack.enter_context(_start(role, installed[role.name], scale, out, arguments.models))
            for role in roles
        }
        readings = {name: Readings(server, runtime_dir, name) for name, server in servers.items()}
        for role in roles:
            seconds = servers[role.name].wait_ready(role.engine.health_path, deadline_seconds=300)
            checks.append(Check("server_ready", role.name, Outcome.PASS, f"{seconds:.0f} s"))
        pair = Pair(roles, servers, readings, scale)
        timeline = stack.enter_context(Timeline(readings, nvml, runtime_dir))

        def squeeze() -> None:
            held = sum(reading.take()["resident_bytes"] for reading in readings.values())
            left = scale.ceiling_bytes - held + withheld_bytes(runtime_dir)
            stack.enter_context(ballast(nvml, left, installed["A"].python))

        record = run_pair(pair, timeline, squeeze)
        checks += check_pair(record, timeline, scale.ceiling_bytes)
        checks += [check for role in roles for check in _end(role.name, servers[role.name], readings[role.name])]
    setup = {
        **nvml.description(),
        **{role.name: f"{role.engine.name} {installed[role.name].release}, {role.family}" for role in roles},
        "ceiling": f"{scale.ceiling_bytes >> 20} MiB each, and no more for both together",
        "requests": ", ".join(f"{name} {count}" for name, count in pair.num_requests.items()),
        "MiB a request": ", ".join(f"{name} {count >> 20}" for name, count in pair.request_bytes.items()),
    }
    commands = {
        role.name: role.engine.command("python3", Path("models") / role.family, 8000, role.flags) for role in roles
    }
    _write(out, setup, checks, record, timeline, commands)
    print(f"{out / 'pair.md'}: {summary(checks)}", flush=True)
    return int(any(check.outcome is Outcome.FAIL for check in checks))


def _start(role: Role, installed: Installed, scale: Scale, out: Path, models: Path) -> Server:
    make_model(role.family, models / role.family, num_layers=6 if scale is CPU_SCALE else None)
    port = free_port()
    ours = {
        "ENABLE_KVCACHED": "1",
        "KVCACHED_STRICT": "1",
        "KVCACHED_NAME": role.name,
        "KVCACHED_CEILING": str(scale.ceiling_bytes),
        "KVCACHED_RUNTIME_DIR": str(out / "ledger"),
    }
    if scale is CPU_SCALE:
        ours["KVCACHED_HOST_BUDGET"] = str(scale.ceiling_bytes)
    command = role.engine.command(installed.python, models / role.family, port, role.flags)
    variables = {**role.engine.variables, **scale.variables, **ours}
    return Server(role.name, command, variables, port=port, log=out / "logs" / f"{role.name}.log", cwd=ROOT)


def _end(name: str, server: Server, readings: Readings) -> Iterator[Check]:
    yield Check("server_alive_after_load", name, Outcome.PASS if server.alive else Outcome.FAIL)
    ended = server.interrupt(deadline_seconds=EXIT_DEADLINE_SECONDS)
    # SGLang ends its own process tree, itself last, with SIGKILL: there is no native run here to tell what is usual.
    clean = not ended.left and ended.code is not None and ended.code not in CRASHED
    detail = f"code {ended.code} after {ended.seconds:.1f} s"
    yield Check("clean_exit_on_signal", name, Outcome.PASS if clean else Outcome.FAIL, detail)
    found = ERROR_SIGNATURES.search(server.log_text())
    yield Check("no_error_signatures", name, Outcome.FAIL if found else Outcome.PASS, found.group(0) if found else "")
    left = readings.members_named()
    yield Check("ledger_empty_after_exit", name, Outcome.FAIL if left else Outcome.PASS, ", ".join(left))


def _write(
    out: Path,
    setup: Mapping[str, str],
    checks: Sequence[Check],
    record: dict[str, Any],
    timeline: Timeline,
    commands: Mapping[str, Sequence[str]],
) -> None:
    document = {
        "setup": dict(setup),
        "commands": {name: list(command) for name, command in commands.items()},
        "checks": [asdict(check) | {"outcome": check.outcome.value} for check in checks],
        **record,
        "answers": {
            phase: {name: [_without_tokens(answer) for answer in ours] for name, ours in answers.items()}
            for phase, answers in record["answers"].items()
        },
        "timeline": timeline.samples,
    }
    (out / "pair.json").write_text(json.dumps(document, default=Answer.as_json))
    lines = ["# Elastic pair", "", summary(checks) + ".", "", "## Set-up", ""]
    lines += [f"- {name}: {value}" for name, value in setup.items()]
    lines += ["", "## Checks", "", "| check | of | outcome | detail |", "| --- | --- | --- | --- |"]
    ordered = sorted(checks, key=lambda check: check.outcome is not Outcome.FAIL)
    lines += [f"| {check.name} | {check.of} | {check.outcome.value} | {check.detail} |" for check in ordered]
    lines += ["", "## Memory, phase by phase", ""]
    lines += [
        "| phase | seconds | A at most, MiB | B at most, MiB | at the end A, B | free in the driver at least, MiB |"
    ]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for phase, seconds in record["phase_seconds"].items():
        samples = [sample for sample in timeline.samples if sample["phase"] == phase]
        most = [max(sample[name] for sample in samples) >> 20 for name in ("A", "B")]
        free = [sample["driver_free_bytes"] for sample in samples if sample["driver_free_bytes"] is not None]
        last = f"{samples[-1]['A'] >> 20}, {samples[-1]['B'] >> 20}"
        lines.append(f"| {phase} | {seconds} | {most[0]} | {most[1]} | {last} | {min(free) >> 20 if free else '-'} |")
    (out / "pair.md").write_text("\n".join(lines) + "\n")


def _without_tokens(answer: Answer) -> dict[str, Any]:
    """Of the loads only how it went is kept: they are megabytes, and the probes show that the tokens are right."""
    kept = answer.as_json()
    return {**kept, "tokens": len(kept["tokens"]), "text": ""}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ENGINES:
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"interpreter of an environment with {name}")
    parser.add_argument("--cpu", action="store_true", help="two vLLM CPU servers on a small host budget")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path("/tmp/kvcached-models"))
    return parser


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, kill_all_and_interrupt)
    sys.exit(main())
