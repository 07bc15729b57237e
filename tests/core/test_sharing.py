"""Weighted max-min: what every member may rely on, whatever the others ask for."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kvcached_core.sharing import Share, limits, targets

G = 2**30


def share(
    *, demand: int = 0, lease: int = 0, floor: int = 0, ceiling: int = 2**60, weight: float = 1.0, in_use: int = 0
) -> Share:
    return Share(floor, ceiling, weight, demand, lease, in_use)


amounts = st.one_of(st.integers(0, 40), st.integers(0, 200 * G))


@st.composite
def any_shares(draw: st.DrawFn, weights: st.SearchStrategy[float] = st.floats(0.01, 100)) -> list[Share]:
    def one() -> Share:
        ceiling, lease = draw(amounts), draw(amounts)
        return Share(
            floor_bytes=draw(st.integers(0, ceiling)),
            ceiling_bytes=ceiling,
            weight=draw(weights),
            demand_bytes=draw(amounts),
            lease_bytes=lease,
            in_use_bytes=draw(st.integers(0, lease)),
        )

    return [one() for _ in range(draw(st.integers(1, 8)))]


def wanted(one: Share) -> int:
    return min(one.demand_bytes, one.ceiling_bytes)


def floor(one: Share) -> int:
    return min(one.floor_bytes, wanted(one))


# --- examples ----------------------------------------------------------------------------------------------------


def test_what_is_contended_is_split_by_weight() -> None:
    assert targets([share(demand=100 * G), share(demand=100 * G, weight=3)], 100 * G) == [25 * G, 75 * G]


def test_who_wants_little_gets_it_and_the_rest_is_split() -> None:
    assert targets([share(demand=10), share(demand=90), share(demand=80)], 100) == [10, 45, 45]


def test_pressure_takes_no_more_of_a_cache_than_it_needs() -> None:
    # 10 are free; the second one needs 30 more than it has; so the first, idle with a cache, keeps 60 of 80.
    assert targets([share(demand=10, lease=80), share(demand=40, lease=10)], 100) == [60, 40]


def test_nobody_gives_back_while_there_is_enough() -> None:
    assert targets([share(demand=0, lease=50), share(demand=30, lease=30)], 100) == [50, 30]


def test_a_floor_comes_before_weights() -> None:
    assert targets([share(demand=100, weight=9), share(demand=100, floor=40)], 100) == [60, 40]


def test_a_floor_that_is_not_needed_is_not_kept_free() -> None:
    assert targets([share(demand=100), share(demand=5, floor=40)], 100) == [95, 5]


def test_floors_that_do_not_fit_are_filled_by_weight() -> None:
    assert targets([share(demand=90, floor=90), share(demand=90, floor=90, weight=2)], 90) == [30, 60]


def test_a_ceiling_holds_even_on_an_empty_device() -> None:
    assert targets([share(demand=90, lease=50, ceiling=20)], 100) == [20]


def test_nothing_is_left_of_a_device_that_outsiders_took() -> None:
    assert targets([share(demand=10, lease=10, floor=10)], 0) == [0]


def test_running_requests_are_safe_without_an_unmet_floor() -> None:
    busy = share(demand=100, lease=100, in_use=100)
    assert limits([busy, share(demand=100)], 100) == [busy.ceiling_bytes, 2**60]


def test_running_requests_give_way_to_an_unmet_floor_only() -> None:
    assert limits([share(demand=100, lease=100, in_use=100), share(demand=100, floor=20)], 100) == [80, 20]


def test_running_requests_are_safe_while_a_cache_can_serve_the_floor() -> None:
    shares = [share(lease=60, in_use=60), share(lease=40, in_use=10), share(demand=20, floor=20)]
    assert limits(shares, 100) == [2**60] * 3


def test_a_floor_protects_running_requests() -> None:
    protected = share(demand=50, lease=50, in_use=50, floor=50)
    assert limits([protected, share(demand=50, lease=50, in_use=50), share(demand=20, floor=20)], 100) == [50, 30, 20]


# --- properties --------------------------------------------------------------------------------------------------


@given(any_shares(), amounts, st.randoms(use_true_random=False))
def test_the_order_of_the_slots_does_not_matter(shares: list[Share], capacity: int, order: random.Random) -> None:
    places = list(range(len(shares)))
    order.shuffle(places)
    shuffled = [shares[place] for place in places]
    for amounts_of in (targets, limits):
        straight = amounts_of(shares, capacity)
        assert amounts_of(shuffled, capacity) == [straight[place] for place in places]


@given(any_shares(), amounts)
def test_targets_fit_and_waste_nothing(shares: list[Share], capacity: int) -> None:
    got = targets(shares, capacity)
    assert all(0 <= amount <= one.ceiling_bytes for amount, one in zip(got, shares, strict=True))
    assert sum(got) <= capacity
    useful = sum(max(wanted(one), min(one.lease_bytes, one.ceiling_bytes)) for one in shares)
    assert sum(got) > min(capacity, useful) - 2 * len(shares)


@given(any_shares(), amounts)
def test_floors_hold_where_they_fit(shares: list[Share], capacity: int) -> None:
    assume(sum(map(floor, shares)) <= capacity)
    assert all(amount >= floor(one) for amount, one in zip(targets(shares, capacity), shares, strict=True))


@given(any_shares(), amounts)
def test_demands_come_before_caches(shares: list[Share], capacity: int) -> None:
    got = targets(shares, capacity)
    if any(amount < wanted(one) - 1 for amount, one in zip(got, shares, strict=True)):
        assert sum(amount - min(amount, wanted(one)) for amount, one in zip(got, shares, strict=True)) <= len(shares)


@given(any_shares(weights=st.integers(1, 100)), st.integers(0, 200 * G))
def test_nobody_stands_above_one_who_is_short_but_for_a_floor(shares: list[Share], capacity: int) -> None:
    assume(sum(map(floor, shares)) <= capacity)
    got = targets(shares, capacity)
    rounding = 2 * len(shares)
    for amount, one in zip(got, shares, strict=True):
        if amount < wanted(one) - rounding:
            for other_amount, other in zip(got, shares, strict=True):
                assert other_amount <= floor(other) or other_amount * one.weight <= (amount + rounding) * other.weight


@given(any_shares(), amounts, st.integers(0, G))
def test_more_capacity_is_less_for_nobody(shares: list[Share], capacity: int, more: int) -> None:
    less_now = [
        (before, after)
        for before, after in zip(targets(shares, capacity), targets(shares, capacity + more), strict=True)
        if after < before - 2 * len(shares)
    ]
    assert not less_now


@given(any_shares(), amounts)
def test_limits_are_below_ceilings_only_for_a_floor(shares: list[Share], capacity: int) -> None:
    got = limits(shares, capacity)
    short_of_floor = [one for one in shares if one.lease_bytes < floor(one)]
    for amount, one in zip(got, shares, strict=True):
        assert 0 <= amount <= one.ceiling_bytes
        if not short_of_floor:
            assert amount == one.ceiling_bytes


# --- in motion ---------------------------------------------------------------------------------------------------


def move(shares: list[Share], capacity: int, mover: int) -> Share:
    """What one member does when it looks at the ledger: give back what is above its target, take up to it."""
    one = shares[mover]
    free = capacity - sum(other.lease_bytes for other in shares)
    step = targets(shares, capacity)[mover] - one.lease_bytes
    if step > 0:
        step = max(0, min(step, free, wanted(one) - one.lease_bytes))
    return replace(one, lease_bytes=one.lease_bytes + step)


@given(any_shares(), st.integers(100, 200 * G), st.randoms(use_true_random=False))
def test_constant_demand_comes_to_rest_without_oscillation(
    shares: list[Share], capacity: int, order: random.Random
) -> None:
    # Leases that fit, nothing in use: any member can follow at once.
    total = sum(one.lease_bytes for one in shares)
    if total > capacity:
        shares = [replace(one, lease_bytes=one.lease_bytes * capacity // total) for one in shares]
    directions: list[set[int]] = [set() for _ in shares]
    for _ in range(3):
        for mover in order.sample(range(len(shares)), len(shares)):
            moved = move(shares, capacity, mover)
            step = moved.lease_bytes - shares[mover].lease_bytes
            if abs(step) > 2 * len(shares):
                directions[mover].add(1 if step > 0 else -1)
            shares = [*shares[:mover], moved, *shares[mover + 1 :]]
            assert sum(one.lease_bytes for one in shares) <= capacity
    assert all(len(seen) <= 1 for seen in directions)  # nobody gave back and took again, or the reverse
    for place, one in enumerate(shares):  # at rest: nobody would move any more
        assert abs(move(shares, capacity, place).lease_bytes - one.lease_bytes) <= 2 * len(shares)


@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (1, 2, 5), (0.5, 0.25, 4, 1)])
def test_saturated_members_rest_at_their_weights(weights: tuple[float, ...]) -> None:
    shares = [share(demand=200 * G, lease=100 * G if place == 0 else 0, weight=w) for place, w in enumerate(weights)]
    for _ in range(2):
        for mover in range(len(shares)):
            shares[mover] = move(shares, 100 * G, mover)
    for one in shares:
        assert one.lease_bytes / (100 * G) == pytest.approx(one.weight / sum(weights), rel=1e-6)
