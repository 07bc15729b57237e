"""The one ordered, acknowledged channel between the process that decides and the ranks that map.

Guarantees:

* Orders of one decider reach a rank in the order in which they were sent. Nothing about mapping travels any other way.
* ``Map``, ``Retire`` and ``Undo`` are each answered by exactly one ``Ack`` with their ``seq``. Answers may come out
  of order: a ``Retire`` that waits for its fence never delays a later ``Map``.
* A rank that dies closes its link at once (the kernel closes its socket); ``SocketLink.closed`` becomes true at the
  next ``receive``. A rank that is stopped keeps its link open and does not answer: deadlines are the decider's
  (``agent.py``). Sending to it never blocks and loses nothing: what its queue does not take is sent when it does.
* With one process for both, ``LocalLink`` is a direct call: no socket, no thread, no copy.

Messages are JSON objects in ``SOCK_SEQPACKET`` datagrams, so that boundaries are kept and no framing is needed.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from kvcached_core.errors import ConfigError, OrderError
from kvcached_core.wake import Alarm, drain

log = logging.getLogger(__name__)

BlockRanges = tuple[tuple[int, int], ...]
"""Half-open ranges of block ids."""

MAX_MESSAGE_BYTES = 1 << 18
MAX_PATH_BYTES = 107
"""Of a Unix socket's address: ``sun_path`` has 108 bytes, the last one zero (unix(7))."""
TICK_SECONDS = 0.02
"""How often a rank looks at fences and at its ledger; a trim under pressure starts at most this late."""
ALIVE_SECONDS = 0.5
"""How often a rank that waits for a fence says that it is at work."""


@dataclasses.dataclass(frozen=True)
class Hello:
    """The decider's first message: how it cuts the engine's blocks into extents; None: it asks how the rank would."""

    num_blocks: int
    blocks_per_extent: int | None = None


@dataclasses.dataclass(frozen=True)
class Welcome:
    """A rank's answer to `Hello`: how extents are cut, what one costs there at most, and who it is."""

    rank: int
    pid: int
    device_id: str
    member: str
    blocks_per_extent: int
    extent_bytes: int
    page_bytes: int
    total_bytes: int


@dataclasses.dataclass(frozen=True)
class Map:
    """Back these blocks with zeroed memory: all of them or none."""

    seq: int
    block_ranges: BlockRanges


@dataclasses.dataclass(frozen=True)
class Retire:
    """Unmap these blocks once everything launched up to and including step ``after_step`` has completed."""

    seq: int
    block_ranges: BlockRanges
    after_step: int


@dataclasses.dataclass(frozen=True)
class Undo:
    """Unmap these blocks now: they were mapped here but not on every rank, so nothing has used them."""

    seq: int
    block_ranges: BlockRanges


@dataclasses.dataclass(frozen=True)
class Report:
    """What the decider would use, in extents; the rank puts it into its ledger. Not answered."""

    demand_extents: int
    unmet_extents: int
    free_extents: int
    cached_extents: int
    busy: bool


@dataclasses.dataclass(frozen=True)
class Ack:
    """The answer to `Map`, `Retire` or `Undo`.

    Attributes:
        seq: Of the order answered.
        error: Empty when the order was carried out; else why not, in words. Nothing was changed then.
        shortage: The order failed for want of a lease or of a page: trying again later makes sense.
    """

    seq: int
    error: str = ""
    shortage: bool = False


@dataclasses.dataclass(frozen=True)
class Standing:
    """What the rank's ledger says about this member now, in extents of this rank. Sent when it changed.

    Attributes:
        may_hold_extents: Resident ones plus what the ledger would grant now.
        target_extents: What it should hold at most: resident ones less what neighbours are owed.
        ceiling_extents: The member's hard maximum now.
        must: ``target_extents`` binds even where it takes memory from running requests (a lowered ceiling, or
            a neighbour's floor).
        yielded_extents: What others' floors take from the ceiling that is set: ``ceiling_extents`` is without it.
    """

    may_hold_extents: int
    target_extents: int
    ceiling_extents: int
    must: bool = False
    yielded_extents: int = 0


@dataclasses.dataclass(frozen=True)
class Alive:
    """A `Retire` still waits for its fence, and the rank is at work: a long step is not a rank that hangs."""


@dataclasses.dataclass(frozen=True)
class Bye:
    """The rank's last message: its engine is shutting down, which is no error."""


ToRank = Hello | Map | Retire | Undo | Report
FromRank = Welcome | Ack | Standing | Alive | Bye
_KINDS = {kind.__name__: kind for kind in (Hello, Welcome, Map, Retire, Undo, Report, Ack, Standing, Alive, Bye)}


