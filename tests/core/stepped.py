"""Processes that stop at every write to a ledger, within one process: to try every interleaving, and every death.

The ledger file is a real one, mapped once for each actor. Stood in for are the kernel's record locks (they belong to
processes, and these are threads) and the clock. Real processes and the kernel's own locks are in ``test_members.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from kvcached_core.ledger import Ledger
from kvcached_core.ledger_file import LedgerFile, ledger_path


class Killed(BaseException):
    """What ends an actor that was killed; nothing that it does on its way out has an effect."""


class FakeClock:
    """Time passes only while somebody sleeps, and then a lot: who waits at all waits long enough to steal."""

    def __init__(self) -> None:
        self.now_seconds = 1000.0

    def nanoseconds(self) -> int:
        return int(self.now_seconds * 1e9)

    def seconds(self) -> float:
        return self.now_seconds

    def sleep(self, seconds: float) -> None:
        self.now_seconds += max(seconds, 0.1)


class LockTable:
    """The record locks of one file, as the kernel keeps them: by process, dropped at its death."""

    def __init__(self) -> None:
        self.byte_to_pid: dict[int, int] = {}

    def drop_all(self, pid: int) -> None:
        self.byte_to_pid = {byte: holder for byte, holder in self.byte_to_pid.items() if holder != pid}


class ActorLocks:
    """One actor's view of a :class:`LockTable`."""

    def __init__(self, table: LockTable, actor: Actor) -> None:
        self._table = table
        self._actor = actor

    def take(self, byte: int) -> bool:
        if self._actor.dead:
            raise Killed
        return self._table.byte_to_pid.setdefault(byte, self._actor.pid) == self._actor.pid

    def release(self, byte: int) -> None:
        if self._table.byte_to_pid.get(byte) == self._actor.pid:
            del self._table.byte_to_pid[byte]

    def holder(self, byte: int) -> int | None:
        holder = self._table.byte_to_pid.get(byte)
        return None if holder == self._actor.pid else holder


class World:
    """One ledger file with everything around it that actors share."""

    def __init__(
        self, runtime_dir: Path, total_bytes: int, *, headroom_bytes: int = 0, device_id: str = "host"
    ) -> None:
        self.path = ledger_path(runtime_dir, device_id)
        self.device_id = device_id
        self.total_bytes = total_bytes
        self.headroom_bytes = headroom_bytes
        self.clock = FakeClock()
        self.table = LockTable()
        self.actors: list[Actor] = []

    def actor(self, driver_free: Callable[[], int] | None = None) -> Actor:
        actor = Actor(self, len(self.actors) + 1, driver_free)
        self.actors.append(actor)
        return actor

    def close(self) -> None:
        for actor in self.actors:
            actor.kill()
            actor.ledger._file.close()


class Actor:
    """One process. It runs an operation up to the next write, when told to."""

    def __init__(self, world: World, pid: int, driver_free: Callable[[], int] | None) -> None:
        self.pid = pid
        self.dead = False
        self.result: object = None
        self.error: BaseException | None = None
        self.word = ""
        self._world = world
        self._thread: threading.Thread | None = None
        self._go = threading.Semaphore(0)
        self._parked = threading.Semaphore(0)
        self.ledger = Ledger(
            lambda total_bytes, headroom_bytes: LedgerFile.open(
                world.path,
                world.device_id,
                total_bytes,
                headroom_bytes,
                make_locks=lambda _: ActorLocks(world.table, self),
                on_write=self._park,
                clock=world.clock,
            ),
            total_bytes=world.total_bytes,
            headroom_bytes=world.headroom_bytes,
            driver_free=driver_free,
            clock=world.clock,
        )

    @property
    def at_work(self) -> bool:
        """Whether it is stopped within an operation."""
        return self._thread is not None

    def start(self, operation: Callable[[], object]) -> None:
        """Begin an operation, up to its first write."""
        assert not self.at_work
        assert not self.dead
        self.result = self.error = None
        self._thread = threading.Thread(target=self._run, args=(operation,), daemon=True)
        self._thread.start()
        self._arrive()

    def step(self) -> bool:
        """Do the write it is stopped at, and go on up to the next one. Returns whether there is one."""
        if not self.at_work:
            return False
        self._go.release()
        self._arrive()
        return self.at_work

    def finish(self) -> object:
        """Run the operation to its end. Returns its result or raises its error."""
        while self.step():
            pass
        if self.error is not None:
            raise self.error
        return self.result

    def do(self, operation: Callable[[], object]) -> object:
        """The whole operation, undisturbed."""
        self.start(operation)
        return self.finish()

    def kill(self) -> None:
        """End it where it stands: the write it is stopped at is not done, and its locks are gone."""
        self.dead = True
        self._world.table.drop_all(self.pid)
        while self.step():
            pass

    def _run(self, operation: Callable[[], object]) -> None:
        try:
            self.result = operation()
        except BaseException as error:  # noqa: BLE001 - handed to whoever drives this actor
            self.error = error
        self._thread = None
        self._parked.release()

    def _arrive(self) -> None:
        assert self._parked.acquire(timeout=60), f"actor {self.pid} hangs behind its write of {self.word}"

    def _park(self, _: int, word: str) -> None:
        if self.dead:
            raise Killed
        if threading.current_thread() is not self._thread:
            return  # set-up, outside of any operation
        self.word = word
        self._parked.release()
        self._go.acquire()
        if self.dead:
            raise Killed
