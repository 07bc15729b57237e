"""Real vLLM engines in processes of their own, told by a test what to do."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcached_core.ledger import Ledger
from kvcached_core.ledger_statistics import MemberStatistics

from tests.models.text import VOCABULARY_SIZE

MIB = 1 << 20
START_SECONDS = 240
ANSWER_SECONDS = 240

Prompt = list[int]

QUIET = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}
"""Of every engine here, so that a native and an elastic one have the same process layout and threads."""


class EngineDied(Exception):
    """An engine's process ended, or did not answer in time; with the end of its log."""


@dataclass(frozen=True)
class Result:
    """What one request came to."""

    tokens: list[int]
    finish: str
    cached: int


class Engine:
    """One engine's process.

    Args:
        model: Folder of the model.
        log: File for what it prints.
        settings: ``KVCACHED_*`` and what goes with them; None: the stock engine.
        environ: Other variables of its environment.
        flags: Of ``vllm.LLM``.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        settings: Mapping[str, str] | None,
        environ: Mapping[str, str] | None = None,
        **flags: Any,
    ) -> None:
        self.log = log
        self.elastic = settings is not None
        arguments = {
            "model": str(model),
            "dtype": "float32",
            "block_size": 32,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
            "seed": 0,
            **flags,
        }
        ours, theirs = socket.socketpair()
        with theirs, log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.engine_process", str(theirs.fileno()), json.dumps(arguments)],
                pass_fds=[theirs.fileno()],
                env={
                    **_without_settings(),
                    **QUIET,
                    **(environ or {}),
                    **(settings or {}),
                    "ENABLE_KVCACHED": str(int(self.elastic)),
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._channel = ours
        self._lines = ours.makefile("rw")

    def wait_ready(self) -> Engine:
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

    def at_work(self) -> bool:
        """Whether what was asked has not come to its end yet."""
        return not select.select([self._channel], [], [], 0)[0]

    def do(self, command: str, **arguments: Any) -> Any:
        self.ask(command, **arguments)
        return self.answer()

    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[Result]:
        """Run all at once, greedily, to exactly so many tokens."""
        return [Result(**each) for each in self.do("generate", prompts=prompts, max_tokens=max_tokens)]

    def num_preemptions(self) -> int:
        return int(self.do("metrics")["vllm:num_preemptions"])

    def cpu_seconds(self) -> float:
        """Processor time of its main process, user's and system's. Source: proc_pid_stat(5)."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> None:
        """Let it end in order; nothing of it is left afterwards."""
        self._close()
        try:
            assert self.process.wait(30) == 0, f"it ended with {self.process.returncode}{self._tail()}"
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL to everything of it. Idempotent."""
        self._close()
        with suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def _close(self) -> None:
        self._lines.close()
        self._channel.close()

    def _tail(self) -> str:
        return "\n  ".join(["; the end of its log:", *self.log_text().splitlines()[-30:]])


def together(engines: Sequence[Engine], prompts: Sequence[Prompt], max_tokens: int) -> list[list[list[int]]]:
    """Every engine's tokens for the same prompts; the engines work at the same time."""
    for engine in engines:
        engine.ask("generate", prompts=prompts, max_tokens=max_tokens)
    return [[each["tokens"] for each in engine.answer()] for engine in engines]


def prompts(count: int, num_tokens: int, *, seed: int, shared: int = 0) -> list[Prompt]:
    """Different prompts of the same length that begin with the same so many tokens."""
    pick = random.Random(seed)
    head = [pick.randrange(10, VOCABULARY_SIZE) for _ in range(shared)]
    return [head + [pick.randrange(10, VOCABULARY_SIZE) for _ in range(num_tokens - shared)] for _ in range(count)]


def member(ledger: Ledger, name: str) -> MemberStatistics:
    """The only member of this name (the first rank's slot where it has several)."""
    return next(each for each in ledger.snapshot().members if each.name == name)


def until(condition: Callable[[], bool], what: str, deadline_seconds: float = 20.0) -> float:
    """Seconds until a condition held, looked at every 2 ms."""
    started = time.perf_counter()
    while not condition():
        waited = time.perf_counter() - started
        assert waited < deadline_seconds, f"{what}: not within {deadline_seconds} s"
        time.sleep(0.002)
    return time.perf_counter() - started


def _without_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if "KVCACHED" not in name}
