"""Who should hold how much of one device: weighted max-min, as pure functions of one snapshot.

Every member computes the same numbers from the same snapshot, so nobody has to tell anybody what to give back. All
arithmetic is on integers: the result does not depend on the order of the shares, nor on the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

_WEIGHT_STEPS = 1_000_000  # weights are compared to six decimals


@dataclass(frozen=True)
class Share:
    """What one member has, may have and wants, in bytes.

    Attributes:
        floor_bytes: What it gets back, at the price of others' running requests, when it needs it.
        ceiling_bytes: What it never exceeds.
        weight: Its part of what is contended, relative to the others'; above 0.
        demand_bytes: What it would use now; cached content that nobody asks for is no demand.
        lease_bytes: What it holds.
        in_use_bytes: The part of ``lease_bytes`` that only preempting requests could free.
    """

    floor_bytes: int
    ceiling_bytes: int
    weight: float
    demand_bytes: int
    lease_bytes: int
    in_use_bytes: int


def targets(shares: Sequence[Share], capacity_bytes: int) -> list[int]:
    """What each member should hold while somebody wants more than is left.

    First demands are met, by weight, floors before all else. What is then left stays with those who hold more than
    they demand (their caches), by weight: pressure takes no more than it needs.

    Returns:
        Bytes, in the order of ``shares``. With floors that fit into the capacity: each at least
        ``min(floor, demand, ceiling)`` and at most its ceiling; where two are short of their demand and above their
        floors, they are proportional to their weights; the sum is at most the capacity, and short of
        ``min(capacity, sum(max(demand, lease), up to the ceiling))`` by less than two bytes per member (rounding).
        Floors that do not fit are themselves filled by weight.
    """
    wanted = [min(share.demand_bytes, share.ceiling_bytes) for share in shares]
    floors = [min(share.floor_bytes, want) for share, want in zip(shares, wanted, strict=True)]
    weights = [max(1, round(share.weight * _WEIGHT_STEPS)) for share in shares]
    met = _fill(capacity_bytes, weights, floors, wanted)
    kept = [max(0, min(share.lease_bytes, share.ceiling_bytes) - have) for share, have in zip(shares, met, strict=True)]
    spare = _fill(capacity_bytes - sum(met), weights, [0] * len(shares), kept)
    return [have + keep for have, keep in zip(met, spare, strict=True)]


def limits(shares: Sequence[Share], capacity_bytes: int) -> list[int]:
    """What each member may hold at most now, at the price of preempting its running requests.

    This is its ceiling, unless a member is short of its floor and giving back free and cached memory cannot help,
    because what is in use everywhere is too much: then those above their own floors give way, by weight.

    Returns:
        Bytes, in the order of ``shares``, each at most its ceiling.
    """
    floors = [min(share.floor_bytes, share.demand_bytes, share.ceiling_bytes) for share in shares]
    needs = [
        replace(share, demand_bytes=max(share.in_use_bytes, floor)) for share, floor in zip(shares, floors, strict=True)
    ]
    short_of_floor = any(share.lease_bytes < floor for share, floor in zip(shares, floors, strict=True))
    if not short_of_floor or sum(min(need.demand_bytes, need.ceiling_bytes) for need in needs) <= capacity_bytes:
        return [share.ceiling_bytes for share in shares]
    return targets(needs, capacity_bytes)


def _fill(capacity: int, weights: Sequence[int], lows: Sequence[int], highs: Sequence[int]) -> list[int]:
    """Raise one water level until the capacity is used up: member i gets level x weight, within low and high."""
    if sum(highs) <= capacity:
        return list(highs)
    if sum(lows) > capacity:
        return _fill(max(0, capacity), weights, [0] * len(lows), lows)
    filled = list(highs)
    left, open_ = capacity, set(range(len(weights)))
    while open_:
        # The level that would suit all members still open. Those it pushes out of their range are settled at its
        # edge: at their lows if lows push harder in sum, else at their highs (each round settles at least one).
        weight = sum(weights[i] for i in open_)
        level = {i: left * weights[i] // weight for i in open_}
        clamped = {i: min(max(level[i], lows[i]), highs[i]) for i in open_}
        excess = sum(clamped.values()) - sum(level.values())
        settled = {i for i in open_ if excess == 0 or (clamped[i] - level[i]) * excess > 0}
        for i in settled:
            filled[i] = clamped[i]
            left -= clamped[i]
        open_ -= settled
    return filled
