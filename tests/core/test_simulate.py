"""The simulator's claims, on traces small enough for every change."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.simulate import (
    CAPACITY_BYTES,
    LARGEST_REQUEST_BYTES,
    MEAN_REQUEST_BYTES,
    POLICIES,
    TRACE_SECONDS,
    make_trace,
    measure,
    simulate,
    table,
)


def test_a_seed_is_a_trace() -> None:
    assert make_trace(1, 4) == make_trace(1, 4)
    assert make_trace(1, 4) != make_trace(2, 4)


def test_a_trace_is_as_it_says() -> None:
    requests = [request for trace in make_trace(3, 16) for request in trace]
    assert all(0 <= request.arrives_seconds < TRACE_SECONDS for request in requests)
    assert all(0 < request.num_bytes <= LARGEST_REQUEST_BYTES for request in requests)
    assert statistics.fmean(request.num_bytes for request in requests) == pytest.approx(MEAN_REQUEST_BYTES, rel=0.02)
    offered = sum(request.num_bytes * request.hold_seconds for request in requests) / TRACE_SECONDS / CAPACITY_BYTES
    assert 0.5 < offered < 1.5  # bursts are few and long, so one trace differs from the next


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_can_be_replayed(policy: str) -> None:
    assert simulate(policy, make_trace(1, 3)) == simulate(policy, make_trace(1, 3))


def test_sharing_uses_the_device_as_first_come_does_and_is_fairer_and_waits_less_than_a_split() -> None:
    result = measure(seed=1, member_counts=(4, 12))
    policies = result["policies"]
    assert policies["kvcached"]["utilisation"] > policies["first_come"]["utilisation"] - 0.02
    assert policies["kvcached"]["utilisation"] > policies["static"]["utilisation"] + 0.1
    assert policies["kvcached"]["share_error_p95"] < 0.3 * policies["first_come"]["share_error_p95"]
    assert policies["kvcached"]["wait_p99_seconds"] < 0.5 * policies["static"]["wait_p99_seconds"]
    assert all(f"{run['members']:>8} {run['policy']:<11}" in table(result) for run in result["runs"])
