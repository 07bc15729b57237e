"""A member in a process of its own: told what to do order by order, or living as it likes."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvcached_core.account import Account
from kvcached_core.arena import Arena
from kvcached_core.backends.host import HostBackend
from kvcached_core.errors import LedgerError
from kvcached_core.ledger import Ledger
from kvcached_core.ledger_statistics import LedgerStatistics

ROOT = Path(__file__).resolve().parents[2]

# Children of a server that has imported all this already start in milliseconds, and inherit no thread and no lock.
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["tests.core.member_program"])


class MemberProcess:
    """A real process; what the tests hold."""

    def __init__(self, run: Callable[..., None], *arguments: Any) -> None:
        self._pipe, theirs = _server.Pipe()
        self._process = _server.Process(target=run, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def tell(self, do: str, *, at: int | None = None, signal: int = 0, **arguments: Any) -> None:
        """Have it do something; with ``at``, it sends itself a signal before its write with that number."""
        self._pipe.send((do, arguments, at, signal))

    def answer(self, timeout_seconds: float = 30.0) -> Any:
        """What came of it; None if the process has ended."""
        assert self._pipe.poll(timeout_seconds), f"no answer of process {self.pid} within {timeout_seconds} s"
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            return None

    def do(self, do: str, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return self.answer()

    def send(self, signal: int) -> None:
        os.kill(self.pid, signal)

    def stops(self) -> bool:
        """Wait until the kernel has it stopped (True), or it has answered (False)."""
        while not self._pipe.poll(0.0005):
            if self._state() == "T":
                return True
        return False

    def ended(self) -> bool:
        """Whether the kernel has ended it: its memory and its locks are gone."""
        return self._state() in ("Z", "X", "")

    def _state(self) -> str:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return ""

    def end(self) -> None:
        """Kill it if it still runs."""
        self._process.kill()
        self._process.join(30)
        assert self._process.exitcode is not None
        self._process.close()
        self._pipe.close()


class Program:
    """The process's own side."""

    def __init__(self, pipe: Connection, runtime_dir: Path, total_bytes: int) -> None:
        self.pipe = pipe
        self.ledger = Ledger.open("host", total_bytes, runtime_dir=runtime_dir, on_write=self._on_write)
        self.account: Account | None = None
        self.writes_left: int | None = None
        self.signal = 0

    def _on_write(self, _: int, __: str) -> None:
        if self.writes_left is None:
            return
        self.writes_left -= 1
        if self.writes_left < 0:
            self.writes_left = None
            os.kill(os.getpid(), self.signal)

    def join(self, name: str) -> str:
        self.account = self.ledger.join(name, engine="test")
        return self.account.name

    def lease(self, num_bytes: int) -> int:
        assert self.account is not None
        return self.account.lease(num_bytes)

    def grow(self, num_bytes: int) -> int:
        assert self.account is not None
        granted = self.account.lease(num_bytes)
        self.account.created(granted)
        return granted

    def shrink(self, num_bytes: int) -> int:
        assert self.account is not None
        self.account.destroyed(num_bytes)
        self.account.give_back(num_bytes)
        return num_bytes

    def load(self, num_bytes: int, deadline_seconds: float) -> str:
        assert self.account is not None
        try:
            self.account.static_lease(num_bytes, deadline_seconds=deadline_seconds)
        except LedgerError as error:
            return str(error)
        self.account.static_used(num_bytes)
        return ""

    def report(self, **figures: Any) -> bool:
        assert self.account is not None
        self.account.report(**figures)
        return True

    def limit(self, name: str, ceiling_bytes: int) -> int:
        return self.ledger.set_limits(name, ceiling_bytes=ceiling_bytes)

    def leave(self) -> bool:
        assert self.account is not None
        self.account.destroyed(self.account.created_bytes)
        self.account.leave()
        return True

    def serve(self) -> None:
        while True:
            do, arguments, self.writes_left, self.signal = self.pipe.recv()
            result = getattr(self, do)(**arguments)
            self.writes_left = None
            self.pipe.send(result)


