"""A neighbour that is a ledger account and no engine: it holds what it is told to, and gives way or not."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from kvcached_core.ledger import Ledger

POLL_SECONDS = 0.02


class Neighbour:
    """Beats in a thread of its own, and gives back what is beyond its target unless it is told to keep it.

    Args:
        ledger: Of the device.
        num_bytes: Held, all of it created.
        keeps: Whether it is in use; otherwise it is cached content, which goes when others want it.
    """

    def __init__(self, ledger: Ledger, num_bytes: int, *, keeps: bool) -> None:
        self._account = ledger.join("holder", engine="vllm")
        self._keeps = keeps
        self._ended = threading.Event()
        self._account.created(self._account.lease(num_bytes))
        self._say()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def held_bytes(self) -> int:
        return self._account.lease_bytes

    def give_way(self) -> None:
        """From now on what it holds is cached content."""
        self._keeps = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._ended.set()
        self._thread.join(10)
        held = self._account.lease_bytes
        self._account.destroyed(held)
        self._account.give_back(held)
        self._account.leave()

    def _run(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            surplus = self._account.lease_bytes - self._account.allowance().target_bytes
            if surplus > 0 and not self._keeps:
                self._account.destroyed(surplus)
                self._account.give_back(surplus)
            self._say()

    def _say(self) -> None:
        held = self._account.lease_bytes
        cached = 0 if self._keeps else held
        self._account.report(
            demand_bytes=held - cached, unmet_bytes=0, free_bytes=0, cached_bytes=cached, busy=self._keeps
        )