def encode(message: ToRank | FromRank) -> bytes:
    """The message as one datagram."""
    return json.dumps({"kind": type(message).__name__, **dataclasses.asdict(message)}).encode()


def decode(datagram: bytes) -> Any:
    """The message in a datagram.

    Raises:
        OrderError: It is no message of ours.
    """
    try:
        fields = json.loads(datagram)
        kind = _KINDS[fields.pop("kind")]
        if "block_ranges" in fields:
            fields["block_ranges"] = tuple((start, stop) for start, stop in fields["block_ranges"])
        return kind(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OrderError(f"not an order: {datagram[:80]!r} ({error})") from error


class Obeys(Protocol):
    """What a link needs of a rank (``rank.Rank``)."""

    index: int
    wake: int

    @property
    def is_calm(self) -> bool:
        """Whether `tick` would find nothing new; of the engine's thread, at no great cost."""

    def order(self, message: ToRank) -> None:
        """Carry out or note an order; answers appear in `tick`."""

    def tick(self) -> list[FromRank]:
        """What is to be said to the decider now."""


class Link(Protocol):
    """The decider's end of the channel to one rank.

    Attributes:
        rank: The rank's number.
        closed: Nothing comes or goes any more.
        lost: Why it closed by itself; empty where the rank said `Bye`, or this end closed it.
    """

    rank: int
    closed: bool
    lost: str

    @property
    def is_calm(self) -> bool:
        """Whether nobody need call `receive` before `fileno` is readable."""

    def fileno(self) -> int:
        """Readable when `receive` may have something."""

    def send(self, message: ToRank) -> None:
        """Hand over an order. Never blocks; a lost rank shows in ``closed``."""

    def receive(self) -> list[FromRank]:
        """Everything that the rank has said since the last call."""

    def close(self) -> None:
        """End the channel. Idempotent."""


class LocalLink:
    """The channel to a rank in this process: direct calls."""

    def __init__(self, rank: Obeys) -> None:
        self.rank = rank.index
        self.closed = False
        self.lost = ""
        self._obeys = rank

    @property
    def is_calm(self) -> bool:
        return self._obeys.is_calm

    def fileno(self) -> int:
        return self._obeys.wake

    def send(self, message: ToRank) -> None:
        self._obeys.order(message)

    def receive(self) -> list[FromRank]:
        drain(self._obeys.wake)
        return self._obeys.tick()

    def close(self) -> None:
        self.closed = True


class SocketLink:
    """The channel to a rank in another process of this host."""

    def __init__(self, path: Path, rank: int, *, deadline_seconds: float = 30.0) -> None:
        """Connect to the rank's socket, which may not be there yet.

        Raises:
            OrderError: Nobody listened at ``path`` within the deadline.
        """
        self.rank = rank
        self.closed = False
        self.lost = ""
        self._unsent: deque[bytes] = deque()
        self._socket = _connect(path, rank, deadline_seconds)
        self._socket.setblocking(False)

    @property
    def is_calm(self) -> bool:
        return not self._unsent

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: ToRank) -> None:
        self._unsent.append(encode(message))
        self._send_unsent()

    def receive(self) -> list[FromRank]:
        self._send_unsent()
        messages: list[FromRank] = []
        while not self.closed:
            try:
                datagram = self._socket.recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                self._lose(str(error))
                break
            if not datagram:
                self._lose("its process ended")
                break
            message = decode(datagram)
            if isinstance(message, Bye):
                self.close()
            else:
                messages.append(message)
        return messages

    def close(self) -> None:
        self.closed = True
        self._socket.close()

    def _send_unsent(self) -> None:
        """Send what the rank's queue takes. The rest stays: the rank is stopped, which the agent's deadline says."""
        while self._unsent and not self.closed:
            try:
                self._socket.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(str(error))
            else:
                self._unsent.popleft()

    def _lose(self, reason: str) -> None:
        self.lost = reason
        self.close()


def _connect(path: Path, rank: int, deadline_seconds: float) -> socket.socket:
    deadline = time.monotonic() + deadline_seconds
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(str(path))
            return sock
        except OSError as error:
            sock.close()
            if error.errno not in (errno.ENOENT, errno.ECONNREFUSED) or time.monotonic() >= deadline:
                raise OrderError(
                    f"rank {rank} does not listen for orders at {path} after {deadline_seconds:.0f} s "
                    f"({error.strerror}): did its worker start with kvcached?"
                ) from error
        time.sleep(0.01)


