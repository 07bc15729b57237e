"""An engine that has requests and no memory for any: it waits without spinning, and says so when it takes long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

LONG_SECONDS = 5.0


class Starvation:
    """How long nothing has run for want of memory.

    It may be long: a neighbour keeps what it has in use beyond this engine's floor, and a ceiling may have been lowered
    below what a request needs that was accepted before.

    Attributes:
        is_long: It has lasted for `LONG_SECONDS`.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.is_long = False
        self._now = now
        self._since: float | None = None

    def ended(self) -> None:
        """Something runs, or nothing waits."""
        self._since, self.is_long = None, False

    def goes_on(self, *, needed_blocks: int, free_blocks: int, attainable_blocks: int) -> None:
        """The first request that waits still has no memory. Said once, with the figures, after a while."""
        if self._since is None:
            self._since = self._now()
        elif not self.is_long and self._now() - self._since >= LONG_SECONDS:
            self.is_long = True
            log.warning(
                "Nothing has run for %.0f s for want of memory: the first request needs %d blocks, %d are free, and "
                "this engine could hold %d now. It waits until neighbours give way or the ceiling is raised (see "
                "`kvcached status`).",
                self._now() - self._since, needed_blocks, free_blocks, attainable_blocks,
            )  # fmt: skip
