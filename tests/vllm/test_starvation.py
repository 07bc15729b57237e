"""Claims of starvation.py."""

from __future__ import annotations

import pytest
from kvcached_vllm.starvation import LONG_SECONDS, Starvation


def test_a_long_wait_is_said_once_with_the_figures_each_time(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    starvation = Starvation(now=lambda: now)

    def wait(seconds: float) -> int:
        nonlocal now
        now += seconds
        starvation.goes_on(needed_blocks=30, free_blocks=7, attainable_blocks=16)
        return len(caplog.records)

    assert wait(0) == 0
    assert wait(LONG_SECONDS / 2) == 0
    assert wait(LONG_SECONDS / 2) == 1
    assert wait(LONG_SECONDS) == 1
    assert "needs 30 blocks, 7 are free, and this engine could hold 16 now" in caplog.text
    starvation.ended()
    assert wait(LONG_SECONDS * 2) == 1
    assert wait(LONG_SECONDS) == 2
