"""kvcached status: the ledgers as people and programs read them."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

from kvcached_core.ledger import Ledger
from kvcached_core.ledger_file import ledger_path

from tests.core.command import kvcached, kvcached_here
from tests.core.follower import GIB, MIB, Follower

GPU_ID = "GPU-3f1c0a7e-1111-2222-3333-444455556666"

GOLDEN = """\
GPU-3f1c0a7e   capacity 138.0 GiB   headroom 1.0   unleased 90.2
MEMBER      ENGINE  RESIDENT  LEASE  FLOOR  CEILING  CACHED  STATE
qwen3-0.6b  vllm    9.2 GiB   9.2    0.5    42.9     3.1     serving
qwen3-1.7b  sglang  2.0 GiB   2.0    0.5    42.9     2.0     idle
"""


def gib(amount: float) -> int:
    return int(amount * GIB)


def test_status_of_two_engines_on_one_device(runtime_dir: Path) -> None:
    limits = {"floor": gib(0.5), "ceiling": gib(42.9)}
    shared = {"device_id": GPU_ID, "total_bytes": 138 * GIB, "headroom": GIB}
    static = gib(138 - 1 - 90.2 - 9.2 - 2.0)
    first = Follower(runtime_dir, "qwen3-0.6b", in_use=gib(6.1), cached=gib(3.1), static=static, **shared, **limits)
    with first, Follower(runtime_dir, "qwen3-1.7b", engine="sglang", cached=gib(2.0), **shared, **limits):
        done = kvcached("status", runtime_dir=runtime_dir)
    assert trimmed(done.out) == GOLDEN
    assert done.code == 0


def test_status_in_json_has_the_numbers_of_the_ledger(runtime_dir: Path) -> None:
    with Follower(runtime_dir, in_use=100 * MIB, cached=50 * MIB, ceiling=GIB):
        done = kvcached("status", "--json", runtime_dir=runtime_dir)
        ledger = Ledger.open("host", None, runtime_dir=runtime_dir)
        (expected,) = ledger.snapshot().members
        ledger.close()
    assert done.document["schema"] == "kvcached.status/1"
    assert done.document["runtime_dir"] == str(runtime_dir)
    (device,) = done.document["devices"]
    assert (device["device_id"], device["total_bytes"]) == ("host", 2 * GIB)
    (member,) = device["members"]
    assert {**member, "age_seconds": 0, "heartbeat_age_seconds": 0} == {
        **vars(expected), "age_seconds": 0, "heartbeat_age_seconds": 0,
    }  # fmt: skip
    assert member["resident_bytes"] == 150 * MIB


def test_a_small_device_is_shown_in_mib(runtime_dir: Path) -> None:
    with Follower(runtime_dir, cached=150 * MIB):
        done = kvcached_here("status", runtime_dir=runtime_dir)
    assert "host   capacity 2048.0 MiB   headroom 0.0   unleased 1898.0" in done.out
    assert "150.0 MiB" in done.out


def test_a_killed_member_is_gone_and_its_memory_can_be_leased(runtime_dir: Path) -> None:
    with Follower(runtime_dir, cached=150 * MIB) as member:
        member.process.kill()
        member.process.wait(timeout=10)
        done = kvcached("status", runtime_dir=runtime_dir)
    assert "unleased 2048.0" in done.out
    assert "no members" in done.out


def test_a_stopped_member_is_said_to_be_stopped(runtime_dir: Path) -> None:
    with Follower(runtime_dir, cached=150 * MIB) as member:
        member.process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while "stopped for" not in (text := kvcached_here("status", runtime_dir=runtime_dir).out):
            assert time.monotonic() < deadline, text
    assert re.search(r"qwen3-0.6b .* stopped for \d+ s", text)


def test_a_member_that_is_short_says_how_much(runtime_dir: Path) -> None:
    with Follower(runtime_dir, in_use=100 * MIB, wants=30 * MIB):
        done = kvcached_here("status", runtime_dir=runtime_dir)
    assert "serving, short of 30.0" in done.out


def test_ranks_of_one_engine_on_one_device_can_be_told_apart(runtime_dir: Path) -> None:
    with Follower(runtime_dir, engine_id="e"), Follower(runtime_dir, engine_id="e", rank=1):
        done = kvcached_here("status", runtime_dir=runtime_dir)
    assert "qwen3-0.6b[0]" in done.out
    assert "qwen3-0.6b[1]" in done.out


def test_without_any_ledger_status_says_where_it_looked_and_makes_nothing(runtime_dir: Path) -> None:
    nowhere = runtime_dir / "none"
    done = kvcached_here("status", runtime_dir=nowhere)
    assert done.code == 0
    assert str(nowhere) in done.out
    assert not nowhere.exists()
    assert kvcached_here("status", "--json", runtime_dir=nowhere).document["devices"] == []


def test_a_damaged_ledger_is_named_and_the_others_are_shown(runtime_dir: Path) -> None:
    damaged = ledger_path(runtime_dir, GPU_ID)
    with Follower(runtime_dir, cached=MIB):
        damaged.write_bytes(b"nonsense")
        done = kvcached_here("status", runtime_dir=runtime_dir)
        answer = kvcached_here("status", "--json", runtime_dir=runtime_dir)
    assert done.code == answer.code == 1
    assert "qwen3-0.6b" in done.out
    assert "GPU-3f1c0a7e  " in done.out
    assert str(damaged) in done.out.replace("\n", "")
    assert [each["device_id"] for each in answer.document["unreadable"]] == [GPU_ID]
    assert [each["device_id"] for each in answer.document["devices"]] == ["host"]


def test_one_device_can_be_chosen_by_the_beginning_of_its_uuid(runtime_dir: Path) -> None:
    with Follower(runtime_dir, "a"), Follower(runtime_dir, "b", device_id=GPU_ID):
        chosen = kvcached_here("status", "--device", "gpu-3f1c", "--json", runtime_dir=runtime_dir)
        other = kvcached_here("status", "--device", "GPU-9", runtime_dir=runtime_dir)
    assert [each["device_id"] for each in chosen.document["devices"]] == [GPU_ID]
    assert other.code == 3
    assert GPU_ID in other.err


def trimmed(text: str) -> str:
    """Without the blanks that fill a table's lines."""
    return "".join(line.rstrip() + "\n" for line in text.splitlines())
