"""Real SGLang engines in processes of their own, told by a test what to do."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvcached_core.ledger import Ledger
from kvcached_core.ledger_statistics import MemberStatistics

from tests.models.text import VOCABULARY_SIZE
from tests.sglang.conftest import STUBS

KIB = 1 << 10
MIB = 1 << 20
START_SECONDS = 270
ANSWER_SECONDS = 270

Prompt = list[int]

QUIET = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "PYTHONFAULTHANDLER": "1",
    # SGLang's own checks, at every step: no page is lost, none is free twice, none is free and in use.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    # Two ranks on one CPU, a core each.
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
}
"""Of every engine here, so that a native and an elastic one differ in nothing else."""

FLAGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "disable_custom_all_reduce": True,
    "random_seed": 0,
    "log_level": "info",
    "mem_fraction_static": 0.9,
    "max_running_requests": 16,
    "chunked_prefill_size": 512,
    "max_prefill_tokens": 512,
    "watchdog_timeout": 240,
}


class EngineDied(Exception):
    """An engine's process ended, or did not answer in time; with the end of its log."""


@dataclass(frozen=True)
class Result:
    """What one request came to."""

    tokens: list[int]
    finish: str
    message: str
    cached: int
    retractions: int


class Remote:
    """A process that does what it is told, over a socket of JSON lines.

    Args:
        program: Its command line; the socket's number and JSON arguments follow.
        arguments: Each passed as JSON.
        log: File for what it prints.
        environment: Of the process.
    """

    def __init__(
        self, program: Sequence[str], arguments: Sequence[Any], log: Path, environment: Mapping[str, str]
    ) -> None:
        self.log = log
        ours, theirs = socket.socketpair()
        with theirs, log.open("w") as output:
            self.process = subprocess.Popen(
                [*program, str(theirs.fileno()), *map(json.dumps, arguments)],
                pass_fds=[theirs.fileno()],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._channel = ours
        self._lines = ours.makefile("rw")

    def wait_ready(self) -> Self:
        assert self.answer(START_SECONDS) == "ready"
        return self

    def ask(self, command: str, **arguments: Any) -> None:
        """Begin something; `answer` waits for its end."""
        print(json.dumps([command, arguments]), file=self._lines, flush=True)

    def answer(self, deadline_seconds: float = ANSWER_SECONDS) -> Any:
        self._channel.settimeout(deadline_seconds)
        try:
            line = self._lines.readline()
        except (TimeoutError, ConnectionError) as error:
            raise EngineDied(f"no answer ({error}){self._tail()}") from error
        if not line:
            raise EngineDied(f"it ended with {self.process.wait(30)}{self._tail()}")
        return json.loads(line)

    def do(self, command: str, **arguments: Any) -> Any:
        self.ask(command, **arguments)
        return self.answer()

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> None:
        """Let it end in order; nothing of it is left afterwards."""
        self._hang_up()
        try:
            self.process.wait(60)
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL to everything of it. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        self._hang_up()

    def _hang_up(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # what was not sent yet
            self._lines.close()
        self._channel.close()

    def _tail(self) -> str:
        return "\n  ".join(["; the end of its log:", *self.log_text().splitlines()[-40:]])


class Engine(Remote):
    """One SGLang engine: its main process and what that starts.

    Args:
        model: Folder of the model.
        log: File for what it prints.
        settings: ``KVCACHED_*`` and others for its environment; None: the stock engine.
        ranks: More settings, of each rank.
        extra: More of the environment, also of the stock engine.
        python_path: Before everything else on its ``PYTHONPATH``.
        flags: Of ``sglang.Engine``.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        settings: Mapping[str, str] | None,
        *,
        ranks: Sequence[Mapping[str, str]] = (),
        extra: Mapping[str, str] | None = None,
        python_path: Sequence[Path] = (),
        **flags: Any,
    ) -> None:
        path = os.pathsep.join(map(str, [*python_path, *filter(None, [os.environ.get("PYTHONPATH")]), STUBS]))
        switch = {"ENABLE_KVCACHED": str(int(settings is not None)), "PYTHONPATH": path}
        super().__init__(
            [sys.executable, "-m", "tests.sglang.engine_process"],
            [FLAGS | {"model_path": str(model)} | flags, [dict(each) for each in ranks]],
            log,
            _without_settings() | QUIET | dict(extra or {}) | dict(settings or {}) | switch,
        )

    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[Result]:
        """Run all at once, greedily, to exactly so many tokens."""
        return [Result(**each) for each in self.do("generate", prompts=prompts, max_tokens=max_tokens)]


class VllmNeighbour(Remote):
    """One vLLM engine, in the environment of its own tests.

    Args:
        python: Its environment's interpreter.
        settings: ``KVCACHED_*`` for its environment.
        flags: Of ``vllm.LLM``.
    """

    def __init__(self, python: str, model: Path, log: Path, settings: Mapping[str, str], **flags: Any) -> None:
        plain = {"model": str(model), "dtype": "float32", "block_size": 32, "enforce_eager": True, "seed": 0}
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        super().__init__(
            [python, "-m", "tests.vllm.engine_process"],
            [plain | {"skip_tokenizer_init": True, "disable_log_stats": False} | flags],
            log,
            _without_settings() | environment | dict(settings) | {"ENABLE_KVCACHED": "1", "OMP_NUM_THREADS": "1"},
        )

    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
        """Run all at once, greedily, to exactly so many tokens."""
        return [each["tokens"] for each in self.do("generate", prompts=prompts, max_tokens=max_tokens)]


def together(engines: Sequence[Engine], prompts: Sequence[Prompt], max_tokens: int) -> list[list[Result]]:
    """Every engine's results for the same prompts; the engines work at the same time."""
    for engine in engines:
        engine.ask("generate", prompts=prompts, max_tokens=max_tokens)
    return [[Result(**each) for each in engine.answer()] for engine in engines]


def prompts(count: int, num_tokens: int, *, seed: int, shared: int = 0) -> list[Prompt]:
    """Different prompts of the same length that begin with the same so many tokens."""
    pick = random.Random(seed)
    head = [pick.randrange(10, VOCABULARY_SIZE) for _ in range(shared)]
    return [head + [pick.randrange(10, VOCABULARY_SIZE) for _ in range(num_tokens - shared)] for _ in range(count)]


def members(ledger: Ledger, name: str) -> list[MemberStatistics]:
    """The slots of this name, by rank."""
    return sorted((each for each in ledger.snapshot().members if each.name == name), key=lambda each: each.rank)


def until(condition: Callable[[], bool], what: str, deadline_seconds: float = 20.0) -> float:
    """Seconds until a condition held, looked at every 2 ms."""
    started = time.perf_counter()
    while not condition():
        waited = time.perf_counter() - started
        assert waited < deadline_seconds, f"{what}: not within {deadline_seconds} s"
        time.sleep(0.002)
    return time.perf_counter() - started


def resident_of_arenas(pid: int) -> int:
    """Bytes of a process's arenas that are really there, as the kernel counts them.

    Nothing else of it is marked not to be inherited (``dc``, from ``MADV_DONTFORK``).
    """
    total = resident = 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if line.startswith("Rss:"):
            resident = int(line.split()[1]) * KIB
        elif line.startswith("VmFlags:") and "dc" in line.split():
            total += resident
    return total


def _without_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if "KVCACHED" not in name}
