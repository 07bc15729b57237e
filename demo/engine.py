"""One ``vllm serve`` process, from start to end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from demo.interrupts import postponed
from demo.workload import Request

READY_SECONDS = 240
ANSWER_SECONDS = 120
STOP_SECONDS = 20
HELPERS_SECONDS = 5


class EngineError(Exception):
    """A server did not start, died, or did not answer in time."""


@dataclass(frozen=True)
class Answer:
    """What a server said, and when it was asked and done (``time.monotonic``)."""

    request: Request
    token_ids: tuple[int, ...]
    text: str
    started: float
    ended: float


class Engine:
    """A server in a process group of its own, reached over a Unix socket in ``folder``.

    Its temporary files go there too: vLLM leaves its processes' sockets behind, however it ends.
    """

    def __init__(
        self, name: str, model: Path, flags: list[str], *, folder: Path, log: Path, environ: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = log
        socket = folder / f"{name}.sock"
        command = ["vllm", "serve", str(model), "--served-model-name", name, "--uds", str(socket), *flags]
        with self.log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(folder), **environ},
                start_new_session=True,  # a Ctrl-C is for the demo, which then stops the servers in order
            )
        self._client = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://engine", timeout=ANSWER_SECONDS
        )

    def wait_ready(self) -> None:
        """Return when the server answers.

        Raises:
            EngineError: It ended, or did not answer within ``READY_SECONDS``; with the end of its log.
        """
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise EngineError(
                    f"server {self.name} ended with {self._process.returncode} at its start{self._tail()}"
                )
            try:
                if self._client.get("/health", timeout=2).is_success:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        raise EngineError(f"server {self.name} did not answer within {READY_SECONDS} s{self._tail()}")

    def answer(self, request: Request) -> Answer:
        """Ask for one greedy completion and wait for it."""
        started = time.monotonic()
        body = {
            "model": self.name,
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        choice = self._post("/v1/completions", body)["choices"][0]
        return Answer(request, tuple(choice["token_ids"]), choice["text"], started, time.monotonic())

    def reset_prefix_cache(self) -> None:
        """Drop what the server keeps of earlier prompts."""
        self._post("/reset_prefix_cache", None)

    def _post(self, path: str, body: object) -> dict:
        try:
            response = self._client.post(path, json=body)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise EngineError(f"server {self.name} did not answer {path}: {error}{self._tail()}") from error
        return response.json() if response.content else {}

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n  ".join([f"; the end of {self.log}:", *lines[-12:]])

    def stop(self) -> None:
        """End the server; return when no process of its group is left.

        An orderly end is given time: vLLM's helpers remove its semaphores and shared memory when all else is gone.
        """
        self._client.close()
        with postponed():
            self._end_group()

    def _end_group(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_SECONDS)
        deadline = time.monotonic() + HELPERS_SECONDS
        while self._signal_group(0) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, signum: int) -> bool:
        """Signal what is left of the server's group; whether anything is."""
        try:
            os.killpg(self._process.pid, signum)
        except ProcessLookupError:
            return False
        return True
