"""Claims of logs.py."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
from kvcached_core import __version__, logs


@pytest.fixture
def engine_log() -> Iterator[logging.Logger]:
    """The logger of an engine that has no handler yet, cut off from pytest's."""
    engine_log = logging.Logger("engine")
    ours = [logging.getLogger(name) for name in ("kvcached_core", "kvcached_plugin")]
    before = [(log.parent, log.level, list(log.handlers)) for log in ours]
    yield engine_log
    for log, (parent, level, handlers) in zip(ours, before, strict=True):
        log.parent, log.handlers = parent, handlers
        log.setLevel(level)


def test_lines_go_to_standard_error_until_the_engine_logs_and_then_only_there(
    engine_log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.follow(engine_log, "INFO", "kvcached_plugin")
    logs.follow(engine_log, "INFO", "kvcached_plugin")
    log = logging.getLogger("kvcached_plugin.part")
    log.error("too early")
    log.debug("not asked for")
    early = capsys.readouterr().err
    assert early.startswith("ERROR ")
    assert early.endswith(" too early\n")
    assert early.count("\n") == 1
    engine_log.addHandler(logging.StreamHandler(engines := io.StringIO()))
    log.info("later")
    logging.getLogger("kvcached_core.part").info("from the core")
    assert engines.getvalue() == "later\nfrom the core\n"
    assert capsys.readouterr().err == ""


def test_the_level_is_ours_and_not_the_engines(engine_log: logging.Logger) -> None:
    engine_log.setLevel(logging.ERROR)
    engine_log.addHandler(logging.StreamHandler(engines := io.StringIO()))
    logs.follow(engine_log, "DEBUG")
    logging.getLogger("kvcached_core.part").debug("detail")
    assert engines.getvalue() == "detail\n"


def test_the_start_up_line_has_everything_that_an_operator_asks_first() -> None:
    line = logs.active_line(
        engine="vLLM",
        engine_version="0.33.0",
        member="qwen3-0.6b",
        device_id="GPU-3f1c0a7e-1111-2222-3333-444455556666",
        virtual_bytes=120 << 30,
        floor_bytes=512 << 20,
        ceiling_bytes=40 << 30,
        layout="BLNHC",
        page_bytes=32 << 20,
    )
    assert line == (
        f"kvcached {__version__} is on: vLLM 0.33.0, member qwen3-0.6b on GPU-3f1c0a7e-1111-2222-3333-444455556666, "
        "virtual capacity 120.00 GiB, floor 512.00 MiB, ceiling 40.00 GiB, layout BLNHC, page 32.00 MiB"
    )


def test_an_engine_that_runs_natively_says_so_with_the_reason() -> None:
    line = logs.inactive_line(engine="SGLang", reason="SGLang 0.6 is not tested")
    assert line == f"kvcached {__version__} is OFF, SGLang runs natively: SGLang 0.6 is not tested"
