"""The file behind a ledger: its words, its locks, and what holds when a process is stopped or killed between any two.

Guarantees
----------
A file has a header, four arrays with one word per slot, and one row per slot. A word is an aligned u64, written by one
store (CPython writes an element of a ``memoryview`` of format ``Q`` with one 8-byte move) and followed by a fence.

1. *Nobody sees a half-made file.* It is made without a name and linked into place complete, every byte allocated, so
   that a full disk fails here and not as SIGBUS later.

2. *One writer per word.* The header is never written again. A slot's words belong to the process that holds the slot's
   claim byte; its limits and its revision belong to whoever holds the operator byte. These bytes are record locks
   (``fcntl.lockf``) on the process's one descriptor of the file: the kernel drops them at any kind of death, a forked
   child does not inherit them, and they work between PID namespaces. (Closing *any* descriptor of the file drops all of
   a process's locks on it, also the one that ``mmap`` duplicates: see ``close``.)

3. *Dead members do not count.* A slot is occupied while its tenure is odd, and its owner lives while somebody else
   holds its life byte. The life byte is taken before the tenure turns odd, so an occupied slot whose life byte is free
   is dead, at once and for everybody, without anything having to be written. Sweeping it (tenure + 1) needs its claim
   byte only: a sweeper that is stopped half-way resurrects nobody, it costs one of the slots until it goes on.

4. *A reading is of one moment.* Every store is followed by one to the slot's change counter, and operators' stores by
   one to its revision. If all counters are the same before and after a row was read, at most one store of each row
   happened meanwhile: each row is as it was before or after one store. Hence: what holds between any two stores of
   every member (``created <= lease``) holds in every reading. Across rows: a lease is preceded by its proposal, a store
   with a counter of its own, so a lease that was granted out of what another gave back is never read beside the
   other's older, larger lease. A stopped or dead writer needs no repair: its counter stands still.

5. *Leases never exceed the device, whoever is stopped where.* Admission is a turn: the table byte of the current epoch,
   ``TABLE + epoch % TABLE_BYTES``. Who waits longer than ``STEAL_AFTER_SECONDS`` raises the epoch and takes the next
   byte, so two processes can be in a turn at once. Within it a member (a) reads all rows, (b) stores its ``proposed``
   lease, (c) reads the epoch, and only if it is still its own (d) stores the lease, and in any case (e) clears the
   proposal. Everybody counts ``max(lease, proposed)``. Take two members A and B that both reach (d), with epochs
   a <= b. If a == b, the table byte kept them apart: one did (a) after the other's (e). If a < b, B read an epoch >= b
   before its (a), while A, in (c), read none above a: so A's (c) came before the epoch was raised, A's (b) before its
   (c), and B's (a) after that, and B counted A's proposal. (It takes fences between (b) and (c), and between raising
   and (a).) So of any two grants the later one counted the earlier. One that is stopped anywhere and wakes up later
   either had its proposal counted all the time, or finds the epoch raised, withdraws, and starts again. The same holds
   for joining: there the odd tenure is the proposal.
   The epoch is the largest of one word per slot, so a stealer that is stopped before its store and wakes up much later
   cannot lower it: one shared word would, and an old turn would look current again.

6. *Limits are whole.* An operator writes the one of two records that is not in force and then, by one store, the
   revision with the record's number. A record names the tenure it was made for, so it never applies to the slot's
   next owner.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import quote, unquote

from kvcached_core.errors import LedgerError

SLOTS = 128
STEAL_AFTER_SECONDS = 0.25
SUFFIX = ".ledger"

_MAGIC = int.from_bytes(b"kvledger", "little")
_VERSION = 1
_READ_ATTEMPTS = 5_000
_TURN_ATTEMPTS = 10_000
_POLL_SECONDS = 0.0005  # between two attempts at a turn, so that it comes to 5 s or more


class Figures(NamedTuple):
    """The numbers of a row, in the order of their words. Written by the slot's owner alone."""

    pid: int = 0
    rank: int = 0
    joined_ns: int = 0
    total_bytes: int = 0
    headroom_bytes: int = 0
    floor_bytes: int = 0
    ceiling_bytes: int = 0
    weight_micros: int = 0
    static_lease_bytes: int = 0
    static_proposed_bytes: int = 0
    static_used_bytes: int = 0
    static_unmet_bytes: int = 0
    lease_bytes: int = 0
    proposed_bytes: int = 0
    created_bytes: int = 0
    free_bytes: int = 0
    cached_bytes: int = 0
    demand_bytes: int = 0
    unmet_bytes: int = 0
    busy: int = 0
    reporting: int = 0
    heartbeat_ns: int = 0
    driver_told: int = 0
    driver_free_bytes: int = 0
    followed_revision: int = 0
    trim_revision: int = 0
    trim_left_bytes: int = 0
    maps: int = 0
    unmaps: int = 0
    mapped_bytes: int = 0
    unmapped_bytes: int = 0
    create_failures: int = 0