class OrderServer(threading.Thread):
    """A rank's end of the channel where the decider is another process: one thread, one decider.

    An unexpected error here means that the rank no longer knows what is mapped. It then ends its process at once
    (``os._exit``): an exception on one rank would otherwise hang the whole group until a time-out.
    """

    def __init__(self, path: Path, rank: Obeys) -> None:
        """Listen at ``path``; the thread serves once it is started.

        Raises:
            ConfigError: The path is too long for a socket.
        """
        super().__init__(name="kvcached-rank", daemon=True)
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise ConfigError(
                f"{path} has {len(os.fsencode(path))} bytes, and a socket's path at most {MAX_PATH_BYTES}: set "
                f"KVCACHED_RUNTIME_DIR to a shorter one."
            )
        self._path = path
        self._rank = rank
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._stop_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._alarm = Alarm(TICK_SECONDS)

    def note_step(self) -> None:
        """A step is launched: the rank need not look around for now, if all is calm. The engine's thread."""
        self._alarm.snooze(lambda: self._rank.is_calm)

    def run(self) -> None:
        try:
            self._serve()
        except (BrokenPipeError, ConnectionResetError):
            log.info("the scheduler of rank %d has ended", self._rank.index)
        except BaseException as error:
            log.critical(
                "rank %d cannot carry out orders any more, so it ends: %r", self._rank.index, error, exc_info=error
            )
            os._exit(70)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        os.eventfd_write(self._stop_event, 1)
        if self.is_alive() and threading.current_thread() is not self:
            self.join(2.0)
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        connection = self._accept()
        if connection is None:
            return
        with connection:
            while not self._stopping((connection.fileno(), self._rank.wake)):
                if not self._take_orders(connection):
                    return
                for message in self._rank.tick():
                    connection.sendall(encode(message))
            connection.sendall(encode(Bye()))

    def _accept(self) -> socket.socket | None:
        ready, _, _ = select.select([self._listener.fileno(), self._stop_event], [], [])
        if self._stop_event in ready:
            return None
        connection, _ = self._listener.accept()
        self._path.unlink(missing_ok=True)
        return connection

    def _stopping(self, wakers: Iterable[int]) -> bool:
        ready = self._alarm.sleep([*wakers, self._stop_event])
        if self._rank.wake in ready:
            drain(self._rank.wake)
        return self._stop_event in ready

    def _take_orders(self, connection: socket.socket) -> bool:
        """Carry out what has arrived; false when the decider has gone."""
        while True:
            try:
                datagram = connection.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            if not datagram:
                return False
            self._rank.order(decode(datagram))


_local_ranks: dict[str, Obeys] = {}


def offer(address: Path, rank: Obeys, *, local: bool) -> OrderServer | None:
    """Make a rank reachable at an address, from this process or (``local=False``) from another one.

    Returns:
        The started server, or None where the decider calls directly. The caller closes it.
    """
    if local:
        _local_ranks[str(address)] = rank
        return None
    server = OrderServer(address, rank)
    server.start()
    return server


def withdraw(address: Path) -> None:
    """Forget a rank offered to this process. Idempotent."""
    _local_ranks.pop(str(address), None)


def connect(address: Path, rank: int, *, deadline_seconds: float = 30.0) -> Link:
    """The link to the rank at an address.

    Raises:
        OrderError: No such rank within the deadline.
    """
    local = _local_ranks.get(str(address))
    if local is not None:
        return LocalLink(local)
    return SocketLink(address, rank, deadline_seconds=deadline_seconds)


def greet(links: Sequence[Link], num_blocks: int, *, deadline_seconds: float = 10.0) -> list[Welcome]:
    """Agree with every rank on the size of an extent: the largest that one of them would choose.

    Returns:
        The ranks' answers, in the order of ``links``; all have the same ``blocks_per_extent``.

    Raises:
        OrderError: A rank does not answer within the deadline.
    """
    proposed = [_ask(link, Hello(num_blocks), deadline_seconds) for link in links]
    blocks_per_extent = max(welcome.blocks_per_extent for welcome in proposed)
    return [_ask(link, Hello(num_blocks, blocks_per_extent), deadline_seconds) for link in links]


def _ask(link: Link, hello: Hello, deadline_seconds: float) -> Welcome:
    link.send(hello)
    deadline = time.monotonic() + deadline_seconds
    while time.monotonic() < deadline and not link.closed:
        for message in link.receive():
            if isinstance(message, Welcome):
                return message
        select.select([link.fileno()], [], [], TICK_SECONDS)
    raise OrderError(f"rank {link.rank} did not answer the scheduler's greeting within {deadline_seconds:.0f} s")
