"""Ctrl-C and SIGTERM, one way out for both."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def raise_on_signals() -> None:
    """From now on both raise ``KeyboardInterrupt`` in the main thread."""
    for signum in SIGNALS:
        signal.signal(signum, _raise)


def _raise(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def postponed() -> Iterator[None]:
    """Keep them until the body has ended: between starting a process and noting it, say. In the main thread."""
    arrived: list[int] = []
    before = {signum: signal.signal(signum, lambda signum, frame: arrived.append(signum)) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if arrived:
        raise KeyboardInterrupt
