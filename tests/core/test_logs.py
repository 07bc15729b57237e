"""The start-up line and where kvcached's log goes."""

from __future__ import annotations

import logging

from kvcached_core import __version__
from kvcached_core.logs import active_line, follow, inactive_line

GIB = 1 << 30


def test_the_start_up_line_has_everything_that_an_operator_asks_first() -> None:
    line = active_line(
        engine="vllm",
        engine_version="0.33.0",
        member="qwen3-0.6b",
        device_id="GPU-3f1c0a7e-1111-2222-3333-444455556666",
        virtual_bytes=120 * GIB,
        floor_bytes=GIB // 2,
        ceiling_bytes=40 * GIB,
        layout="BLNHC",
        page_bytes=GIB // 32,
    )
    assert line == (
        f"kvcached {__version__} is on: vllm 0.33.0, member qwen3-0.6b on GPU-3f1c0a7e-1111-2222-3333-444455556666, "
        "virtual capacity 120.00 GiB, floor 512.00 MiB, ceiling 40.00 GiB, layout BLNHC, page 32.00 MiB"
    )


def test_an_engine_that_runs_natively_says_so_with_the_reason() -> None:
    line = inactive_line(engine="sglang", reason="SGLang 0.6 is not tested")
    assert line == f"kvcached {__version__} is OFF, sglang runs natively: SGLang 0.6 is not tested"


def test_kvcached_logs_where_the_engine_logs_at_its_own_level() -> None:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    engine_log = logging.getLogger("test-engine")
    engine_log.addHandler(handler)
    before = {name: logging.getLogger(name) for name in ("kvcached_core", "kvcached_test")}
    try:
        follow(engine_log, "INFO", "kvcached_test")
        logging.getLogger("kvcached_core.ledger").info("core")
        logging.getLogger("kvcached_test.plugin").info("plugin")
        logging.getLogger("kvcached_test.plugin").debug("too much")
    finally:
        for log in before.values():
            log.handlers, log.propagate = [], True
            log.setLevel(logging.NOTSET)
        engine_log.removeHandler(handler)
    assert seen == ["core", "plugin"]
