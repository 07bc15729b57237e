"""The shared record of who may use how much of one device.

A :class:`Ledger` is one process's view of one device's file; an :class:`Account` is one member's slot in it. There is
no daemon: every process reads the same rows and does the same arithmetic (``admission.py``, ``sharing.py``). What holds
when a process is stopped or killed between any two writes, and why, is at the top of ``ledger_file.py``.

Order of writes. Growth: lease, then the driver, then ``created``. Shrinking: ``destroyed``, then the driver, then
``give_back``. At no instant can the same bytes be granted twice.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvcached_core.admission import Claim, Reading
from kvcached_core.errors import ConfigError, InvariantError, LedgerError
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
from kvcached_core.sizes import format_bytes

HEARTBEAT_SECONDS = 0.1
HOUSEKEEPING_SECONDS = 0.5  # sweeping the dead, looking whether the path still leads here
STATIC_POLL_SECONDS = 0.02
TRIM_SECONDS = 10.0

_MAX_NAME_BYTES = 55  # leaves room for a suffix

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Allowance:
    """What one member may and should hold now, in bytes.

    Attributes:
        may_hold_bytes: Its lease plus what admission would grant now.
        target_bytes: What it should hold at most, free and cached memory going first: below its ceiling only while
            somebody wants more than is left.
        ceiling_bytes: What it may hold at most, at the price of running requests: the ceiling that is set, less what
            others need for their floors and cannot get otherwise.
        trim_bytes: What an operator asked it to trim and it has not trimmed yet.
        yielded_bytes: What others' floors take from the ceiling that is set: ``ceiling_bytes`` is without it.
    """

    may_hold_bytes: int
    target_bytes: int
    ceiling_bytes: int
    trim_bytes: int
    yielded_bytes: int = 0


@dataclass(frozen=True)
class MemberStatistics:
    """One member on one device. ``limits_followed``: its lease is within its newest ceiling.

    ``state``: ``loading`` (has not served yet), ``waiting`` (for a static lease), ``serving``, ``idle``, ``stopped``
    (alive, but silent for more than two seconds).
    """

    name: str
    member_id: str
    engine: str
    model: str
    rank: int
    slot: int
    pid: int
    state: str
    floor_bytes: int
    ceiling_bytes: int
    weight: float
    limits_revision: int
    limits_followed: bool
    static_lease_bytes: int
    static_used_bytes: int
    static_unmet_bytes: int
    lease_bytes: int
    resident_bytes: int
    in_use_bytes: int
    free_bytes: int
    cached_bytes: int
    demand_bytes: int
    unmet_bytes: int
    target_bytes: int
    trim_revision: int
    trim_left_bytes: int
    heartbeat_age_seconds: float
    age_seconds: float
    maps_total: int
    unmaps_total: int
    mapped_bytes_total: int
    unmapped_bytes_total: int
    create_failures_total: int


@dataclass(frozen=True)
class LedgerStatistics:
    """One device at one moment: the only source of what the command line, Prometheus and the log say.

    ``unleased_bytes`` is what could be granted now, 0 where outsiders took even the headroom. In every snapshot a
    member's ``resident_bytes`` is at most its ``lease_bytes``, and no number is negative.
    """

    device_id: str
    total_bytes: int
    headroom_bytes: int
    driver_free_bytes: int
    unleased_bytes: int
    generation: int
    members: tuple[MemberStatistics, ...]

    def to_json(self) -> dict[str, Any]:
        """The same, as what ``json.dumps`` takes."""
        return asdict(self)


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
            return LedgerStatistics(
                device_id=self.device_id,
                total_bytes=reading.total_bytes,
                headroom_bytes=reading.headroom_bytes,
                driver_free_bytes=max(0, reading.driver_free_bytes),
                unleased_bytes=max(0, reading.unleased_bytes),
                generation=self._file.generation,
                members=tuple(self._member(row, texts[row.slot], reading) for row in rows if row.figures.joined_ns),
            )

    def _member(self, row: Row, texts: Texts, reading: Reading) -> MemberStatistics:
        figures, claim, now_ns = row.figures, reading.claim(row.slot), self._clock.nanoseconds()
        return MemberStatistics(
            name=texts.name,
            member_id=texts.member_id,
            engine=texts.engine,
            model=texts.model,
            rank=figures.rank,
            slot=row.slot,
            pid=figures.pid,
            state=_state(claim),
            floor_bytes=claim.floor_bytes,
            ceiling_bytes=claim.ceiling_bytes,
            weight=claim.weight,
            limits_revision=row.revision if row.limits else 0,
            limits_followed=row.limits is None or figures.followed_revision >= row.revision,
            static_lease_bytes=figures.static_lease_bytes,
            static_used_bytes=figures.static_used_bytes,
            static_unmet_bytes=figures.static_unmet_bytes,
            lease_bytes=figures.lease_bytes,
            resident_bytes=figures.created_bytes,
            in_use_bytes=max(0, figures.created_bytes - figures.free_bytes - figures.cached_bytes),
            free_bytes=figures.free_bytes,
            cached_bytes=figures.cached_bytes,
            demand_bytes=figures.demand_bytes,
            unmet_bytes=figures.unmet_bytes,
            target_bytes=reading.target_bytes(row.slot),
            trim_revision=figures.trim_revision,
            trim_left_bytes=figures.trim_left_bytes,
            heartbeat_age_seconds=max(0, now_ns - figures.heartbeat_ns) / 1e9,
            age_seconds=max(0, now_ns - figures.joined_ns) / 1e9,
            maps_total=figures.maps,
            unmaps_total=figures.unmaps,
            mapped_bytes_total=figures.mapped_bytes,
            unmapped_bytes_total=figures.unmapped_bytes,
            create_failures_total=figures.create_failures,
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


class Account:
    """One slot of one ledger, owned by this process: what one member holds on one device.

    While the file is gone, the account keeps count for itself, grants nothing, and ``heartbeat`` publishes everything
    anew as soon as there is a file again.

    Attributes:
        asked_name: The name asked for.
        name: The name it goes by on this device; another than ``asked_name`` if that was taken.
        member_id: Common to the ranks of one engine.
        slot: Its place in the file; another after it had to join again.
        registered: Whether others see it.
    """

    def __init__(self, ledger: Ledger, texts: Texts, figures: Figures) -> None:
        self._ledger = ledger
        self._texts = texts
        self._figures: dict[str, int] = figures._asdict()
        self._tenure = 0
        self._next_heartbeat = 0.0
        self._trim_until_ns = 0
        self._refusal = ""
        self.asked_name = texts.name
        self.member_id = texts.member_id
        self.name = texts.name
        self.slot = -1
        self.registered = False
        self._enter()
        if self.name != self.asked_name:
            logger.warning("Another member of %s is named %s: this one is %s", ledger.device_id, texts.name, self.name)

    def __repr__(self) -> str:
        lease, created = format_bytes(self.lease_bytes), format_bytes(self.created_bytes)
        return f"<Account {self.name} on {self._ledger.device_id}: lease {lease}, created {created}>"

    @property
    def generation(self) -> int:
        """See :attr:`Ledger.generation`."""
        return self._ledger.generation

    @property
    def lease_bytes(self) -> int:
        """What it holds."""
        return self._figures["lease_bytes"]

    @property
    def created_bytes(self) -> int:
        """The part of the lease that exists as pages."""
        return self._figures["created_bytes"]

    def lease(self, asked_bytes: int) -> int:
        """Ask for more. Returns what is granted now, 0 to ``asked_bytes``: a shortage is a value.

        Raises:
            LedgerError: No turn at admission within the deadline, or this process was forked from the owner.
        """
        if asked_bytes < 0:
            raise InvariantError(f"{self!r} asks for {asked_bytes} bytes")
        with self._ledger._lock:
            if not asked_bytes or not self._present():
                return 0
            return self._grant(
                "lease_bytes", "proposed_bytes", lambda reading: reading.room_bytes(self.slot, asked_bytes)
            )

    def created(self, num_bytes: int) -> None:
        """So many bytes of pages now exist that did not. They were leased.

        Raises:
            InvariantError: They were not. Nothing has changed.
        """
        with self._ledger._lock:
            created = self.created_bytes + num_bytes
            if num_bytes < 0 or created > self.lease_bytes:
                raise InvariantError(f"{self!r} created {num_bytes} bytes beyond its lease")
            self._set(created_bytes=created)
            self._count(maps=1, mapped_bytes=num_bytes)

    def create_failed(self) -> None:
        """The driver refused pages that were leased."""
        with self._ledger._lock:
            self._count(create_failures=1)

    def destroyed(self, num_bytes: int) -> None:
        """So many bytes of pages are about to be removed. They stay leased until :meth:`give_back`.

        Raises:
            InvariantError: There are not so many. Nothing has changed.
        """
        with self._ledger._lock:
            if not 0 <= num_bytes <= self.created_bytes:
                raise InvariantError(f"{self!r} destroyed {num_bytes} bytes")
            self._set(created_bytes=self.created_bytes - num_bytes)
            self._set(trim_left_bytes=max(0, self._figures["trim_left_bytes"] - num_bytes))
            self._count(unmaps=1, unmapped_bytes=num_bytes)

    def give_back(self, num_bytes: int) -> None:
        """Return so much of the lease: bytes without pages, removed ones after the driver has them.

        Raises:
            InvariantError: Pages of it still exist. Nothing has changed.
        """
        with self._ledger._lock:
            if not 0 <= num_bytes <= self.lease_bytes - self.created_bytes:
                raise InvariantError(f"{self!r} gives back {num_bytes} bytes")
            self._set(lease_bytes=self.lease_bytes - num_bytes)

    def static_lease(self, num_bytes: int, *, deadline_seconds: float) -> None:
        """Hold so many bytes in all for weights, activations and graphs; wait while others trim for it.

        Less than before is effective at once, and so is what is in use already (say so first, by :meth:`static_used`).
        More is granted whole or not at all; while it waits, others see it as demand that comes before theirs, down to
        their floors.

        Raises:
            LedgerError: Not granted within the deadline; the message has the figures. What was held before still is.
        """
        began = self._ledger._clock.seconds()
        try:
            while not self._static_granted(num_bytes):
                waited = self._ledger._clock.seconds() - began
                if waited >= deadline_seconds:
                    raise LedgerError(self._refused_static(num_bytes, waited))
                self._ledger._clock.sleep(min(STATIC_POLL_SECONDS, deadline_seconds - waited))
                self.heartbeat()
        finally:
            with self._ledger._lock:
                self._set(static_unmet_bytes=0)

    def static_used(self, num_bytes: int) -> None:
        """So many bytes of the static lease are in use now: the driver does not count them as free.

        More is said after it was taken, less before it is freed: what the driver has free and is still said to be used
        would be granted to others, though it is leased.
        """
        with self._ledger._lock:
            self._set(static_used_bytes=num_bytes)

    def set_floor(self, num_bytes: int) -> None:
        """Change this member's own floor, which holds until an operator sets another: at joining, an engine does not
        know yet what one request of its model takes."""
        with self._ledger._lock:
            self._set(floor_bytes=min(num_bytes, self._figures["ceiling_bytes"]))

    def report(self, *, demand_bytes: int, unmet_bytes: int, free_bytes: int, cached_bytes: int, busy: bool) -> None:
        """Tell the others what this member would use now, what of it it could not get, and what it could spare.

        Args:
            demand_bytes: What it would use, leased or not; cached content that nobody asks for is no demand.
            unmet_bytes: Asked for and not granted.
            free_bytes: Of its pages, those without content.
            cached_bytes: Of its pages, those with cached content only.
            busy: Whether it has requests.
        """
        with self._ledger._lock:
            self._set(
                free_bytes=free_bytes,
                cached_bytes=cached_bytes,
                demand_bytes=demand_bytes,
                unmet_bytes=unmet_bytes,
                busy=int(busy),
                reporting=1,
            )
        self.heartbeat()

    def expect(self, demand_bytes: int, unmet_bytes: int) -> None:
        """Tell the others what an engine that is still starting would use, and what of it it could not get.

        It does not report yet: between its first memory and its first request it is silent, for minutes, and that is
        no sign of a member that was stopped.
        """
        with self._ledger._lock:
            self._set(demand_bytes=demand_bytes, unmet_bytes=unmet_bytes, busy=1)
        self.heartbeat()

    def heartbeat(self) -> None:
        """Show that this member is at work, and keep the ledger in order. Cheap: call it every tick.

        Every ``HEARTBEAT_SECONDS`` it writes the time, every ``HOUSEKEEPING_SECONDS`` it frees the slots of the dead
        and joins again if the file was lost.
        """
        ledger = self._ledger
        with ledger._lock:
            now = ledger._clock.seconds()
            if now < self._next_heartbeat:
                return
            self._next_heartbeat = now + HEARTBEAT_SECONDS
            ledger._keep_house()
            if ledger._driver_free is not None:
                self._set_quietly(driver_free_bytes=ledger._driver_free(), driver_told=1)
            self._set_quietly(heartbeat_ns=ledger._clock.nanoseconds())
            if self._figures["trim_left_bytes"] and ledger._clock.nanoseconds() > self._trim_until_ns:
                self._set(trim_left_bytes=0)

    def allowance(self) -> Allowance:
        """What this member may and should hold now. Ask whenever the ledger's generation has changed."""
        with self._ledger._lock:
            if not self._present():
                ceiling = self._figures["ceiling_bytes"]
                return Allowance(self.lease_bytes, ceiling, ceiling, 0)
            rows, reading = self._ledger._read()
            self._follow(next(row for row in rows if row.slot == self.slot))
            limit = reading.limit_bytes(self.slot)
            return Allowance(
                may_hold_bytes=self.lease_bytes + reading.room_bytes(self.slot, limit),
                target_bytes=min(limit, reading.target_bytes(self.slot)),
                ceiling_bytes=limit,
                trim_bytes=self._figures["trim_left_bytes"],
                yielded_bytes=reading.claim(self.slot).ceiling_bytes - limit,
            )

    def leave(self) -> None:
        """Give up the slot, and with it the lease. The pages are gone already.

        Raises:
            InvariantError: They are not. Nothing has changed.
        """
        with self._ledger._lock:
            if self.created_bytes:
                raise InvariantError(f"{self!r} leaves with pages")
            self._end()

    # --- its slot ------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        self.slot, self.name = self._ledger._enter(self._texts, Figures(**self._figures))
        self._tenure = self._ledger._file.tenure(self.slot)
        self.registered = True
        self._set(joined_ns=self._ledger._clock.nanoseconds())

    def _register(self) -> None:
        """Be seen again, with what was held: all of it was granted side by side with what the others held.

        One that came new to the device before the others were back may have been granted what is theirs; on a GPU the
        driver's free bytes keep it from what exists, and all give back until it fits again.
        """
        if self.registered or self._ledger._gone is not None:
            return
        self._figures.update(
            joined_ns=0,
            proposed_bytes=0,
            static_proposed_bytes=0,
            followed_revision=0,
            trim_revision=0,
            trim_left_bytes=0,
        )
        try:
            self._enter()
        except LedgerError as error:
            if str(error) != self._refusal:
                logger.warning("%s cannot join the ledger again yet: %s", self.asked_name, error)
            self._refusal = str(error)
            return
        self._refusal = ""
        logger.warning("%s has joined the ledger of %s again", self.name, self._ledger.device_id)

    def _end(self) -> None:
        if self._present():
            self._ledger._file.free(self.slot)
        self.registered = False
        self._ledger._accounts.remove(self)

    def _present(self) -> bool:
        """Whether what this account writes is read by anybody."""
        if self.registered and self._ledger._usable() and self._ledger._file.tenure(self.slot) != self._tenure:
            self._ledger._lose(LedgerGone(f"{self._ledger._file.path} was overwritten while in use"))
        self.registered = self.registered and self._ledger._gone is None
        return self.registered

    def _set(self, **values: int) -> None:
        """Write what has changed of these, in this order."""
        changed = {name: value for name, value in values.items() if self._figures[name] != value}
        self._figures.update(changed)
        if changed and self._present():
            self._ledger._file.store(self.slot, **changed)

    def _set_quietly(self, **values: int) -> None:
        self._figures.update(values)
        if self._present():
            self._ledger._file.store_quietly(self.slot, **values)

    def _count(self, **increments: int) -> None:
        self._set_quietly(**{name: self._figures[name] + increment for name, increment in increments.items()})

    def _grant(self, figure: str, proposal: str, room: Callable[[Reading], int]) -> int:
        held = self._figures[figure]
        while True:
            with self._ledger._file.turn(self.slot) as is_current:
                granted = room(self._ledger._read()[1])
                if not granted:
                    return 0
                self._set(**{proposal: held + granted})
                try:
                    if is_current():
                        self._set(**{figure: held + granted})
                        return granted
                finally:
                    self._set(**{proposal: 0})

    def _static_granted(self, num_bytes: int) -> bool:
        with self._ledger._lock:
            held, used = self._figures["static_lease_bytes"], self._figures["static_used_bytes"]
            # What is in use is off the driver's free bytes already: only what is still to come must be free.
            missing = max(0, num_bytes - used) - max(0, held - used)
            if missing <= 0:
                self._set(static_lease_bytes=num_bytes)
                return True
            if self._present() and self._grant(
                "static_lease_bytes",
                "static_proposed_bytes",
                lambda reading: num_bytes - held if missing <= reading.unleased_bytes else 0,
            ):
                return True
            self._set(static_unmet_bytes=missing)
            return False

    def _refused_static(self, num_bytes: int, waited: float) -> str:
        asked = f"{self.name} needs {format_bytes(num_bytes)} on {self._ledger.device_id} for weights, activations and "
        asked += f"graphs, holds {format_bytes(self._figures['static_lease_bytes'])} of it "
        asked += f"({format_bytes(self._figures['static_used_bytes'])} in use), and waited {waited:.1f} s"
        if not self._present():
            return f"{asked}: {self._ledger._gone}"
        device = self._ledger.snapshot()
        members = ", ".join(
            f"{member.name} holds {format_bytes(member.static_lease_bytes + member.lease_bytes)} "
            f"({format_bytes(member.in_use_bytes)} in use, {member.state})"
            for member in device.members
            if member.slot != self.slot
        )
        return (
            f"{asked}. Of {format_bytes(device.total_bytes)}, the driver has {format_bytes(device.driver_free_bytes)} "
            f"free, headroom is {format_bytes(device.headroom_bytes)}, {format_bytes(device.unleased_bytes)} could be "
            f"granted. Others: {members or 'none'}. Stop one, lower its ceiling, or stop what is outside the ledger."
        )

    def _follow(self, row: Row) -> None:
        """Take note of what operators asked."""
        if row.limits is None:
            return
        if row.limits.trim_revision > self._figures["trim_revision"]:
            self._trim_until_ns = row.limits.trim_until_ns
            self._set(trim_left_bytes=row.limits.trim_bytes, trim_revision=row.limits.trim_revision)
        if self.lease_bytes <= row.limits.ceiling_bytes:
            self._set(followed_revision=row.revision)


def _state(claim: Claim) -> str:
    if claim.stopped:
        return "stopped"
    if not claim.figures.reporting:
        return "waiting" if claim.figures.static_unmet_bytes or claim.figures.unmet_bytes else "loading"
    if claim.figures.static_unmet_bytes:
        return "waiting"
    return "serving" if claim.figures.busy else "idle"


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
