"""What a ledger says to people and programs: one device and its members at one moment."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcached_core.admission import Claim, Reading
    from kvcached_core.ledger_file import Row, Texts


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


def member_statistics(row: Row, texts: Texts, reading: Reading, now_ns: int) -> MemberStatistics:
    """One member's row in words and figures; ``now_ns`` is the clock that the row's times are of."""
    figures, claim = row.figures, reading.claim(row.slot)
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


def _state(claim: Claim) -> str:
    if claim.stopped:
        return "stopped"
    if not claim.figures.reporting:
        return "waiting" if claim.figures.static_unmet_bytes or claim.figures.unmet_bytes else "loading"
    if claim.figures.static_unmet_bytes:
        return "waiting"
    return "serving" if claim.figures.busy else "idle"
