"""A member in a process of its own that does what an engine's agent does: it follows its allowance.

It holds no real memory, only its account: so many bytes in use, the rest cached, and it gives cached bytes back when
the ledger says that it holds too much, or when an operator asks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from kvcached_core.account import Account
from kvcached_core.ledger import Ledger

MIB = 1 << 20
GIB = 1 << 30
TICK_SECONDS = 0.005


class Follower:
    """Such a process, from the outside: a context that ends it.

    Args:
        runtime_dir: The directory of the ledgers.
        total_bytes: Of the device.
        options: Of the command line below, in bytes.
    """

    def __init__(
        self,
        runtime_dir: Path,
        name: str = "qwen3-0.6b",
        *,
        device_id: str = "host",
        total_bytes: int = 2 * GIB,
        engine: str = "vllm",
        model: str = "Qwen/Qwen3-0.6B",
        engine_id: str = "",
        **options: int,
    ) -> None:
        words = [str(runtime_dir), name, device_id, str(total_bytes), engine, model, engine_id]
        words += [f"--{option.replace('_', '-')}={value}" for option, value in options.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.core.follower", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Follower:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", "the member could not start"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)

    @property
    def pid(self) -> int:
        return self.process.pid


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("runtime_dir", "name", "device_id", "total_bytes", "engine", "model", "engine_id"):
        parser.add_argument(name)
    for name in ("floor", "ceiling", "in-use", "cached", "wants", "static", "headroom", "rank"):
        parser.add_argument(f"--{name}", type=int, default=None if name == "ceiling" else 0)
    given = parser.parse_args()
    ledger = Ledger.open(
        given.device_id,
        int(given.total_bytes),
        runtime_dir=Path(given.runtime_dir),
        headroom_bytes=given.headroom,
    )
    account = ledger.join(
        given.name,
        engine=given.engine,
        rank=given.rank,
        floor_bytes=given.floor,
        ceiling_bytes=given.ceiling,
        engine_id=given.engine_id,
        model=given.model,
    )
    if given.static:
        account.static_lease(given.static, deadline_seconds=5)
        account.static_used(given.static)
    hold(account, given.in_use + given.cached)
    tick(account, given.in_use, given.wants)
    print("ready", flush=True)
    while True:
        time.sleep(TICK_SECONDS)
        tick(account, given.in_use, given.wants)


def hold(account: Account, num_bytes: int) -> None:
    granted = account.lease(num_bytes)
    assert granted == num_bytes, f"granted {granted} of {num_bytes}"
    account.created(granted)


def tick(account: Account, in_use_bytes: int, wanted_bytes: int) -> None:
    allowance = account.allowance()
    surplus = max(account.lease_bytes - allowance.target_bytes, allowance.trim_bytes)
    spare = min(surplus, account.created_bytes - in_use_bytes)
    if spare > 0:
        account.destroyed(spare)
        account.give_back(spare)
    account.report(
        demand_bytes=in_use_bytes + wanted_bytes,
        unmet_bytes=wanted_bytes,
        free_bytes=0,
        cached_bytes=account.created_bytes - in_use_bytes,
        busy=in_use_bytes > 0,
    )


if __name__ == "__main__":
    main()
