"""An engine that has requests and no memory for any: it waits, and says so when it takes long."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvcached_core.sizes import format_bytes

log = logging.getLogger(__name__)

LONG_SECONDS = 5.0


class Starvation:
    """How long nothing has run for want of memory.

    It may be long: a neighbour keeps what it has in use beyond this engine's floor, and a ceiling may have been lowered
    below what a request needs that was accepted before.

    Args:
        now: A clock in seconds that is the same on every rank, since what follows from `is_long` has to be.

    Attributes:
        is_long: It has lasted for `LONG_SECONDS`.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.is_long = False
        self._now = now
        self._since: float | None = None

    def ended(self) -> None:
        """Something runs, or nothing waits."""
        self._since, self.is_long = None, False

    def goes_on(self, *, needed_tokens: int, free_tokens: int, cached_tokens: int, growable_bytes: int) -> None:
        """The first request that waits still has no memory. Said once, with the figures, after a while."""
        if self._since is None:
            self._since = self._now()
        waited = self._now() - self._since
        if self.is_long or waited < LONG_SECONDS:
            return
        self.is_long = True
        log.warning(
            "Nothing has run for %.0f s for want of memory: the first request needs %d tokens of KV cache, %d are "
            "free and %d cached, and this engine could grow by %s now. It waits until neighbours give way or the "
            "ceiling is raised (see `kvcached status`).",
            waited, needed_tokens, free_tokens, cached_tokens, format_bytes(growable_bytes),
        )  # fmt: skip
