"""Claims of static.py, with the real ledger and a device whose free bytes fall as weights load."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvcached_core.ledger import Ledger
from kvcached_sglang.static import StaticLease

GIB = 1 << 30
TOTAL = 24 * GIB


def test_an_engine_alone_on_its_card_loads_more_than_half_of_it(runtime_dir: Path) -> None:
    loaded = [0]
    free = lambda: TOTAL - loaded[0]  # noqa: E731
    with closing(Ledger.open("GPU-1", TOTAL, runtime_dir=runtime_dir, headroom_bytes=GIB, driver_free=free)) as ledger:
        account = ledger.join("m", engine="sglang")
        member: Any = SimpleNamespace(
            account=account,
            limits=SimpleNamespace(total_bytes=TOTAL),
            backend=SimpleNamespace(device_id="GPU-1"),
        )
        static = StaticLease(member, lambda: loaded[0], 0.9)
        for weights in (0, 16 * GIB):  # not on this machine before it loads; or known
            loaded[0] = 0
            account.static_used(0)
            static.take(weights)
            loaded[0] = 17 * GIB
            static.take()
            [seen] = ledger.snapshot().members
            assert seen.static_used_bytes == 17 * GIB
            assert seen.static_lease_bytes == 17 * GIB + int(TOTAL * (1 - 0.9))