class Limits(NamedTuple):
    """What an operator asked of a slot's owner. In force if ``tenure`` is the slot's."""

    tenure: int = 0
    floor_bytes: int = 0
    ceiling_bytes: int = 0
    weight_micros: int = 0
    trim_revision: int = 0
    trim_bytes: int = 0
    trim_until_ns: int = 0


class Texts(NamedTuple):
    """The words of a row that are no numbers; written before the slot is occupied, never after."""

    name: str
    engine: str
    member_id: str
    model: str


@dataclass(frozen=True)
class Row:
    """One live slot, as it was at one moment."""

    slot: int
    tenure: int
    figures: Figures
    revision: int
    limits: Limits | None


# In words, from the start of the file.
_HEADER_WORDS = 64
_DEVICE_ID_AT, _DEVICE_ID_WORDS = 8, 32
_TENURES = _HEADER_WORDS
_CHANGES = _TENURES + SLOTS
_REVISIONS = _CHANGES + SLOTS  # beside the changes: both are read as one
_EPOCHS = _REVISIONS + SLOTS
_ROWS = _EPOCHS + SLOTS
_ROW_WORDS = 128
_LIMITS_AT = 48  # two records of 8 words; the figures are before them, the texts behind
_TEXTS_AT = 64
_TEXT_WORDS = {"name": 8, "engine": 4, "member_id": 8, "model": 32}
_SIZE_BYTES = 8 * (_ROWS + SLOTS * _ROW_WORDS)
_FIGURE_AT = {name: at for at, name in enumerate(Figures._fields)}

# The lock bytes lie beyond the end of the file.
_LIFE, _CLAIM, _OPERATOR, _TABLE = 1 << 20, 2 << 20, 3 << 20, 4 << 20
_TABLE_BYTES = 2 * SLOTS  # a stopped process keeps one of these; there are always more bytes than slots

OnWrite = Callable[[int, str], None]
"""Called with (slot, word) before every store: tests stop, step and kill a process there."""


