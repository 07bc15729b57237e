"""Growing: extents that every rank has mapped join the free list at the same tick; extents that one could not map do
not.

One growth at a time is on its way in each space. Its outcome on this rank goes into the agreement; only the agreed
outcome has an effect. Where one rank fails, those that mapped unmap again, and the extents are absent everywhere
before they are taken anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvcached_core.orders import Ack, Map, Undo

from kvcached_sglang.agreement import Agreed
from kvcached_sglang.mapper import Order
from kvcached_sglang.space import Growth, Outcome, Space

log = logging.getLogger(__name__)

BACKOFF_MS = 20
"""After growth that failed somewhere."""
MAX_EXTENTS_PER_ORDER = 64


class Grower:
    """Orders growth and follows it, for one rank.

    Args:
        spaces: The id spaces of the model.
        give: Hands an order to the rank.
        next_seq: A sequence number for an order.
    """

    def __init__(self, spaces: Sequence[Space], give: Callable[[Order], None], next_seq: Callable[[], int]) -> None:
        self.mapped_extents = 0
        self.failed_orders = 0
        self._spaces = spaces
        self._give = give
        self._next_seq = next_seq
        self._paused_until_ms = 0

    @property
    def under_way(self) -> bool:
        """Whether any extent is on its way."""
        return any(space.growth is not None for space in self._spaces)

    @property
    def under_way_bytes(self) -> int:
        """Of what is on its way."""
        return sum(len(space.growth.extent_ids) * space.extent_bytes for space in self._spaces if space.growth)

    def order(self, space: Space, wanted_tokens: int, growable_bytes: int, agreed: Agreed) -> int:
        """Order growth so that so many tokens are free, as far as the ledger lets us.

        Returns:
            Bytes ordered.
        """
        if space.growth is not None or agreed.now_ms < self._paused_until_ms:
            return 0
        extents = -(-(wanted_tokens - space.free_tokens) // space.extent_tokens)
        room = min(space.extents.room, growable_bytes // space.worst_extent_bytes, MAX_EXTENTS_PER_ORDER)
        ids = space.extents.take_absent(max(0, min(extents, room)))
        if ids:
            space.growth = Growth(self._next_seq(), ids)
            self._give(Map(space.growth.seq, space.orders(ids)))
        return len(ids) * space.extent_bytes

    def hear(self, ack: Ack) -> bool:
        """Note an answer.

        Returns:
            Whether it was one to an order of ours.
        """
        for space in self._spaces:
            growth = space.growth
            if growth is not None and growth.seq == ack.seq:
                self._note(space, growth, ack)
                return True
        return False

    def settle(self, space: Space, outcome: Outcome, agreed: Agreed) -> None:
        """Act on the agreed outcome of a space's growth."""
        growth = space.growth
        if growth is None or outcome is Outcome.UNKNOWN:
            return
        if outcome is Outcome.FAILED:
            self._paused_until_ms = agreed.now_ms + BACKOFF_MS
            growth.undoing = True
            self._take_back(space, growth)
            return
        space.growth = None
        if growth.undoing:
            space.extents.abandoned(growth.extent_ids)
            return
        space.arrived(growth.extent_ids)
        space.free_list.add(space.usable_ranges(growth.extent_ids))
        self.mapped_extents += len(growth.extent_ids)

    def _note(self, space: Space, growth: Growth, ack: Ack) -> None:
        if growth.mapped is None:
            growth.mapped = not ack.error
            if ack.error:
                self.failed_orders += 1
                level = logging.DEBUG if ack.shortage else logging.ERROR
                log.log(level, "%d extents (%s) could not be mapped: %s", len(growth.extent_ids), space.name, ack.error)
            if growth.undoing:
                self._take_back(space, growth)
        else:
            growth.mapped = False  # the answer to the undoing

    def _take_back(self, space: Space, growth: Growth) -> None:
        """Unmap here what must not stay; if it is still being mapped, when that has been answered."""
        if growth.mapped:
            growth.seq = self._next_seq()
            self._give(Undo(growth.seq, space.orders(growth.extent_ids)))
