"""The background thread that maps and unmaps for one SGLang rank, and watches its ledger.

The scheduler's tick decides and hands over orders; this thread makes every driver call and every ledger call, so that
neither is in a scheduling step, and looks at the ledger while the scheduler sleeps or computes. What it has to say
waits until the tick asks for it: nothing of the allocator's changes outside the tick.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcached_core.orders import TICK_SECONDS, Ack, FromRank, Map, Report, Retire, Standing, Undo
from kvcached_core.rank import Rank
from kvcached_core.wake import Alarm, drain

log = logging.getLogger(__name__)

Order = Map | Retire | Undo | Report


@dataclass(frozen=True)
class Allowance:
    """What this rank's ledger says, relative to what was mapped at that moment.

    Attributes:
        growable_bytes: How much more it would grant now.
        owed_bytes: How much is mapped beyond what sharing leaves this member.
        ceiling_bytes: What this member may hold at most.
        must: What is owed binds even where running requests have to give way.
    """

    growable_bytes: int
    owed_bytes: int
    ceiling_bytes: int
    must: bool


class Mapper(threading.Thread):
    """Carries out one rank's orders in their order.

    An unexpected error means that nobody knows any more what is mapped. It ends the process at once: an exception in
    one rank's thread would otherwise hang the whole group until a time-out.
    """

    def __init__(self, rank: Rank, extent_bytes: Callable[[], int]) -> None:
        """
        Args:
            rank: Used by this thread alone, but for ``pin`` and ``note_step``.
            extent_bytes: What the rank counts an extent as.
        """
        super().__init__(name="kvcached-mapper", daemon=True)
        self._rank = rank
        self._extent_bytes = extent_bytes
        self._orders: deque[Order | Callable[[], None]] = deque()
        self._heard: deque[Ack | Allowance] = deque()
        self._said = threading.Condition()
        self._alarm = Alarm(TICK_SECONDS)
        self._stopping = False

    # The scheduler's thread

    def send(self, order: Order | Callable[[], None]) -> None:
        """Hand over an order, or anything else that this thread should do between orders. Returns at once."""
        self._orders.append(order)
        self._alarm.ring()

    @property
    def has_news(self) -> bool:
        """Whether `take` has something."""
        return bool(self._heard)

    def take(self) -> list[Ack | Allowance]:
        """Everything said since the last call."""
        taken = []
        while self._heard:
            taken.append(self._heard.popleft())
        return taken

    def wait(self, seconds: float) -> bool:
        """Wait until there are news, so long at most; the interpreter is free for this thread meanwhile."""
        with self._said:
            return self._said.wait_for(lambda: self.has_news, seconds)

    def note_step(self, step: int, streams: Sequence[int]) -> None:
        """Everything up to this step is launched on these streams."""
        self._rank.note_step(step, streams)
        self._alarm.snooze(self._is_calm)

    def stop(self) -> None:
        """Carry out what was handed over, then unmap everything and leave the ledger. Idempotent."""
        self._stopping = True
        self._alarm.ring()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(5.0)

    def _is_calm(self) -> bool:
        return not self._orders and self._rank.is_calm

    # This thread

    def run(self) -> None:
        try:
            while not self._stopping:
                self.turn()
            self._rank.close()
        except BaseException as error:
            log.critical("kvcached can no longer map memory, so this process ends: %r", error, exc_info=error)
            os._exit(70)

    def turn(self) -> None:
        """Sleep until there are orders, carry them out, and look at fences and the ledger."""
        self._alarm.sleep([self._rank.wake])
        drain(self._rank.wake)
        while self._orders:
            order = self._orders.popleft()
            if callable(order):
                order()
            else:
                self._rank.order(order)
            self._say(self._rank.tick())
        self._say(self._rank.tick())

    def _say(self, messages: Sequence[FromRank]) -> None:
        for message in messages:
            if isinstance(message, Ack):
                self._heard.append(message)
            elif isinstance(message, Standing):
                self._heard.append(self._allowance(message))
        if messages:
            with self._said:
                self._said.notify_all()

    def _allowance(self, standing: Standing) -> Allowance:
        extent_bytes, held = self._extent_bytes(), self._rank.num_extents
        return Allowance(
            growable_bytes=max(0, standing.may_hold_extents - held) * extent_bytes,
            owed_bytes=max(0, held - standing.target_extents) * extent_bytes,
            ceiling_bytes=standing.ceiling_extents * extent_bytes,
            must=standing.must,
        )
