"""What one process holds on one device: it maps and unmaps on order, and keeps the account of it.

The rank is the only one that touches the ledger slot of its memory. At no instant can the same bytes be granted
twice, because the order of steps is: to grow, lease, then driver, then ``created``; to shrink, ``destroyed``, then
driver, then give the lease back.

References to pages are counted per extent, so that orders may be cut as they like: extents mapped together may
retire one by one, also where they share a page.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvcached_core.errors import DeviceMemoryError, DriverError, InvariantError, LedgerError
from kvcached_core.orders import (
    ALIVE_SECONDS,
    TICK_SECONDS,
    Ack,
    Alive,
    BlockRanges,
    FromRank,
    Hello,
    Map,
    Report,
    Retire,
    Standing,
    ToRank,
    Undo,
    Welcome,
)
from kvcached_core.sizes import format_bytes
from kvcached_core.wake import wake

if TYPE_CHECKING:
    from kvcached_core.account import Account
    from kvcached_core.arena import Arena
    from kvcached_core.backends.base import Backend, Fence
    from kvcached_core.geometry import Geometry

log = logging.getLogger(__name__)

REFRESH_SECONDS = 0.5
"""How often a rank asks its ledger and its device anew although no member has changed anything: processes outside
the ledger take and free memory without a word."""
SAID_AFTER_SECONDS = 5.0
"""How long an engine that starts waits for its neighbours before it says so."""


class Rank:
    """One process's memory on one device.

    `order` and `tick` belong to one thread (the decider's agent, or the rank's order server); `note_step` is the
    engine's thread's; a lock covers what they share.

    Attributes:
        index: The rank's number in its engine.
        wake: An eventfd; readable when `tick` should be called before its time.
    """

    def __init__(
        self,
        arena: Arena,
        geometry: Geometry,
        account: Account,
        backend: Backend,
        *,
        index: int,
        static_used_bytes: Callable[[], int] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is mapped yet; see `pin`.

        Args:
            geometry: Of ``arena``.
            account: This rank's slot in the ledger of ``backend``'s device.
            static_used_bytes: What weights, activations and graphs of this process hold now; put into the ledger
                from time to time. None where nothing but KV is accounted.
        """
        self.index = index
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._arena = arena
        self._geometry = geometry
        self._account = account
        self._backend = backend
        self._static_used_bytes = static_used_bytes
        self._now = now
        self._lock = threading.RLock()
        self._blocks_per_extent = geometry.blocks_per_extent
        self._num_extents = 0
        self._pinned_bytes = 0
        self._ready_bytes = 0  # pinned, and part of an extent that the scheduler has yet to order
        self._said: list[FromRank] = []
        self._changed: list[Standing] = []  # the last one, where it has not been said
        self._retiring: deque[tuple[Retire, Fence | None]] = deque()
        self._launched: tuple[int, Sequence[int]] = (0, ())
        self._report = Report(0, 0, 0, 0, busy=False)
        self._standing: Standing | None = None
        self._seen_generation = -1
        self._seen_at = 0.0
        self._alive_at = 0.0
        self._closed = False

    @property
    def is_calm(self) -> bool:
        """Whether `tick` would find nothing new. Any thread; O(1), without the lock: it may be late by a moment."""
        if self._retiring or self._said or self._changed or self._now() - self._seen_at >= REFRESH_SECONDS:
            return False
        return self._account.generation == self._seen_generation

    @property
    def num_extents(self) -> int:
        """Extents mapped here now, also those that wait for a fence."""
        return self._num_extents

    def pin(self, blocks: range, *, deadline_seconds: float = 0.0) -> None:
        """Map blocks for good, before any order: the engine's null block, which dummy runs and graph replays write.

        Where neighbours hold the device, it waits for them to make room, as for any other demand.

        Raises:
            LedgerError: No lease for them, or no page, within the deadline; with the figures.
            DriverError: The device refuses.
        """
        pages = self._geometry.page_ranges(blocks)
        failed = f"rank {self.index} cannot map the engine's null block on {self._backend.device_id}"
        began, said = self._now(), False
        while (answer := self._try_pin(pages)).error:
            waited = self._now() - began
            if not answer.shortage:
                raise DriverError(f"{failed}: {answer.error}")
            if waited >= SAID_AFTER_SECONDS and not said:
                said = True
                log.warning("%s yet: %s. It waits for neighbours up to %.0f s.", failed, answer.error, deadline_seconds)
            if waited >= deadline_seconds:
                raise LedgerError(
                    f"{failed}: {answer.error}, after {waited:.1f} s. Neighbours hold the device (see `kvcached "
                    "status`): stop one, or lower its ceiling."
                )
            time.sleep(TICK_SECONDS)

    def note_step(self, step: int, streams: Sequence[int] = ()) -> None:
        """Everything of this step is launched on these streams. Engine's thread; makes no driver call.

        Args:
            step: Number of the scheduling step; rises.
            streams: Handles of every stream that touches the KV cache.
        """
        self._launched = (step, streams)
        if self._retiring:
            wake(self.wake)

    def order(self, message: ToRank) -> None:
        """Carry out an order; what is to be answered appears in `tick`. Ignored once closed."""
        with self._lock:
            if self._closed:
                return
            if isinstance(message, Map):
                self._said.append(self._map(message))
            elif isinstance(message, Retire):
                if not self._retiring:
                    self._alive_at = self._now()
                self._retiring.append((message, None))
            elif isinstance(message, Undo):
                self._said.append(self._unmap(message.seq, message.block_ranges))
            elif isinstance(message, Report):
                self._report = message
                self._tell_ledger()
                self._look_at_ledger()  # now, for a turn of its own would be to hear the same
            else:
                self._said.append(self._welcome(message))
            if self._said or self._changed or self._retiring:
                wake(self.wake)

    def tick(self) -> list[FromRank]:
        """Look at fences and at the ledger. Call at least every `orders.TICK_SECONDS`.

        Returns:
            What the ledger says about this member, where that has changed, then answers to orders. In this order: a
            decider that heard of a map first would compare it with the target from before it, and trim it again.
        """
        with self._lock:
            if self._closed:
                return []
            self._unmap_what_is_done()
            self._look_at_ledger()
            changed, self._changed = self._changed, []
            said, self._said = self._said, []
            return [*changed, *self._sign_of_life(), *said]

    def close(self) -> None:
        """Unmap everything and leave the ledger. Idempotent. The engine's work has ended."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            held = self._arena.resident_bytes
            self._account.destroyed(held)
            try:
                self._arena.close()
            finally:
                self._account.leave()

    # Orders

    def _sign_of_life(self) -> list[FromRank]:
        now = self._now()
        if not self._retiring or now - self._alive_at < ALIVE_SECONDS:
            return []
        self._alive_at = now
        return [Alive()]

    def _welcome(self, hello: Hello) -> Welcome:
        if hello.num_blocks != self._geometry.num_blocks:
            raise InvariantError(
                f"the scheduler counts {hello.num_blocks} blocks and rank {self.index} {self._geometry.num_blocks}"
            )
        if hello.blocks_per_extent is not None:
            self._blocks_per_extent = hello.blocks_per_extent
            self._ready_bytes = self._pinned_bytes
        self._standing = None  # it is said anew, in extents of this size
        return Welcome(
            rank=self.index,
            pid=os.getpid(),
            device_id=self._backend.device_id,
            member=self._account.name,
            blocks_per_extent=self._blocks_per_extent,
            extent_bytes=self._extent_bytes,
            page_bytes=self._geometry.page_bytes,
            total_bytes=self._backend.memory().total_bytes,
        )

    @property
    def _extent_bytes(self) -> int:
        pages = self._geometry.worst_case_pages(self._blocks_per_extent, multiple_of=self._blocks_per_extent)
        return pages * self._geometry.page_bytes

    def _map(self, order: Map) -> Ack:
        answer = self._create(order.seq, self._pages(order.block_ranges))
        if not answer.error:
            self._num_extents += self._count(order.block_ranges)
            self._ready_bytes = 0  # the pinned extent is the first to be ordered
        return answer

    def _try_pin(self, pages: list[range]) -> Ack:
        with self._lock:
            wanted = self._arena.new_pages(pages) * self._arena.page_bytes
            answer = self._create(0, pages)
            unmet = wanted if answer.error else 0
            self._pinned_bytes += wanted - unmet
            self._account.expect(wanted, unmet)
            return answer

    def _create(self, seq: int, pages: list[range]) -> Ack:
        wanted = self._arena.new_pages(pages) * self._arena.page_bytes
        try:
            granted = self._account.lease(wanted)
        except LedgerError as error:
            return Ack(seq, str(error), shortage=True)
        if granted < wanted:
            self._account.give_back(granted)
            return Ack(seq, f"the ledger grants {format_bytes(granted)} of {format_bytes(wanted)} now", shortage=True)
        try:
            self._arena.map(pages)
        except (DeviceMemoryError, DriverError) as error:
            self._account.create_failed()
            self._account.give_back(wanted)
            return Ack(seq, str(error), shortage=isinstance(error, DeviceMemoryError))
        self._account.created(wanted)
        return Ack(seq)

    def _unmap(self, seq: int, block_ranges: BlockRanges) -> Ack:
        pages = self._pages(block_ranges)
        freed = self._arena.freed_pages(pages) * self._arena.page_bytes
        self._account.destroyed(freed)
        self._arena.unmap(pages)
        self._account.give_back(freed)
        self._num_extents -= self._count(block_ranges)
        return Ack(seq)

    def _unmap_what_is_done(self) -> None:
        step, streams = self._launched
        waiting: deque[tuple[Retire, Fence | None]] = deque()
        for order, fence in self._retiring:
            if fence is None and order.after_step <= step:
                fence = self._backend.fence(streams)
            if fence is not None and fence.done():
                self._said.append(self._unmap(order.seq, order.block_ranges))
            else:
                waiting.append((order, fence))
        self._retiring = waiting

    def _pages(self, block_ranges: BlockRanges) -> list[range]:
        """The pages of each extent in these ranges, one after the other: each extent has references of its own."""
        step = self._blocks_per_extent
        return [
            pages
            for start, stop in block_ranges
            for first in range(start, stop, step)
            for pages in self._geometry.page_ranges(range(first, min(first + step, stop)))
        ]

    def _count(self, block_ranges: BlockRanges) -> int:
        return sum(-(-(stop - start) // self._blocks_per_extent) for start, stop in block_ranges)

    # Ledger

    def _tell_ledger(self) -> None:
        report, extent = self._report, self._extent_bytes
        self._account.report(
            demand_bytes=report.demand_extents * extent,
            unmet_bytes=report.unmet_extents * extent,
            free_bytes=report.free_extents * extent,
            cached_bytes=report.cached_extents * extent,
            busy=report.busy,
        )

    def _look_at_ledger(self) -> None:
        now = self._now()
        due = now - self._seen_at >= REFRESH_SECONDS
        self._account.heartbeat()
        if due and self._static_used_bytes is not None:
            self._account.static_used(self._static_used_bytes())
        if not due and self._account.generation == self._seen_generation:
            return
        self._seen_generation, self._seen_at = self._account.generation, now
        standing = self._ask_standing()
        if standing != self._standing:
            self._standing = standing
            self._changed = [standing]

    def _ask_standing(self) -> Standing:
        allowance, extent = self._account.allowance(), self._extent_bytes
        lease = self._account.lease_bytes
        # An operator's wish is for what can be spared: it holds up no growth where all is in use.
        spare = (self._report.free_extents + self._report.cached_extents) * extent
        target = min(allowance.target_bytes, lease - min(allowance.trim_bytes, spare))
        more = max(0, allowance.may_hold_bytes - lease) + self._ready_bytes
        return Standing(
            may_hold_extents=self._num_extents + more // extent,
            target_extents=max(0, self._num_extents - -(-max(0, lease - target) // extent)),
            ceiling_extents=allowance.ceiling_bytes // extent,
            must=lease > allowance.ceiling_bytes,
            yielded_extents=(allowance.ceiling_bytes + allowance.yielded_bytes) // extent
            - allowance.ceiling_bytes // extent,
        )
