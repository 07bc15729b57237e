"""One server: started in a session of its own, watched, interrupted, and accounted for to the last child."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KILL_DEADLINE_SECONDS = 30  # a process that is freeing a GPU's memory takes seconds to die


class ServerError(RuntimeError):
    """A server did not do what the run needs; the message has the figures and where its log is."""


@dataclass(frozen=True)
class Exit:
    """How a server ended after SIGINT to its process group.

    Attributes:
        seconds: From the signal until no process of the server's session was left.
        code: The first process's exit code, negative for a signal; None when it had to be killed.
        left: Processes that were still there at the deadline, then killed: ``"pid name"``.
    """

    seconds: float
    code: int | None
    left: tuple[str, ...]


class Server:
    """A running server. Leaves no process behind: use it as a context manager."""

    def __init__(
        self, name: str, command: Sequence[str], variables: Mapping[str, str], *, port: int, log: Path, cwd: Path
    ) -> None:
        self.name = name
        self.port = port
        self.log = log
        self.started = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            # Its own session: the process group gets the interrupt as from a terminal, and every descendant, also
            # one whose parent has died, is found by the session's id.
            self._process = subprocess.Popen(
                [*command],
                env={**_surroundings(), **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=cwd,
            )

    def __enter__(self) -> Server:
        _running.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        _running.discard(self)
        self.kill()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def pids(self) -> dict[int, str]:
        """Every live process of this server and its name."""
        return session_processes(self._process.pid)

    def wait_ready(self, path: str, *, deadline_seconds: float) -> float:
        """Wait until ``GET path`` answers 200.

        Returns:
            Seconds since the start.

        Raises:
            ServerError: It ended, or was not ready in time.
        """
        while (waited := time.monotonic() - self.started) < deadline_seconds:
            if not self.alive:
                raise ServerError(f"{self.name} ended with code {self._process.returncode} after {waited:.0f} s")
            if _answers(self.port, path):
                return waited
            time.sleep(0.25)
        raise ServerError(f"{self.name} was not ready after {deadline_seconds:.0f} s")

    def interrupt(self, *, deadline_seconds: float, number: signal.Signals = signal.SIGINT) -> Exit:
        """Signal the process group, by default as Ctrl-C does, and wait until every process of the session is gone."""
        started = time.monotonic()
        if self.alive:
            os.killpg(self._process.pid, number)
        while (seconds := time.monotonic() - started) < deadline_seconds:
            code = self._process.poll()
            if code is not None and not self.pids():
                return Exit(seconds, code, ())
            time.sleep(0.1)
        left = tuple(f"{pid} {name}" for pid, name in self.pids().items())
        code = self._process.poll()
        self.kill()
        return Exit(seconds, code, left)

    def log_text(self, num_bytes: int = -1) -> str:
        """What the server has logged, or its first ``num_bytes``."""
        with self.log.open("rb") as file:
            return file.read(num_bytes).decode(errors="replace")

    def kill(self) -> None:
        """End every process of the session at once. Idempotent."""
        for pid in self.pids():
            _signal(pid, signal.SIGKILL)
        if self.alive:
            self._process.kill()
        self._process.wait(timeout=KILL_DEADLINE_SECONDS)
        deadline = time.monotonic() + KILL_DEADLINE_SECONDS
        while left := self.pids():
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name}: still there {KILL_DEADLINE_SECONDS} s after SIGKILL: {left}")
            time.sleep(0.05)


_running: set[Server] = set()


def kill_all() -> None:
    """Kill every server that is inside its context manager now, in whatever thread."""
    for server in list(_running):
        server.kill()


def kill_all_and_interrupt(_number: int, _frame: object) -> None:
    """A signal handler for programs that wait for answers in threads: without their servers those end at once."""
    kill_all()
    raise KeyboardInterrupt


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def session_processes(session: int) -> dict[int, str]:
    """Live processes (zombies are not) of one session, pid to name. Source: proc_pid_stat(5)."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            name, _, fields = (entry / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while the list was read
        state, _parent, _group, its_session = fields.split()[:4]
        if int(its_session) == session and state not in "ZX":
            found[int(entry.name)] = name
    return found


def _surroundings() -> dict[str, str]:
    """This process's environment without settings of kvcached: a case states all of its own."""
    return {name: value for name, value in os.environ.items() if "KVCACHED" not in name}


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False  # not listening yet, or starting
    finally:
        connection.close()


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended by itself