class Life:
    """A member that grows, shrinks, loads and reports at random until it is killed, with real pages of the host."""

    NUM_PAGES = 64

    def __init__(self, runtime_dir: Path, total_bytes: int, seed: int) -> None:
        self._choose = random.Random(seed)
        self._page_bytes = total_bytes // self.NUM_PAGES
        self._arena = Arena(HostBackend(total_bytes), total_bytes, self._page_bytes)
        self._resident: list[int] = []
        self._ledger = Ledger.open("host", total_bytes, runtime_dir=runtime_dir)
        self._account = self._ledger.join("m", engine="test")

    def live(self) -> None:
        acts = (self._grow, self._shrink, self._follow, self._load, self._rejoin)
        while True:
            [act] = self._choose.choices(acts, (8, 4, 8, 1, 0.2))
            act()
            time.sleep(self._choose.expovariate(200))

    def _grow(self) -> None:
        asked = self._choose.randrange(8) * self._page_bytes
        granted = self._account.lease(asked)
        pages = sorted(set(range(self.NUM_PAGES)) - set(self._resident))[: granted // self._page_bytes]
        created = self._arena.map([range(page, page + 1) for page in pages]) * self._page_bytes
        self._account.created(created)
        self._account.give_back(granted - created)
        self._resident += pages
        self._report(unmet=asked - created)

    def _shrink(self, num_pages: int | None = None) -> None:
        most = len(self._resident)
        pages = self._choose.sample(self._resident, self._choose.randint(0, most) if num_pages is None else num_pages)
        num_bytes = len(pages) * self._page_bytes
        self._account.destroyed(num_bytes)
        assert self._arena.unmap([range(page, page + 1) for page in pages]) == len(pages)
        self._account.give_back(num_bytes)
        self._resident = sorted(set(self._resident) - set(pages))

    def _follow(self) -> None:
        surplus = max(0, self._account.lease_bytes - self._account.allowance().target_bytes)
        self._shrink(min(len(self._resident), -(-surplus // self._page_bytes)))
        self._report(unmet=0)

    def _load(self) -> None:
        num_bytes = self._choose.randrange(4) * self._page_bytes
        try:
            self._account.static_lease(num_bytes, deadline_seconds=self._choose.choice((0.0, 0.1)))
        except LedgerError:
            return
        self._account.static_used(num_bytes)

    def _rejoin(self) -> None:
        self._shrink(len(self._resident))
        self._account.leave()
        self._account = self._ledger.join("m", engine="test")

    def _report(self, unmet: int) -> None:
        created = self._account.created_bytes
        free = self._choose.randint(0, created)
        self._account.report(
            demand_bytes=created - free + unmet,
            unmet_bytes=unmet,
            free_bytes=free,
            cached_bytes=self._choose.randint(0, created - free),
            busy=self._choose.random() < 0.5,
        )


def serve(pipe: Connection, runtime_dir: Path, total_bytes: int) -> None:
    Program(pipe, runtime_dir, total_bytes).serve()


def live(_: Connection, runtime_dir: Path, total_bytes: int, seed: int) -> None:
    Life(runtime_dir, total_bytes, seed).live()


def watch(pipe: Connection, runtime_dir: Path, hertz: int) -> None:
    """Read so often and check every number; once told to end, say how often, how long it took, and what was wrong."""
    ledger = Ledger.open("host", None, runtime_dir=runtime_dir)
    seconds, wrong = list[float](), list[str]()
    while not pipe.poll(1 / hertz):
        began = time.perf_counter()
        device = ledger.snapshot()
        seconds.append(time.perf_counter() - began)
        wrong += broken_identities(device)
    pipe.send((seconds, wrong))


def broken_identities(device: LedgerStatistics) -> list[str]:
    """What no snapshot may show, in words."""
    wrong = [f"{key} is {value}" for key, value in asdict(device).items() if isinstance(value, int) and value < 0]
    for member in device.members:
        if member.resident_bytes > member.lease_bytes:
            wrong.append(f"{member.name} has created {member.resident_bytes} of {member.lease_bytes}")
        numbers = {key: value for key, value in asdict(member).items() if not isinstance(value, str)}
        wrong += [f"{member.name}: {key} is {value}" for key, value in numbers.items() if value < 0]
    leased = sum(member.lease_bytes + member.static_lease_bytes for member in device.members)
    if leased + device.headroom_bytes > device.total_bytes:
        wrong.append(f"{leased} leased of {device.total_bytes}")
    if len({member.name for member in device.members}) != len(device.members):
        wrong.append(f"one name twice: {sorted(member.name for member in device.members)}")
    return wrong
