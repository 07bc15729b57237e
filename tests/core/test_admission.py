"""What follows from one reading, as arithmetic: for any members, however much they hold, want and wait for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from kvcached_core.admission import STOPPED_AFTER_SECONDS, Claim, Reading
from kvcached_core.ledger_file import Figures, Limits, Row

NOW_NS = 10**12
TOTAL = 10_000


def row(slot: int = 0, *, age_seconds: float = 0.0, limits: Limits | None = None, **figures: int) -> Row:
    defaults = {"ceiling_bytes": TOTAL, "weight_micros": 1_000_000, "reporting": 1}
    heartbeat_ns = NOW_NS - int(age_seconds * 1e9)
    return Row(slot, 1, Figures(heartbeat_ns=heartbeat_ns, **{**defaults, **figures}), 0, limits)


def reading(*rows: Row, total: int = TOTAL, headroom: int = 0, outsiders: int = 0) -> Reading:
    free = total - outsiders - sum(one.figures.created_bytes + one.figures.static_used_bytes for one in rows)
    return Reading([Claim.of(one, NOW_NS) for one in rows], total, headroom, free)


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    def one(slot: int) -> Row:
        lease, proposed = draw(st.integers(0, 3000)), draw(st.just(0) | st.integers(0, 3000))
        created = draw(st.integers(0, lease))
        ceiling = draw(st.integers(lease, TOTAL))
        return row(
            slot,
            age_seconds=draw(st.sampled_from((0.0, 0.0, 5.0))),
            floor_bytes=draw(st.integers(0, ceiling)),
            ceiling_bytes=ceiling,
            weight_micros=draw(st.integers(10_000, 10_000_000)),
            static_lease_bytes=draw(st.integers(0, 1000)),
            static_used_bytes=draw(st.integers(0, 1000)),
            static_unmet_bytes=draw(st.just(0) | st.integers(0, 3000)),
            lease_bytes=lease,
            proposed_bytes=proposed,
            created_bytes=created,
            free_bytes=draw(st.integers(0, created)),
            demand_bytes=draw(st.integers(0, TOTAL)),
            unmet_bytes=draw(st.just(0) | st.integers(0, TOTAL)),
        )

    return [one(slot) for slot in range(draw(st.integers(1, 6)))]


@settings(max_examples=50)
@given(rows(), st.integers(0, 2000), st.integers(0, 2000), st.integers(0, TOTAL))
def test_no_grant_exceeds_what_is_there_nor_the_ceiling(
    members: list[Row], headroom: int, outsiders: int, asked: int
) -> None:
    device = reading(*members, headroom=headroom, outsiders=outsiders)
    for claim in device.claims:
        room = device.room_bytes(claim.slot, asked)
        assert 0 <= room <= asked
        assert room <= max(0, device.unleased_bytes)
        assert claim.held_bytes + room <= max(claim.held_bytes, claim.ceiling_bytes)


@settings(max_examples=50)
@given(rows(), st.integers(0, 2000), st.integers(0, 2000))
def test_targets_and_limits_are_within_ceilings_and_targets_fit_under_pressure(
    members: list[Row], headroom: int, outsiders: int
) -> None:
    device = reading(*members, headroom=headroom, outsiders=outsiders)
    targets = [device.target_bytes(claim.slot) for claim in device.claims]
    for claim, target in zip(device.claims, targets, strict=True):
        assert 0 <= target <= claim.ceiling_bytes
        assert 0 <= device.limit_bytes(claim.slot) <= claim.ceiling_bytes
    if targets != [claim.ceiling_bytes for claim in device.claims]:
        assert sum(targets) <= device.capacity_bytes


@settings(max_examples=50)
@given(rows(), st.integers(0, 2000))
def test_nobody_gives_back_where_nobody_asks_and_all_fits(members: list[Row], headroom: int) -> None:
    quiet = [replace(one, figures=one.figures._replace(unmet_bytes=0, static_unmet_bytes=0)) for one in members]
    device = reading(*quiet, headroom=headroom)
    if device.unleased_bytes >= 0:
        for claim in device.claims:
            assert device.target_bytes(claim.slot) == claim.ceiling_bytes


def test_a_proposal_counts_like_a_lease() -> None:
    device = reading(
        row(0, lease_bytes=100, proposed_bytes=900), row(1, static_lease_bytes=50, static_proposed_bytes=80)
    )
    assert device.unleased_bytes == TOTAL - 980


def test_static_bytes_count_once_whether_leased_or_used_beyond() -> None:
    assert reading(row(static_lease_bytes=500, static_used_bytes=300)).unleased_bytes == TOTAL - 500
    assert reading(row(static_lease_bytes=500, static_used_bytes=700)).unleased_bytes == TOTAL - 700


def test_a_static_lease_that_is_waited_for_comes_off_what_others_may_hold() -> None:
    device = reading(row(0, lease_bytes=9000), row(1, static_unmet_bytes=4000))
    assert device.capacity_bytes == 6000
    assert device.target_bytes(0) == 6000


def test_a_wait_that_nothing_can_end_holds_nobody_up() -> None:
    """Weights larger than the device: the neighbours' caches would be drained until the deadline, for nothing."""
    device = reading(row(0, lease_bytes=3000, floor_bytes=2000), row(1, static_unmet_bytes=8001))
    assert device.capacity_bytes == TOTAL
    assert device.target_bytes(0) == TOTAL
    assert device.room_bytes(0, 5000) == 5000
    assert reading(row(0, lease_bytes=3000, floor_bytes=2000), row(1, static_unmet_bytes=8000)).capacity_bytes == 2000


