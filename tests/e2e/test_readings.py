"""What is read of a server is what its ledger slot says."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import closing
from pathlib import Path

from kvcached_core.ledger import Ledger

from tests.e2e.readings import Readings, members
from tests.e2e.server import Server, free_port


def test_a_member_is_read_by_name_and_gone_when_it_has_left(tmp_path: Path, runtime_dir: Path) -> None:
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    with (
        Server("idle", command, {}, port=free_port(), log=tmp_path / "log", cwd=tmp_path) as server,
        closing(Ledger.open("host", 1 << 30, runtime_dir=runtime_dir)) as ledger,
    ):
        readings = Readings(server, runtime_dir, "ours")
        assert members(runtime_dir) == []
        account, other = ledger.join("ours", engine="vllm"), ledger.join("other", engine="vllm")
        assert account.lease(64 << 20) == 64 << 20
        account.created(48 << 20)
        reading = readings.take()
        assert reading["resident_bytes"] == 48 << 20
        assert reading["members"] == [{"name": "ours", "device": "host", "lease_bytes": 64 << 20}]
        assert readings.members_named() == ["ours on host"]
        account.destroyed(48 << 20)
        account.give_back(64 << 20)
        assert readings.settle(below_bytes=48 << 20, deadline_seconds=20)["resident_bytes"] == 0
        account.leave()
        assert readings.members_named() == []
        other.leave()


def test_what_is_being_unmapped_is_waited_for(tmp_path: Path, runtime_dir: Path) -> None:
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    with (
        Server("idle", command, {}, port=free_port(), log=tmp_path / "log", cwd=tmp_path) as server,
        closing(Ledger.open("host", 1 << 30, runtime_dir=runtime_dir)) as ledger,
    ):
        account = ledger.join("ours", engine="vllm")
        account.created(account.lease(64 << 20))
        account.destroyed(64 << 20)
        slow = threading.Timer(3.0, account.give_back, [64 << 20])
        slow.start()
        began = time.monotonic()
        reading = Readings(server, runtime_dir, "ours").settle(below_bytes=64 << 20, deadline_seconds=20)
        assert time.monotonic() - began >= 3.0
        assert reading["members"][0]["lease_bytes"] == 0
        slow.join()
        account.leave()
