"""The one line that each engine's log has about kvcached at start-up, and where kvcached's log goes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvcached_core import __version__
from kvcached_core.sizes import format_bytes

if TYPE_CHECKING:
    from typing import TextIO

    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler


def active_line(
    *,
    engine: str,
    engine_version: str,
    member: str,
    device_id: str,
    virtual_bytes: int,
    floor_bytes: int,
    ceiling_bytes: int,
    layout: str,
    page_bytes: int,
) -> str:
    """The start-up line of an engine whose KV cache is elastic.

    Args:
        member: Its name in the ledger.
        virtual_bytes: What the engine was told it has: the size of its reserved addresses.
        layout: The engine's name of its KV layout.
    """
    return (
        f"kvcached {__version__} is on: {engine} {engine_version}, member {member} on {device_id}, "
        f"virtual capacity {format_bytes(virtual_bytes)}, floor {format_bytes(floor_bytes)}, "
        f"ceiling {format_bytes(ceiling_bytes)}, layout {layout}, page {format_bytes(page_bytes)}"
    )


def inactive_line(*, engine: str, reason: str) -> str:
    """The start-up line of an engine that was asked to use kvcached and runs natively.

    Args:
        reason: What is wrong and what to do.
    """
    return f"kvcached {__version__} is OFF, {engine} runs natively: {reason}"


def follow(engine_log: logging.Logger, level: str, *packages: str) -> None:
    """Afterwards kvcached's packages log to whatever handlers the engine's logger has, at their own level.

    vLLM gives handlers to its own logger only, from 0.31 on after plugins were loaded, and leaves the root logger
    without one, so that other packages' INFO lines are lost. Source: ``vllm/logger.py`` (0.30 to 0.34). Until the
    engine's logger has a handler, lines go to standard error.

    Args:
        engine_log: The logger that has the engine's handlers, or will have.
        level: ``KVCACHED_LOG_LEVEL``.
        packages: Names of the plugin's packages beside the core's.
    """
    for package in ("kvcached_core", *packages):
        log = logging.getLogger(package)
        log.setLevel(level)
        log.parent = engine_log
        if not any(isinstance(handler, _BeforeTheEngines) for handler in log.handlers):
            log.addHandler(_BeforeTheEngines(engine_log))


class _BeforeTheEngines(_StreamHandler):
    """Writes to standard error as long as the engine's logger has no handler."""

    def __init__(self, engine_log: logging.Logger) -> None:
        super().__init__()
        self._engine_log = engine_log
        self.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s", "%m-%d %H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        if not self._engine_log.hasHandlers():
            super().emit(record)
