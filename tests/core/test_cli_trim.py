"""kvcached trim: cached memory goes back though nobody needs it."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from tests.core.command import kvcached, kvcached_here
from tests.core.follower import MIB, Follower


def test_a_member_trims_everything_but_what_requests_use(runtime_dir: Path) -> None:
    with Follower(runtime_dir, in_use=100 * MIB, cached=400 * MIB):
        done = kvcached("trim", "qwen3-0.6b", runtime_dir=runtime_dir)
    assert done.code == 0, done.out + done.err
    assert re.fullmatch(r"host qwen3-0\.6b: resident 500\.0 -> 100\.0 MiB in \d\.\d s \(revision 1\)\n", done.out)


def test_a_member_trims_to_a_size(runtime_dir: Path) -> None:
    with Follower(runtime_dir, cached=400 * MIB):
        done = kvcached_here("trim", "qwen3-0.6b", "--to", "150MiB", "--json", runtime_dir=runtime_dir)
    assert done.document["schema"] == "kvcached.trim/1"
    (trim,) = done.document["trims"]
    assert (trim["reached"], trim["goal_bytes"], trim["now"]["resident_bytes"]) == (True, 150 * MIB, 150 * MIB)
    assert trim["now"]["limits"] == trim["before"]["limits"]


def test_a_size_below_what_requests_use_is_not_reached_and_says_so(runtime_dir: Path) -> None:
    with Follower(runtime_dir, in_use=300 * MIB, cached=100 * MIB):
        done = kvcached_here("trim", "qwen3-0.6b", "--to", "150MiB", runtime_dir=runtime_dir)
    assert done.code == 1
    assert "resident 400.0 -> 300.0 MiB" in done.out
    assert "NOT reached: 150.0 MiB was asked for, and 300.0 MiB is in use by requests" in done.out


def test_a_stopped_member_has_not_answered(runtime_dir: Path) -> None:
    with Follower(runtime_dir, cached=100 * MIB) as member:
        member.process.send_signal(signal.SIGSTOP)
        done = kvcached_here("trim", "qwen3-0.6b", "--timeout", "0.5", runtime_dir=runtime_dir)
    assert done.code == 1
    assert "has not answered" in done.out