def test_of_two_waits_that_cannot_both_end_the_smaller_is_made_room_for() -> None:
    device = reading(row(0, static_unmet_bytes=7000), row(1, static_unmet_bytes=4000))
    assert device.capacity_bytes == 6000


def test_operators_limits_replace_the_members_own() -> None:
    claim = Claim.of(row(floor_bytes=1, ceiling_bytes=2, limits=Limits(1, 10, 20, 3_000_000)), NOW_NS)
    assert (claim.floor_bytes, claim.ceiling_bytes, claim.weight) == (10, 20, 3.0)


def test_a_member_is_stopped_when_it_is_silent_although_it_has_something_to_say() -> None:
    late = STOPPED_AFTER_SECONDS + 0.1
    assert Claim.of(row(age_seconds=late), NOW_NS).stopped
    assert Claim.of(row(age_seconds=late, reporting=0, static_unmet_bytes=1), NOW_NS).stopped
    assert not Claim.of(row(age_seconds=late, reporting=0), NOW_NS).stopped
    assert not Claim.of(row(age_seconds=STOPPED_AFTER_SECONDS - 0.1), NOW_NS).stopped
    assert not Claim.of(row(age_seconds=-5), NOW_NS).stopped  # another machine's clock, or another time namespace


# --- in motion -----------------------------------------------------------------------------------------------------


@dataclass
class Engine:
    """A member whose requests want so much, all the time; what it wants and has is in use."""

    slot: int
    floor: int
    ceiling: int
    weight: int
    demand: int
    lease: int

    def row(self) -> Row:
        in_use = min(self.lease, self.demand)
        return row(
            self.slot,
            floor_bytes=self.floor,
            ceiling_bytes=self.ceiling,
            weight_micros=self.weight * 1_000_000,
            lease_bytes=self.lease,
            created_bytes=self.lease,
            cached_bytes=self.lease - in_use,
            demand_bytes=self.demand,
            unmet_bytes=max(0, min(self.demand, self.ceiling) - self.lease),
        )

    def tick(self, device: Reading) -> int:
        """Give back and take what the reading says; returns by how much it moved."""
        before = self.lease
        in_use = min(self.lease, self.demand)
        keep = min(device.limit_bytes(self.slot), max(in_use, device.target_bytes(self.slot)))
        if keep < self.lease:
            self.lease = keep
        else:
            self.lease += device.room_bytes(self.slot, max(0, min(self.demand, self.ceiling) - self.lease))
        return self.lease - before


@st.composite
def engines(draw: st.DrawFn) -> list[Engine]:
    number = draw(st.integers(1, 6))
    made = []
    for slot in range(number):
        ceiling = draw(st.integers(TOTAL // 10, TOTAL))
        made.append(
            Engine(
                slot=slot,
                floor=draw(st.integers(0, min(ceiling, TOTAL // number))),
                ceiling=ceiling,
                weight=draw(st.integers(1, 10)),
                demand=draw(st.integers(0, 2 * TOTAL)),
                lease=draw(st.integers(0, min(ceiling, TOTAL // number))),
            )
        )
    return made


@given(engines(), st.randoms(use_true_random=False))
def test_constant_demand_comes_to_rest_with_every_floor_met(members: list[Engine], order: object) -> None:
    directions: list[set[bool]] = [set() for _ in members]
    for _ in range(4):
        moved = False
        for member in order.sample(members, len(members)):  # type: ignore[attr-defined]
            step = member.tick(reading(*(one.row() for one in members)))
            assert sum(one.lease for one in members) <= TOTAL
            if abs(step) > 2 * len(members):
                directions[member.slot].add(step > 0)
                moved = True
    assert not moved, "still moving in the fourth round"
    assert all(len(seen) <= 1 for seen in directions), "gave back and took again"
    for member in members:
        assert member.lease >= min(member.floor, member.demand) - 2 * len(members)
