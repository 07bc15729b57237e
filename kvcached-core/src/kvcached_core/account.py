"""One member's slot in a device's ledger, and the promises that its owner keeps.

Order of writes. Growth: lease, then the driver, then ``created``. Shrinking: ``destroyed``, then the driver, then
``give_back``. At no instant can the same bytes be granted twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached_core.errors import InvariantError, LedgerError
from kvcached_core.ledger_file import Figures, LedgerGone, Row, Texts
from kvcached_core.sizes import format_bytes

if TYPE_CHECKING:
    from kvcached_core.admission import Reading
    from kvcached_core.ledger import Ledger

HEARTBEAT_SECONDS = 0.1
STATIC_POLL_SECONDS = 0.02

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
