"""What follows from one reading of a ledger: what may be granted, and who should give back. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvcached_core import sharing
from kvcached_core.ledger_file import Figures, Row
from kvcached_core.sharing import Share

STOPPED_AFTER_SECONDS = 2.0


@dataclass(frozen=True)
class Claim:
    """What one live member of the device has, may have and wants: its row, an operator's limits applied."""

    slot: int
    figures: Figures
    floor_bytes: int
    ceiling_bytes: int
    weight: float
    stopped: bool

    @classmethod
    def of(cls, row: Row, now_ns: int) -> Claim:
        figures, limits = row.figures, row.limits or row.figures
        age_seconds = (now_ns - figures.heartbeat_ns) / 1e9
        # While it loads, a member is silent, but for what it waits for.
        speaks = bool(figures.reporting or figures.static_unmet_bytes or figures.unmet_bytes)
        return cls(
            slot=row.slot,
            figures=figures,
            floor_bytes=limits.floor_bytes,
            ceiling_bytes=limits.ceiling_bytes,
            weight=limits.weight_micros / 1e6,
            stopped=speaks and age_seconds > STOPPED_AFTER_SECONDS,
        )

    @property
    def held_bytes(self) -> int:
        """Its lease, or the larger one that it is about to be granted."""
        return max(self.figures.lease_bytes, self.figures.proposed_bytes)

    @property
    def static_held_bytes(self) -> int:
        return max(self.figures.static_lease_bytes, self.figures.static_proposed_bytes)

    @property
    def unmet_bytes(self) -> int:
        """What it asks of the others: nothing beyond its ceiling, nothing while it is stopped."""
        if self.stopped:
            return 0
        return min(self.figures.unmet_bytes, max(0, self.ceiling_bytes - self.held_bytes))

    @property
    def waiting_bytes(self) -> int:
        """The static lease it waits for."""
        return 0 if self.stopped else self.figures.static_unmet_bytes

    @property
    def idle_bytes(self) -> int:
        """What it could give back without preempting a request: not yet created, free or cached. None while stopped."""
        if self.stopped:
            return 0
        figures = self.figures
        return min(self.held_bytes, self.held_bytes - figures.created_bytes + figures.free_bytes + figures.cached_bytes)

    def share(self, demand_bytes: int | None = None) -> Share:
        demand = self.figures.demand_bytes if demand_bytes is None else demand_bytes
        return Share(
            floor_bytes=self.floor_bytes,
            ceiling_bytes=max(self.ceiling_bytes, self.held_bytes) if self.stopped else self.ceiling_bytes,
            weight=self.weight,
            demand_bytes=self.held_bytes if self.stopped else demand,
            lease_bytes=self.held_bytes,
            in_use_bytes=self.held_bytes - self.idle_bytes,
        )


@dataclass(frozen=True)
class Reading:
    """The device at one moment.

    Attributes:
        claims: Of the live members, by slot.
        total_bytes: Of the device.
        headroom_bytes: Left ungranted.
        driver_free_bytes: What the driver has left, so that processes outside the ledger are counted too.
    """

    claims: Sequence[Claim]
    total_bytes: int
    headroom_bytes: int
    driver_free_bytes: int

    @cached_property
    def unleased_bytes(self) -> int:
        """What could be granted now; below 0 where an outsider took what was leased, or the headroom."""
        to_come = sum(
            claim.held_bytes
            - claim.figures.created_bytes
            + max(0, claim.static_held_bytes - claim.figures.static_used_bytes)
            for claim in self.claims
        )
        return self.driver_free_bytes - self.headroom_bytes - to_come

    @cached_property
    def capacity_bytes(self) -> int:
        """What the members' leases may come to: all but headroom, outsiders, static leases, also those waited for."""
        return max(0, self.unleased_bytes + self._sum("held_bytes") - self._waiting_bytes)

    def room_bytes(self, slot: int, asked_bytes: int) -> int:
        """What admission grants of ``asked_bytes``: 0 to ``asked_bytes``."""
        claim = self.claim(slot)
        room = min(asked_bytes, claim.ceiling_bytes - claim.held_bytes, self.unleased_bytes)
        if room > 0 and self._pressed(but=slot):
            wanted = max(claim.figures.demand_bytes, claim.held_bytes + asked_bytes)
            shares = [other.share(wanted if other.slot == slot else None) for other in self.claims]
            room = min(room, self._mine(slot, sharing.targets(shares, self.capacity_bytes)) - claim.held_bytes)
        return max(0, room)

    def target_bytes(self, slot: int) -> int:
        """What a member should hold at most: its ceiling, unless somebody wants more than is left."""
        ceiling = self.claim(slot).ceiling_bytes
        if not self._pressed():
            return ceiling
        return min(ceiling, self._mine(slot, self._targets))

    def limit_bytes(self, slot: int) -> int:
        """What a member may hold at most, at the price of running requests: its ceiling, less others' unmet floors."""
        return min(self.claim(slot).ceiling_bytes, self._mine(slot, self._limits))

    def claim(self, slot: int) -> Claim:
        return next(claim for claim in self.claims if claim.slot == slot)

    @cached_property
    def _waiting_bytes(self) -> int:
        """Static leases waited for that there would be room for if every member fell to its floor, small ones first.

        A wait that nothing can end, such as for weights larger than the device, would stop everybody's growth and
        drain every cache until its deadline.
        """
        givers = [claim for claim in self.claims if not claim.stopped]
        spare = self.unleased_bytes + sum(max(0, claim.held_bytes - claim.floor_bytes) for claim in givers)
        waiting = 0
        for wait in sorted(claim.waiting_bytes for claim in self.claims):
            if waiting + wait <= spare:
                waiting += wait
        return waiting

    @cached_property
    def _targets(self) -> list[int]:
        return sharing.targets(self._shares, self.capacity_bytes)

    @cached_property
    def _limits(self) -> list[int]:
        return sharing.limits(self._shares, self.capacity_bytes)

    @cached_property
    def _shares(self) -> list[Share]:
        return [claim.share() for claim in self.claims]

    def _pressed(self, but: int | None = None) -> bool:
        """Somebody (else) wants more, or all want no more but hold more than there is."""
        asking = any(claim.unmet_bytes for claim in self.claims if claim.slot != but)
        return asking or self._waiting_bytes > 0 or self._sum("held_bytes") > self.capacity_bytes

    def _mine(self, slot: int, amounts: Sequence[int]) -> int:
        return next(amount for claim, amount in zip(self.claims, amounts, strict=True) if claim.slot == slot)

    def _sum(self, figure: str) -> int:
        return sum(getattr(claim, figure) for claim in self.claims)
