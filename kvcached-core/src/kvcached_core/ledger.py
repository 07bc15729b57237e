"""The shared record of who may use how much of one device.

A :class:`Ledger` is one process's view of one device's file; an :class:`~kvcached_core.account.Account` is one member's
slot in it. There is no daemon: every process reads the same rows and does the same arithmetic (``admission.py``,
``sharing.py``). What holds when a process is stopped or killed between any two writes, and why, is at the top of
``ledger_file.py``.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from kvcached_core.account import Account
from kvcached_core.admission import Claim, Reading
from kvcached_core.errors import ConfigError, LedgerError
from kvcached_core.ledger_file import (
    SYSTEM_CLOCK,
    Clock,
    Figures,
    LedgerFile,
    LedgerGone,
    Limits,
    OnWrite,
    Row,
    Texts,
    device_ids,
    ledger_path,
    text_fits,
)
from kvcached_core.ledger_statistics import LedgerStatistics, member_statistics
from kvcached_core.sizes import format_bytes

HOUSEKEEPING_SECONDS = 0.5  # sweeping the dead, looking whether the path still leads here
TRIM_SECONDS = 10.0

_MAX_NAME_BYTES = 55  # leaves room for a suffix

logger = logging.getLogger(__name__)


class Ledger:
    """This process's view of one device's ledger. Safe to use from several threads.

    Attributes:
        device_id: UUID of the device, or ``host``.
        headroom_bytes: What this process wants left ungranted; the largest of the live members' counts.
    """

    # One per process and file, since record locks belong to both together.
    _by_path: ClassVar[dict[Path, Ledger]] = {}
    _by_path_lock: ClassVar[threading.Lock] = threading.Lock()
    _inherited: ClassVar[list[Ledger]] = []

    def __init__(
        self,
        open_file: Callable[[int | None, int], LedgerFile],
        *,
        total_bytes: int | None,
        headroom_bytes: int = 0,
        driver_free: Callable[[], int] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """For tests that stand in for the kernel; everybody else calls :meth:`open`.

        Args:
            open_file: Opens the file, given total and headroom; again after it was lost.
            total_bytes, headroom_bytes, driver_free: See :meth:`open`.
            clock: The time.
        """
        self._open_file = open_file
        self._file = open_file(total_bytes, headroom_bytes)
        self._gone: str | None = None
        self._users = 1
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._accounts: list[Account] = []
        self._asked_total = total_bytes
        self._driver_free = driver_free
        self._clock = clock
        self._next_housekeeping = 0.0
        self.device_id = self._file.device_id
        self.headroom_bytes = headroom_bytes
        try:
            self._check_total(self._file.read()[0])
        except BaseException:
            self._file.close()
            raise

    @classmethod
    def open(
        cls,
        device_id: str,
        total_bytes: int | None,
        *,
        runtime_dir: Path,
        headroom_bytes: int = 0,
        driver_free: Callable[[], int] | None = None,
        on_write: OnWrite | None = None,
    ) -> Ledger:
        """The ledger of a device. Within one process, calls for one file return one object, with one user more.

        Args:
            device_id: UUID of the device, or ``host``.
            total_bytes: Of the device; None if the ledger must exist already.
            runtime_dir: The directory of the ledgers; made, with mode 0700, where there is none.
            headroom_bytes: Left ungranted on the device; the largest of the users' counts.
            driver_free: Asks the driver of this very device for its free bytes. It is called within a reading, so
                that no page is missed between the two. None where only members use the device (the host budget): then
                what they do not hold is free.
            on_write: For tests: called with (slot, word) before every store.

        Raises:
            LedgerError: The file cannot be used, and why; or live members count with another total.
        """
        path = Path(os.path.realpath(ledger_path(runtime_dir, device_id)))

        def open_file(total_bytes: int | None, headroom_bytes: int) -> LedgerFile:
            return LedgerFile.open(path, device_id, total_bytes, headroom_bytes, on_write=on_write)

        with cls._by_path_lock:
            ledger = cls._by_path.get(path)
            if ledger is not None:
                ledger._add_user(total_bytes, headroom_bytes, driver_free)
                return ledger
            ledger = cls(open_file, total_bytes=total_bytes, headroom_bytes=headroom_bytes, driver_free=driver_free)
            cls._by_path[path] = ledger
            return ledger

    def _add_user(self, total_bytes: int | None, headroom_bytes: int, driver_free: Callable[[], int] | None) -> None:
        if total_bytes is not None and self._asked_total not in (None, total_bytes):
            raise LedgerError(
                f"this process counts {self.device_id} as {self._asked_total} bytes already, not as {total_bytes}"
            )
        self._asked_total = self._asked_total if total_bytes is None else total_bytes
        self._driver_free = self._driver_free or driver_free
        self.headroom_bytes = max(self.headroom_bytes, headroom_bytes)
        self._users += 1

    @staticmethod
    def devices(runtime_dir: Path) -> list[str]:
        """The ids of the devices that have a ledger in a directory, sorted."""
        return device_ids(runtime_dir)

    @classmethod
    def _after_fork_in_child(cls) -> None:
        # The parent's ledgers are unusable here (every store checks the process). They are kept, not closed: closing
        # a descriptor of a file drops all locks of this process on it, also those on one it opens later.
        for ledger in cls._by_path.values():
            ledger._lock = threading.RLock()  # another thread of the parent may hold it, and does not exist here
            cls._inherited.append(ledger)
        cls._by_path = {}
        cls._by_path_lock = threading.Lock()

    # --- reading -------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Differs from before whenever anybody has changed anything; -1 while the file is gone. Costs about 10 us.

        It asks the kernel for the file's size (one ``fstat``): touching a truncated file's mapping ends the process.
        """
        with self._lock:
            return self._file.generation if self._usable() else -1

    def snapshot(self) -> LedgerStatistics:
        """The device and its live members at one moment.

        Raises:
            LedgerError: The file was lost and there is no other in its place.
        """
        with self._lock:
            self._require()
            while True:
                rows, reading = self._read()
                texts = {row.slot: self._file.texts(row.slot) for row in rows}
                if all(self._file.tenure(row.slot) == row.tenure for row in rows):
                    break
            now_ns = self._clock.nanoseconds()
            return LedgerStatistics(
                device_id=self.device_id,
                total_bytes=reading.total_bytes,
                headroom_bytes=reading.headroom_bytes,
                driver_free_bytes=max(0, reading.driver_free_bytes),
                unleased_bytes=max(0, reading.unleased_bytes),
                generation=self._file.generation,
                members=tuple(
                    member_statistics(row, texts[row.slot], reading, now_ns) for row in rows if row.figures.joined_ns
                ),
            )

    def _read(self) -> tuple[list[Row], Reading]:
        rows, driver_free = self._file.read(self._driver_free)
        now_ns = self._clock.nanoseconds()
        total_bytes = min((row.figures.total_bytes for row in rows), default=self._file.first_total_bytes)
        headroom_bytes = max((row.figures.headroom_bytes for row in rows), default=self._file.first_headroom_bytes)
        if driver_free is None:
            driver_free = _driver_free_of(rows, total_bytes)
        return rows, Reading([Claim.of(row, now_ns) for row in rows], total_bytes, headroom_bytes, driver_free)

    # --- members -------------------------------------------------------------------------------------------------

    def join(
        self,
        name: str,
        *,
        engine: str,
        rank: int = 0,
        floor_bytes: int = 0,
        ceiling_bytes: int | None = None,
        weight: float = 1.0,
        engine_id: str = "",
        model: str = "",
    ) -> Account:
        """Become a member: one slot, held until :meth:`Account.leave` or the end of this process.

        Args:
            name: For people. Where a live member of another ``engine_id`` has it, it gets a suffix (``-2``), and the
                account and the log say so.
            engine: ``vllm`` or ``sglang``.
            rank: Of this process in its engine.
            floor_bytes: What it gets back whenever it needs it.
            ceiling_bytes: What it never exceeds; None: total less headroom.
            weight: Its part of what is contended.
            engine_id: Common to the ranks of one engine; made up if empty.
            model: For people.

        Raises:
            ConfigError: A name or id that is empty or too long, or a floor above the ceiling.
            LedgerError: No slot is left, or live members count with another total.
        """
        if not 0 < len(name.encode()) <= _MAX_NAME_BYTES or not name.isprintable():
            raise ConfigError(f"{name!r} cannot name a member: 1 to {_MAX_NAME_BYTES} printable bytes")
        if not text_fits(engine_id, "member_id"):
            raise ConfigError(f"{engine_id!r} is too long for the id of an engine")
        if self._asked_total is None:
            raise LedgerError(f"to join the ledger of {self.device_id} the device's total bytes must be known")
        ceiling_bytes = self._asked_total - self.headroom_bytes if ceiling_bytes is None else ceiling_bytes
        _check_limits(name, floor_bytes, ceiling_bytes, weight)
        texts = Texts(name=name, engine=engine, member_id=engine_id or uuid.uuid4().hex, model=model)
        figures = Figures(
            pid=os.getpid(),
            rank=rank,
            heartbeat_ns=self._clock.nanoseconds(),
            total_bytes=self._asked_total,
            headroom_bytes=self.headroom_bytes,
            floor_bytes=floor_bytes,
            ceiling_bytes=ceiling_bytes,
            weight_micros=max(1, round(weight * 1e6)),
        )
        with self._lock:
            self._require()
            account = Account(self, texts, figures)
            self._accounts.append(account)
            return account

    def _enter(self, texts: Texts, figures: Figures) -> tuple[int, str]:
        """Occupy a slot under a name that is unique among the living. Returns slot and name.

        It is not a member yet: one that has to withdraw here was seen by those that joined meanwhile, and nobody else.
        """
        slot = self._file.claim(figures)
        try:
            while True:
                with self._file.turn(slot) as is_current:
                    rows, _ = self._file.read()
                    self._check_total(rows)
                    name = self._unique_name(texts, rows)
                    self._file.write_texts(slot, texts._replace(name=name))
                    self._file.occupy(slot)
                    if is_current():
                        return slot, name
                    self._file.vacate(slot)
        except BaseException:
            self._file.free(slot)
            raise

    def _unique_name(self, texts: Texts, rows: Sequence[Row]) -> str:
        others = [self._file.texts(row.slot) for row in rows]
        taken = {other.name for other in others if other.member_id != texts.member_id}
        suffixed = (f"{texts.name}-{number}" for number in range(2, len(taken) + 3))
        return next(name for name in (texts.name, *suffixed) if name not in taken)

    def _check_total(self, rows: Sequence[Row]) -> None:
        for row in rows:
            counted = row.figures.total_bytes
            if self._asked_total not in (None, counted):
                raise LedgerError(
                    f"{self.device_id} is {self._asked_total} bytes here, but {self._file.texts(row.slot).name} "
                    f"(process {row.figures.pid}) counts with {counted}. Accepted: {counted}, as long as it runs; "
                    f"on the host this is KVCACHED_HOST_BUDGET."
                )

    # --- operators -----------------------------------------------------------------------------------------------

    def set_limits(
        self,
        name: str,
        *,
        floor_bytes: int | None = None,
        ceiling_bytes: int | None = None,
        weight: float | None = None,
    ) -> int:
        """Change a member's limits; None leaves one as it is. In force when this returns; the member follows.

        A member with several ranks on this device gets each rank's even part of floor and ceiling.

        Returns:
            The revision: one more than that of the last change by any operator on this device.

        Raises:
            ConfigError: Limits that cannot work, with the values.
            LedgerError: No such member, or another operator is in the way.
        """

        def changed(claim: Claim, limits: Limits, num_ranks: int, _: int) -> Limits:
            floor = claim.floor_bytes if floor_bytes is None else floor_bytes // num_ranks
            ceiling = claim.ceiling_bytes if ceiling_bytes is None else ceiling_bytes // num_ranks
            kept = claim.weight if weight is None else weight
            _check_limits(name, floor, ceiling, kept)
            return limits._replace(floor_bytes=floor, ceiling_bytes=ceiling, weight_micros=max(1, round(kept * 1e6)))

        with self._lock:
            if floor_bytes is not None:
                self._check_floors(name, floor_bytes)
            return self._command(name, changed)

    def request_trim(self, name: str, num_bytes: int, *, deadline_seconds: float = TRIM_SECONDS) -> int:
        """Ask a member to trim so much of its free and cached memory, within a time after which it forgets it.

        Returns:
            The revision; the member's ``trim_revision`` reaches it when it has seen the request, and its
            ``trim_left_bytes`` says how far it is.

        Raises:
            LedgerError: No such member, or another operator is in the way.
        """

        def changed(_: Claim, limits: Limits, num_ranks: int, revision: int) -> Limits:
            until_ns = self._clock.nanoseconds() + int(deadline_seconds * 1e9)
            return limits._replace(trim_revision=revision, trim_bytes=num_bytes // num_ranks, trim_until_ns=until_ns)

        with self._lock:
            return self._command(name, changed)

    def _command(self, name: str, changed: Callable[[Claim, Limits, int, int], Limits]) -> int:
        self._require()
        with self._file.operating():
            rows, reading = self._read()
            mine = [row for row in rows if row.figures.joined_ns and self._file.texts(row.slot).name == name]
            if not mine:
                names = ", ".join(sorted({self._file.texts(row.slot).name for row in rows})) or "none"
                raise LedgerError(f"no member {name!r} on {self.device_id}. Members: {names}")
            revision = self._file.next_revision()
            claims = [reading.claim(row.slot) for row in mine]
            now = [row.limits or _own_limits(row, claim) for row, claim in zip(mine, claims, strict=True)]
            then = [changed(claim, limits, len(mine), revision) for claim, limits in zip(claims, now, strict=True)]
            for row, limits in zip(mine, then, strict=True):
                self._file.commit_limits(row.slot, revision, limits)
            return revision

    def _check_floors(self, name: str, floor_bytes: int) -> None:
        statistics = self.snapshot()
        others = sum(member.floor_bytes for member in statistics.members if member.name != name)
        static = sum(max(member.static_lease_bytes, member.static_used_bytes) for member in statistics.members)
        left = statistics.total_bytes - statistics.headroom_bytes - static - others
        if floor_bytes > left:
            raise ConfigError(
                f"a floor of {format_bytes(floor_bytes)} for {name} cannot be kept: at most {format_bytes(left)} is "
                f"left of {format_bytes(statistics.total_bytes)} beside headroom, static leases and others' floors"
            )

    # --- the file ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """One user less; the last one ends all accounts that this process still has here."""
        with Ledger._by_path_lock, self._lock:
            self._users -= 1
            if self._users or self._pid != os.getpid():
                return
            for account in list(self._accounts):
                account._end()
            self._file.close()
            if Ledger._by_path.get(self._file.path) is self:
                del Ledger._by_path[self._file.path]

    def _usable(self) -> bool:
        """Whether the file may be touched now; says once if it was lost."""
        if self._gone is not None:
            return False
        try:
            self._file.check()
        except LedgerGone as error:
            self._lose(error)
        return self._gone is None

    def _require(self) -> None:
        """Have the file that the path leads to now, or raise."""
        self._check_path()
        if self._gone is not None:
            self._reopen()
        if self._gone is not None:
            raise LedgerError(self._gone)

    def _check_path(self) -> None:
        if self._usable():
            try:
                self._file.check_path()
            except LedgerGone as error:
                self._lose(error)

    def _lose(self, error: LedgerGone) -> None:
        self._gone = str(error)
        for account in self._accounts:
            logger.warning("%s. %s goes on with what it holds and joins again when it can.", error, account.name)

    def _keep_house(self) -> None:
        """Sweep the dead; notice a lost file; take part again once there is one."""
        now = self._clock.seconds()
        if now < self._next_housekeeping:
            return
        self._next_housekeeping = now + HOUSEKEEPING_SECONDS
        self._check_path()
        if self._gone is None:
            self._file.sweep()
        else:
            self._reopen()
        for account in self._accounts:
            account._register()

    def _reopen(self) -> None:
        try:
            file = self._open_file(self._asked_total, self.headroom_bytes)
        except LedgerError as error:
            if self._accounts and str(error) != self._gone:
                logger.warning("The ledger of %s cannot be joined again yet: %s", self.device_id, error)
            self._gone = str(error)
            return
        self._file.close()
        self._file = file
        self._gone = None
        for account in self._accounts:
            account.registered = False


def _driver_free_of(rows: Sequence[Row], total_bytes: int) -> int:
    """What the driver told a member last; where there is no driver, what no member uses."""
    told = [row.figures for row in rows if row.figures.driver_told]
    if told:
        return max(told, key=lambda figures: figures.heartbeat_ns).driver_free_bytes
    return total_bytes - sum(row.figures.created_bytes + row.figures.static_used_bytes for row in rows)


def _own_limits(row: Row, claim: Claim) -> Limits:
    figures = row.figures
    return Limits(row.tenure, claim.floor_bytes, claim.ceiling_bytes, figures.weight_micros)


def _check_limits(name: str, floor_bytes: int, ceiling_bytes: int, weight: float) -> None:
    if not 0 <= floor_bytes <= ceiling_bytes:
        raise ConfigError(
            f"{name}: a floor of {format_bytes(floor_bytes)} and a ceiling of {format_bytes(ceiling_bytes)} do not go "
            f"together. Accepted: 0 to the ceiling"
        )
    if not 0 < weight <= 1000:
        raise ConfigError(f"{name}: weight {weight}. Accepted: above 0, at most 1000")


os.register_at_fork(after_in_child=Ledger._after_fork_in_child)