class Clock(Protocol):
    """The time that the processes of a machine share."""

    def nanoseconds(self) -> int: ...
    def seconds(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """Since boot, also while suspended. (Within a time namespace of its own, ages of others are off by its offset.)"""

    def nanoseconds(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def seconds(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


SYSTEM_CLOCK = SystemClock()


class ByteLocks(Protocol):
    """One process's record locks on one file."""

    def take(self, byte: int) -> bool: ...
    def release(self, byte: int) -> None: ...
    def holder(self, byte: int) -> int | None:
        """The process other than this one that holds the byte; 0 if it is in another PID namespace."""


class KernelByteLocks:
    """The kernel's own (POSIX record locks): gone with the process, whichever way it ends."""

    _FLOCK = "@hhqqi0q"  # struct flock of 64-bit Linux

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def take(self, byte: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise LedgerError(f"the ledger's file system has no record locks: {error}") from error
        return True

    def release(self, byte: int) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, byte)

    def holder(self, byte: int) -> int | None:
        asked = struct.pack(self._FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        kind, _, _, _, pid = struct.unpack(self._FLOCK, fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else max(0, pid)


class LedgerGone(LedgerError):
    """The file was deleted, replaced or truncated while it was in use."""


def ledger_path(runtime_dir: Path, device_id: str) -> Path:
    """The file of a device. Any id is a file name: what cannot be in one is percent-encoded."""
    if not 0 < len(device_id.encode()) < 8 * _DEVICE_ID_WORDS:
        raise LedgerError(f"{device_id!r} is no device id: 1 to {8 * _DEVICE_ID_WORDS - 1} bytes")
    return runtime_dir / (quote(device_id, safe="") + SUFFIX)


def device_ids(runtime_dir: Path) -> list[str]:
    """The devices that have a ledger in this directory, sorted; none if there is no such directory."""
    return sorted(unquote(path.name.removesuffix(SUFFIX)) for path in runtime_dir.glob(f"*{SUFFIX}"))


class LedgerFile:
    """One process's mapping of a ledger file. At most one per process and file (record locks are per process)."""

    def __init__(
        self,
        fd: int,
        path: Path,
        device_id: str,
        make_locks: Callable[[int], ByteLocks],
        on_write: OnWrite | None,
        clock: Clock,
    ) -> None:
        self.path = path
        self.device_id = device_id
        self.owned: set[int] = set()
        self._fd = fd
        self._pid = os.getpid()
        self._on_write = on_write
        self._clock = clock
        self._locks = make_locks(fd)
        self._barrier = threading.Lock()
        # mmap duplicates the descriptor. That is harmless while it lives, and close() ends both at once.
        self._map = mmap.mmap(fd, _SIZE_BYTES)
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("Q")
        self.first_total_bytes: int = self._words[3]
        self.first_headroom_bytes: int = self._words[4]

    @classmethod
    def open(
        cls,
        path: Path,
        device_id: str,
        total_bytes: int | None,
        headroom_bytes: int = 0,
        *,
        make_locks: Callable[[int], ByteLocks] = KernelByteLocks,
        on_write: OnWrite | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> LedgerFile:
        """Map the device's file; make it if there is none and ``total_bytes`` is given.

        Raises:
            LedgerError: No file, no right to it, no space for it, or a file that is truncated, foreign, of another
                format, or another device's.
        """
        try:
            if total_bytes is not None:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_directory(path.parent)
            fd = _open_or_create(path, device_id, total_bytes, headroom_bytes)
        except OSError as error:
            raise LedgerError(_refusal(error, path, device_id)) from error
        try:
            _check_file(fd, path, device_id)
            return cls(fd, path, device_id, make_locks, on_write, clock)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Unmap and close. Drops every lock that this process holds on the file; a second call does nothing."""
        if self._fd < 0:
            return
        self.owned.clear()
        self._words.release()
        self._bytes.release()
        self._map.close()
        os.close(self._fd)
        self._fd = -1

    def check(self) -> None:
        """Whether the words may be touched: a mapping of a truncated file ends its process with SIGBUS.

        Raises:
            LedgerGone: The file was deleted or truncated.
            LedgerError: This process was forked from the one that opened the file, or has closed it.
        """
        self._check_pid()
        status = os.fstat(self._fd)
        if status.st_nlink == 0:
            raise LedgerGone(f"{self.path} was deleted while in use")
        if status.st_size < _SIZE_BYTES:
            raise LedgerGone(f"{self.path} was truncated to {status.st_size} of {_SIZE_BYTES} bytes while in use")

    def check_path(self) -> None:
        """Whether others that open the path get this file.

        Raises:
            LedgerGone: The path leads elsewhere, or nowhere (a renamed directory).
        """
        self.check()
        try:
            there = os.stat(self.path)
        except OSError as error:
            raise LedgerGone(f"{self.path} cannot be reached any more: {error.strerror}") from error
        if not os.path.samestat(there, os.fstat(self._fd)):
            raise LedgerGone(f"{self.path} was replaced while in use")

    def _check_pid(self) -> None:
        if os.getpid() != self._pid:
            raise LedgerError(f"{self.path} was opened by process {self._pid}, of which this is a fork: open it anew")
        if self._fd < 0:
            raise LedgerError(f"{self.path} is closed")

    # --- words ---------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """A number that grows with every change by anybody."""
        return sum(self._words[_CHANGES:_EPOCHS])

    def store(self, slot: int, **values: int) -> None:
        """Write figures of a slot that this process owns, each with a store of its own, in the order given."""
        for name, value in values.items():
            self._store(_ROWS + slot * _ROW_WORDS + _FIGURE_AT[name], value, slot, name)
            self._count_change(slot)

    def store_quietly(self, slot: int, **values: int) -> None:
        """Like :meth:`store` for figures that no identity and nobody's decision rests on: no change is counted."""
        for name, value in values.items():
            self._store(_ROWS + slot * _ROW_WORDS + _FIGURE_AT[name], value, slot, name)

    def _store(self, at: int, value: int, slot: int, name: str) -> None:
        self._prepare(slot, name)
        self._words[at] = value
        self._fence()

    def _prepare(self, slot: int, name: str) -> None:
        self._check_pid()
        if self._on_write is not None:
            self._on_write(slot, name)

    def _count_change(self, slot: int) -> None:
        self._store(_CHANGES + slot, self._words[_CHANGES + slot] + 1, slot, "changes")

    def _fence(self) -> None:
        # What was before is seen before what comes after, by loads and stores: x86 needs one locked instruction for
        # it, Arm a store-release followed by a load-acquire, which is one unlock followed by one lock.
        with self._barrier:
            pass
        with self._barrier:
            pass

    # --- slots ---------------------------------------------------------------------------------------------------

    def claim(self, figures: Figures) -> int:
        """Make a free slot this process's own, with these figures, not yet occupied: nobody counts it.

        Raises:
            LedgerError: All slots are taken.
        """
        self.sweep()
        for slot in range(SLOTS):
            if slot in self.owned or not self._locks.take(_CLAIM + slot):
                continue
            if self._words[_TENURES + slot] % 2 or not self._locks.take(_LIFE + slot):  # a dying one may drop it later
                self._locks.release(_CLAIM + slot)
                continue
            self.owned.add(slot)
            self._write_figures(slot, figures)
            return slot
        raise LedgerError(f"all {SLOTS} slots of {self.path} are taken: stop a member")

    def occupy(self, slot: int) -> int:
        """From now on everybody counts the slot. Returns its tenure."""
        return self._turn_tenure(slot)

    def vacate(self, slot: int) -> None:
        """From now on nobody counts the slot; it stays this process's own."""
        self._turn_tenure(slot)

    def free(self, slot: int) -> None:
        """Give the slot up."""
        if self._words[_TENURES + slot] % 2:
            self.vacate(slot)
        self.owned.discard(slot)
        self._locks.release(_LIFE + slot)
        self._locks.release(_CLAIM + slot)

    def tenure(self, slot: int) -> int:
        """Odd while the slot is occupied; another for every member that occupies it."""
        return int(self._words[_TENURES + slot])

    def sweep(self) -> int:
        """Free the slots of the dead. Returns how many there were."""
        swept = 0
        for slot in self._occupied():
            if slot not in self.owned and self._locks.take(_CLAIM + slot):  # the owner, if any, held it for life
                if self._words[_TENURES + slot] % 2:
                    self._turn_tenure(slot)
                    swept += 1
                self._locks.release(_CLAIM + slot)
        return swept

    def _turn_tenure(self, slot: int) -> int:
        tenure: int = self._words[_TENURES + slot] + 1
        self._store(_TENURES + slot, tenure, slot, "tenure")
        self._count_change(slot)
        return tenure

    def _occupied(self) -> list[int]:
        return [slot for slot, tenure in enumerate(self._words[_TENURES : _TENURES + SLOTS].tolist()) if tenure % 2]

    def _alive(self, slot: int) -> bool:
        return slot in self.owned or self._locks.holder(_LIFE + slot) is not None

    def _write_figures(self, slot: int, figures: Figures) -> None:
        at = 8 * (_ROWS + slot * _ROW_WORDS)
        raw = struct.pack(f"={len(figures)}Q", *figures)
        self._prepare(slot, "figures")
        self._bytes[at : at + len(raw)] = raw  # in any order: nobody reads a slot that is not occupied
        self._fence()

    def write_texts(self, slot: int, texts: Texts) -> None:
        """Write the texts of a slot that this process owns and that is not occupied."""
        self._prepare(slot, "texts")
        for text, span in zip(texts, self._text_spans(slot), strict=True):
            self._bytes[span] = _padded(text, span.stop - span.start)
        self._fence()

    def texts(self, slot: int) -> Texts:
        """The texts of a slot; of the tenure that it has both before and after."""
        raw = (bytes(self._bytes[span]) for span in self._text_spans(slot))
        return Texts(*(text.rstrip(b"\0").decode(errors="replace") for text in raw))

    def _text_spans(self, slot: int) -> Iterator[slice]:
        at = 8 * (_ROWS + slot * _ROW_WORDS + _TEXTS_AT)
        for num_words in _TEXT_WORDS.values():
            yield slice(at, at + 8 * num_words)
            at += 8 * num_words

    # --- readings ------------------------------------------------------------------------------------------------

    def read(self, measure: Callable[[], int] | None = None) -> tuple[list[Row], int | None]:
        """All live rows as of one moment, and what ``measure`` returned at that moment.

        The measured value (the driver's free bytes) is of the same moment in this sense: no member stored anything
        while it was taken, so pages it may have missed are still in somebody's lease and not yet in ``created``.

        Raises:
            LedgerError: The rows changed at every one of very many attempts.
        """
        rows: dict[int, Row] = {}
        seen = [-1] * (2 * SLOTS)
        measured: int | None = None
        for _ in range(_READ_ATTEMPTS):
            counters = self._counters()
            if counters == seen:
                return [row for _, row in sorted(rows.items()) if self._alive(row.slot)], measured
            for slot in range(SLOTS):
                if counters[slot] != seen[slot] or counters[SLOTS + slot] != seen[SLOTS + slot]:
                    self._read_row(slot, rows)
            self._fence()
            seen = counters
            measured = measure() if measure is not None else None
        raise LedgerError(f"{self.path} changed at each of {_READ_ATTEMPTS} attempts to read it")

    def _counters(self) -> list[int]:
        counters: list[int] = self._words[_CHANGES:_EPOCHS].tolist()
        self._fence()
        return counters

    def _read_row(self, slot: int, rows: dict[int, Row]) -> None:
        tenure: int = self._words[_TENURES + slot]
        if tenure % 2 == 0:
            rows.pop(slot, None)
            return
        at = _ROWS + slot * _ROW_WORDS
        figures = Figures._make(self._words[at : at + len(Figures._fields)].tolist())
        revision, limits = self._limits(slot)
        rows[slot] = Row(slot, tenure, figures, revision, limits if limits.tenure == tenure else None)

    def _limits(self, slot: int) -> tuple[int, Limits]:
        revision, record = divmod(self._words[_REVISIONS + slot], 2)
        at = self._record_at(slot, record)
        return revision, Limits._make(self._words[at : at + len(Limits._fields)].tolist())

    def _record_at(self, slot: int, record: int) -> int:
        return _ROWS + slot * _ROW_WORDS + _LIMITS_AT + 8 * record

    # --- turns ---------------------------------------------------------------------------------------------------

    def _epoch(self) -> int:
        epoch = max(self._words[_EPOCHS : _EPOCHS + SLOTS].tolist())
        self._fence()
        return int(epoch)

    @contextmanager
    def turn(self, slot: int) -> Iterator[Callable[[], bool]]:
        """A turn at admission, on behalf of an owned slot. Yields the question whether it is still the current one.

        Raises:
            LedgerError: No turn in 5 s of trying, though stopped holders are passed over.
        """
        epoch = self._take_turn(slot)
        try:
            yield lambda: self._epoch() == epoch
        finally:
            self._locks.release(_TABLE + epoch % _TABLE_BYTES)

    def _take_turn(self, slot: int) -> int:
        began = waiting_since = self._clock.seconds()
        waited_for = self._epoch()
        for _ in range(_TURN_ATTEMPTS):  # not seconds: a process that was stopped meanwhile has not waited
            epoch = self._epoch()
            if self._locks.take(_TABLE + epoch % _TABLE_BYTES):
                return epoch
            now = self._clock.seconds()
            if epoch != waited_for:
                waited_for, waiting_since = epoch, now
            if now - waiting_since >= STEAL_AFTER_SECONDS:
                self._store(_EPOCHS + slot, epoch + 1, slot, "epoch")
            else:
                self._clock.sleep(_POLL_SECONDS)
        waited = self._clock.seconds() - began
        raise LedgerError(f"no turn at {self.path} within {_TURN_ATTEMPTS} attempts, {waited:.1f} s (epoch {epoch})")

    # --- operators -----------------------------------------------------------------------------------------------

    @contextmanager
    def operating(self, deadline_seconds: float = 2.0) -> Iterator[None]:
        """Be the one operator.

        Raises:
            LedgerError: Another is, for the whole of the deadline; its process is named.
        """
        began = self._clock.seconds()
        while not self._locks.take(_OPERATOR):
            if self._clock.seconds() - began > deadline_seconds:
                holder = self._locks.holder(_OPERATOR)
                raise LedgerError(
                    f"process {holder} is changing limits in {self.path} and did not finish within {deadline_seconds} s"
                )
            self._clock.sleep(_POLL_SECONDS)
        try:
            yield
        finally:
            self._locks.release(_OPERATOR)

    def next_revision(self) -> int:
        """One more than the newest of any slot. Only within :meth:`operating`."""
        return 1 + max(self._words[_REVISIONS:_EPOCHS].tolist()) // 2

    def commit_limits(self, slot: int, revision: int, limits: Limits) -> None:
        """Put limits in force. Only within :meth:`operating`."""
        record = 1 - self._words[_REVISIONS + slot] % 2
        at = self._record_at(slot, record)
        for offset, (name, value) in enumerate(limits._asdict().items()):
            self._store(at + offset, value, slot, f"limits.{name}")
        self._store(_REVISIONS + slot, 2 * revision + record, slot, "revision")


def _padded(text: str, num_bytes: int) -> bytes:
    """UTF-8, cut where it does not fit, at a whole character."""
    return text.encode()[: num_bytes - 1].decode(errors="ignore").encode().ljust(num_bytes, b"\0")


def text_fits(text: str, field: str) -> bool:
    """Whether a text is kept whole in its field of :class:`Texts`."""
    return len(text.encode()) < 8 * _TEXT_WORDS[field]


def _check_directory(directory: Path) -> None:
    status = os.stat(directory)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if status.st_uid not in (os.geteuid(), 0):
        raise LedgerError(
            f"{directory} belongs to user {status.st_uid}, and this is user {os.geteuid()}. "
            f"Engines that share a device run as one user: set KVCACHED_RUNTIME_DIR to a directory of your own."
        )


def _open_or_create(path: Path, device_id: str, total_bytes: int | None, headroom_bytes: int) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        if total_bytes is None:
            raise
    with suppress(FileExistsError):
        return _create(path, device_id, total_bytes, headroom_bytes)
    return os.open(path, flags)  # another process was faster


def _create(path: Path, device_id: str, total_bytes: int, headroom_bytes: int) -> int:
    """Make the file complete, then give it its name: a process killed half-way leaves nothing."""
    fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, _SIZE_BYTES)
        header = struct.pack("=8Q", _MAGIC, _VERSION, _SIZE_BYTES, total_bytes, headroom_bytes, 0, 0, 0)
        os.pwrite(fd, header + _padded(device_id, 8 * _DEVICE_ID_WORDS), 0)
        os.fsync(fd)  # a directory that survives a power failure must not keep the name of an empty file
        directory = os.open(path.parent, os.O_DIRECTORY | os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.link(f"/proc/self/fd/{fd}", path.name, dst_dir_fd=directory)
        finally:
            os.close(directory)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_file(fd: int, path: Path, device_id: str) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise LedgerError(f"{path} is not a regular file: remove it")
    if status.st_uid != os.geteuid():
        raise LedgerError(f"{path} belongs to user {status.st_uid}, and this is user {os.geteuid()}")
    header = os.pread(fd, 8 * (_DEVICE_ID_AT + _DEVICE_ID_WORDS), 0)
    remedy = "Stop the engines that use it, if any, and remove it."
    if len(header) < 8 * (_DEVICE_ID_AT + _DEVICE_ID_WORDS):
        raise LedgerError(f"{path} is truncated: {status.st_size} bytes. {remedy}")
    magic, version, size_bytes = struct.unpack_from("=3Q", header)
    if magic != _MAGIC:
        raise LedgerError(f"{path} is not a ledger: it begins with {header[:8]!r}. {remedy}")
    if version != _VERSION:
        raise LedgerError(f"{path} has format {version}, and this kvcached reads format {_VERSION}. {remedy}")
    if size_bytes != _SIZE_BYTES or status.st_size != _SIZE_BYTES:
        raise LedgerError(f"{path} is truncated: {status.st_size} of {_SIZE_BYTES} bytes. {remedy}")
    written = header[8 * _DEVICE_ID_AT :].rstrip(b"\0").decode(errors="replace")
    if written != device_id:
        raise LedgerError(f"{path} is the ledger of device {written!r}, not of {device_id!r}. {remedy}")


def _refusal(error: OSError, path: Path, device_id: str) -> str:
    if isinstance(error, FileNotFoundError):
        return f"no ledger of device {device_id!r} in {path.parent}: no engine has used the device with this directory"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space for {path}: it needs {_SIZE_BYTES} bytes, {error.strerror}"
    if error.errno == errno.EOPNOTSUPP:
        return f"the file system of {path.parent} has no O_TMPFILE: set KVCACHED_RUNTIME_DIR to one in memory (tmpfs)"
    return (
        f"{path} cannot be opened: {error.strerror}. "
        f"KVCACHED_RUNTIME_DIR is a directory that this user (uid {os.geteuid()}) owns and may write to."
    )
