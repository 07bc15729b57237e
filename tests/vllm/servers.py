"""Real ``vllm serve`` processes on one host budget, for tests and benchmarks."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvcached_core.ledger import Ledger
from kvcached_core.ledger_statistics import MemberStatistics

from tests.e2e.client import MODEL, Client
from tests.e2e.server import Server, free_port
from tests.vllm.engine import MIB, Prompt, member, until

ROOT = Path(__file__).resolve().parents[2]
BUDGET = 64 * MIB
EXTENT = MIB
READY_SECONDS = 240


@dataclass
class Serving:
    """One server, by its member's name."""

    name: str
    server: Server
    client: Client
    pool: ThreadPoolExecutor

    def ask(self, prompt: Prompt, max_tokens: int) -> Future[list[int]]:
        """Begin one completion; its tokens, or an AssertionError with what the server said."""
        return self.pool.submit(self._complete, prompt, max_tokens)

    def ask_all(self, requests: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
        """Many at once."""
        return [future.result() for future in [self.ask(prompt, max_tokens) for prompt in requests]]

    def metric(self, name: str) -> float:
        """The sum of one metric's samples on ``/metrics``."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.server.port}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name]
        assert values, f"{name} is not among the metrics"
        return sum(values)

    def _complete(self, prompt: Prompt, max_tokens: int) -> list[int]:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        status, answer = self.client.post("/v1/completions", body)
        assert status == 200, f"{self.name}: HTTP {status}: {answer}"
        tokens = answer["choices"][0]["token_ids"]
        assert len(tokens) == max_tokens
        return list(tokens)


@dataclass
class Host:
    """The servers of one runtime directory, and what the ledger says of them."""

    model: Path
    logs: Path
    runtime_dir: Path
    stack: ExitStack
    servings: dict[str, Serving] = field(default_factory=dict)
    ledger: Ledger = field(init=False)

    def start(self, name: str, settings: Mapping[str, str] | None = None, *flags: str) -> Serving:
        """Start a server with default memory flags; `wait_ready` waits for it."""
        port = free_port()
        command = ["vllm", "serve", str(self.model), "--served-model-name", MODEL, "--port", str(port)]
        command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--block-size", "32"]
        command += flags or ["--max-model-len", "1024", "--max-num-seqs", "16"]
        variables = {
            "ENABLE_KVCACHED": "1",
            "KVCACHED_STRICT": "1",
            "KVCACHED_NAME": name,
            "KVCACHED_HOST_BUDGET": str(BUDGET),
            "KVCACHED_PAGE_SIZE": str(EXTENT // 4),
            "KVCACHED_RUNTIME_DIR": str(self.runtime_dir),
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            "PYTHONWARNINGS": "ignore",
            **(settings or {}),
        }
        server = Server(name, command, variables, port=port, log=self.logs / f"{name}.log", cwd=ROOT)
        self.stack.enter_context(server)
        pool = self.stack.enter_context(ThreadPoolExecutor(32))
        self.servings[name] = Serving(name, server, Client(port), pool)
        return self.servings[name]

    def wait_ready(self, name: str) -> float:
        return self.servings[name].server.wait_ready("/health", deadline_seconds=READY_SECONDS)

    def watch(self) -> None:
        """Open the ledger, which exists once a server is ready."""
        self.ledger = Ledger.open("host", BUDGET, runtime_dir=self.runtime_dir)
        self.stack.callback(self.ledger.close)

    def member(self, name: str) -> MemberStatistics:
        return member(self.ledger, name)

    def members(self) -> list[str]:
        return [each.name for each in self.ledger.snapshot().members]

    def limit(self, name: str, ceiling_bytes: int = BUDGET) -> None:
        """Another ceiling, and no floor in its way; followed when this returns."""
        self.ledger.set_limits(name, ceiling_bytes=ceiling_bytes, floor_bytes=0)
        until(lambda: self.member(name).limits_followed, f"{name}'s ceiling followed")

    @contextmanager
    def limited(self, name: str, ceiling_bytes: int) -> Iterator[None]:
        """A ceiling for as long as the block lasts."""
        self.limit(name, ceiling_bytes)
        try:
            yield
        finally:
            self.ledger.set_limits(name, ceiling_bytes=BUDGET, floor_bytes=0)

    def drop_caches(self) -> None:
        for name, serving in self.servings.items():
            assert serving.client.post("/reset_prefix_cache")[0] == 200
            until(lambda name=name: self.member(name).resident_bytes <= 2 * EXTENT, f"{name}'s memory back")
