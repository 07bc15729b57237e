"""A rank without memory, in this process or one of its own: it answers what it is asked to and remembers the rest."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from kvcached_core.orders import Ack, FromRank, Hello, Map, OrderServer, Retire, ToRank, Undo, Welcome


class EchoRank:
    """Says yes to every order, at the next tick.

    Attributes:
        orders: What it was told, in order.
        holds_back: Sequence numbers that it does not answer yet.
        preferred: Blocks per extent that it would choose.
        ticks: How often `tick` was called.
        is_calm: What it says of itself.
    """

    is_calm = True

    def __init__(self, index: int = 0, *, preferred: int = 8) -> None:
        self.index = index
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.orders: list[ToRank] = []
        self.holds_back: set[int] = set()
        self.preferred = preferred
        self.ticks = 0
        self._said: list[FromRank] = []

    def order(self, message: ToRank) -> None:
        self.orders.append(message)
        if isinstance(message, Hello):
            blocks_per_extent = message.blocks_per_extent or self.preferred
            self._said.append(Welcome(self.index, os.getpid(), "host", "echo", blocks_per_extent, 1, 1, 100))
        elif isinstance(message, (Map, Retire, Undo)):
            if message.block_ranges == BROKEN:
                raise MemoryError("half of it is mapped")
            self._said.append(Ack(message.seq))
        os.eventfd_write(self.wake, 1)

    def tick(self) -> list[FromRank]:
        self.ticks += 1
        said = [each for each in self._said if not (isinstance(each, Ack) and each.seq in self.holds_back)]
        self._said = [each for each in self._said if each not in said]
        return said


BROKEN = ((13, 14),)
"""Block ranges of an order that the rank cannot undo half-way."""


def main() -> None:
    server = OrderServer(Path(sys.argv[1]), EchoRank(int(sys.argv[2])))
    server.start()
    print("ready", flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main()
