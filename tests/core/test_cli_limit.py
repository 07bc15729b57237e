"""kvcached limit: at once, followed, and said what was reached."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kvcached_core.cli import limit
from kvcached_core.ledger import Ledger
from kvcached_core.ledger_statistics import MemberStatistics

from tests.core.command import kvcached, kvcached_here, surroundings
from tests.core.follower import GIB, MIB, Follower

GPU_ID = "GPU-3f1c0a7e-1111-2222-3333-444455556666"


def member_of(runtime_dir: Path, device_id: str = "host") -> MemberStatistics:
    ledger = Ledger.open(device_id, None, runtime_dir=runtime_dir)
    try:
        (member,) = ledger.snapshot().members
    finally:
        ledger.close()
    return member


def test_a_lowered_ceiling_is_followed_by_an_idle_member_and_reported(runtime_dir: Path) -> None:
    with Follower(runtime_dir, cached=900 * MIB):
        done = kvcached("limit", "qwen3-0.6b", "--ceiling", "600MiB", runtime_dir=runtime_dir)
        assert member_of(runtime_dir).resident_bytes == 600 * MIB
    assert done.code == 0, done.err
    assert re.fullmatch(
        r"host qwen3-0\.6b: ceiling 2048\.0 -> 600\.0 MiB, resident 900\.0 MiB, trimming … "
        r"reached 600\.0 MiB in \d\.\d s \(revision 1\)\n",
        done.out,
    )


def test_limits_in_json(runtime_dir: Path) -> None:
    with Follower(runtime_dir, cached=900 * MIB):
        words = ("limit", "qwen3-0.6b", "--ceiling", "25%", "--floor", "64MiB", "--weight", "2", "--json")
        done = kvcached_here(*words, runtime_dir=runtime_dir)
    assert done.code == 0
    assert done.document["schema"] == "kvcached.limit/1"
    (change,) = done.document["changes"]
    assert change["asked"] == {"floor_bytes": 64 * MIB, "ceiling_bytes": 512 * MIB, "weight": 2.0}
    assert change["before"]["limits"] == {"floor_bytes": 0, "ceiling_bytes": 2 * GIB, "weight": 1.0}
    assert (change["outcome"], change["revision"], change["now"]["revision"]) == ("reached", 1, 1)
    assert change["now"]["resident_bytes"] == 512 * MIB
    assert 0 < change["seconds"] < 10


def test_a_limit_with_nothing_to_trim_is_in_force_at_once(runtime_dir: Path) -> None:
    with Follower(runtime_dir, cached=100 * MIB):
        done = kvcached_here("limit", "qwen3-0.6b", "--weight", "2.5", "--ceiling", "1GiB", runtime_dir=runtime_dir)
        assert member_of(runtime_dir).weight == 2.5
    assert done.out == (
        "host qwen3-0.6b: ceiling 2048.0 -> 1024.0 MiB, weight 1 -> 2.5, resident 100.0 MiB: in force (revision 1)\n"
    )


def test_a_ceiling_below_what_requests_use_is_not_reached_and_says_why(runtime_dir: Path) -> None:
    with Follower(runtime_dir, in_use=700 * MIB, cached=200 * MIB):
        words = ("limit", "qwen3-0.6b", "--ceiling", "600MiB", "--timeout", "0.5")
        done = kvcached_here(*words, runtime_dir=runtime_dir)
    assert done.code == 1
    assert "NOT reached in 0.5 s: lease 700.0 MiB, resident 700.0 MiB, of which 700.0 MiB is in use" in done.out


def test_a_stopped_member_does_not_follow_and_is_said_to_be_silent(runtime_dir: Path) -> None:
    with Follower(runtime_dir, cached=900 * MIB) as member:
        member.process.send_signal(signal.SIGSTOP)
        words = ("limit", "qwen3-0.6b", "--ceiling", "600MiB", "--timeout", "2.5")
        done = kvcached_here(*words, runtime_dir=runtime_dir)
    assert done.code == 1
    assert re.search(r"NOT reached in 2\.5 s: .*the member has been silent for \d+ s", done.out)


def test_a_member_that_ends_meanwhile_is_said_to_have_ended(runtime_dir: Path) -> None:
    with Follower(runtime_dir, in_use=900 * MIB) as member:
        command = subprocess.Popen(
            [sys.executable, "-m", "kvcached_core.cli", "limit", "qwen3-0.6b", "--ceiling", "600MiB"],
            env=surroundings(runtime_dir),
            stdout=subprocess.PIPE,
            text=True,
        )
        wait_for_revision(runtime_dir, 1)
        member.process.kill()
        out, _ = command.communicate(timeout=30)
    assert command.returncode == 1
    assert re.search(r"… the member ended after \d\.\d s \(revision 1\)", out)


def test_two_operators_see_each_other(runtime_dir: Path) -> None:
    with Follower(runtime_dir, in_use=900 * MIB):
        first = subprocess.Popen(
            [sys.executable, "-m", "kvcached_core.cli", "limit", "qwen3-0.6b", "--ceiling", "600MiB"],
            env=surroundings(runtime_dir),
            stdout=subprocess.PIPE,
            text=True,
        )
        wait_for_revision(runtime_dir, 1)
        second = kvcached("limit", "qwen3-0.6b", "--ceiling", "1GiB", runtime_dir=runtime_dir)
        out, _ = first.communicate(timeout=30)
    assert (first.returncode, second.code) == (1, 0)
    assert re.search(
        r"REPLACED after \d\.\d s by another operator: floor 0\.0, ceiling 1024\.0 MiB, weight 1 "
        r"\(revision 2, this was 1\)",
        out,
    )
    assert "ceiling 600.0 -> 1024.0 MiB" in second.out
    assert "(revision 2)" in second.out


def wait_for_revision(runtime_dir: Path, revision: int) -> None:
    deadline = time.monotonic() + 20
    while member_of(runtime_dir).limits_revision < revision:
        assert time.monotonic() < deadline, "the command never changed the limits"
        time.sleep(0.01)


def test_limits_of_a_group_are_shared_by_its_ranks_and_reached_by_all(runtime_dir: Path) -> None:
    ranks = {"engine_id": "e", "cached": 400 * MIB}
    with Follower(runtime_dir, **ranks), Follower(runtime_dir, rank=1, **ranks):
        done = kvcached_here("limit", "qwen3-0.6b", "--ceiling", "600MiB", "--json", runtime_dir=runtime_dir)
    (change,) = done.document["changes"]
    assert change["now"]["resident_bytes"] == 600 * MIB


def test_a_member_on_two_devices_is_limited_on_both_or_on_the_one_that_is_named(runtime_dir: Path) -> None:
    name = "qwen3-0.6b"
    group = {"engine_id": "e", "cached": 400 * MIB}
    with Follower(runtime_dir, **group), Follower(runtime_dir, rank=1, device_id=GPU_ID, **group):
        one = kvcached_here("limit", name, "--ceiling", "300MiB", "--device", "GPU-3f", runtime_dir=runtime_dir)
        assert (one.code, len(one.out.splitlines())) == (0, 1)
        both = kvcached_here("limit", name, "--ceiling", "200MiB", runtime_dir=runtime_dir)
        assert (both.code, len(both.out.splitlines())) == (0, 2)
        assert member_of(runtime_dir).resident_bytes == member_of(runtime_dir, GPU_ID).resident_bytes == 200 * MIB


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "nothing to change"),
        (("--ceiling", "12G"), "'12G' is not a size"),
        (("--ceiling", ""), "'' is not a size"),
        (("--ceiling", "1GiB", "--floor", "2GiB"), "do not go together"),
        (("--floor", "4GiB", "--ceiling", "4GiB"), "cannot be kept"),
        (("--weight", "0"), "weight 0"),
        (("--weight", "x"), "valid number"),
    ],
)
def test_limits_that_cannot_work_are_refused_and_change_nothing(
    runtime_dir: Path, words: tuple[str, ...], reason: str
) -> None:
    with Follower(runtime_dir):
        done = kvcached_here("limit", "qwen3-0.6b", *words, runtime_dir=runtime_dir)
        assert member_of(runtime_dir).limits_revision == 0
    assert done.code == 2
    assert reason in done.err


def test_an_unknown_member_is_refused_with_those_that_are_there(runtime_dir: Path) -> None:
    with Follower(runtime_dir):
        done = kvcached_here("limit", "qwen4", "--ceiling", "1GiB", runtime_dir=runtime_dir)
        answer = kvcached_here("limit", "qwen4", "--ceiling", "1GiB", "--json", runtime_dir=runtime_dir)
    assert done.code == answer.code == 3
    assert "no member 'qwen4'" in done.err
    assert "qwen3-0.6b" in done.err
    assert answer.document["schema"] == "kvcached.error/1"
    assert answer.document["exit_code"] == 3


def test_another_operators_trim_does_not_replace_a_limit(runtime_dir: Path) -> None:
    with Follower(runtime_dir, in_use=700 * MIB):
        ledger = Ledger.open("host", None, runtime_dir=runtime_dir)
        change = limit.put_in_force(ledger, "qwen3-0.6b", limit.read_wish(None, "600MiB", None))
        ledger.request_trim("qwen3-0.6b", MIB)
        result = limit.wait(ledger, change, time.monotonic(), 0.1)
        ledger.close()
    assert result.outcome is limit.Outcome.TIMED_OUT
    assert result.now is not None
    assert result.now.revision > change.revision
