"""Stand-ins for the parts beside the one under test: an account without a ledger, hands without a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvcached_core.orders import Ack, Map, Report, Retire, Undo
from kvcached_sglang.mapper import Allowance, Order
from kvcached_sglang.space import Space

NO_LIMIT = 1 << 60


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class FakeHands:
    """Carries orders out when told to, and says what a ledger that grants so much in all would."""

    def __init__(self, room_bytes: int = NO_LIMIT, ceiling_bytes: int = NO_LIMIT, *, extent_bytes: int = 4096) -> None:
        self.room_bytes = room_bytes
        self.extent_bytes = extent_bytes
        self.mapped_bytes = 0
        self.ceiling_bytes = ceiling_bytes
        self.owed_bytes = 0
        self.must = False
        self.fail_next = ""
        self.given: deque[Order] = deque()
        self.log: list[Order] = []
        self.reports: list[Report] = []
        self.waits = 0
        self.clock = Clock()
        self.on_wait: Callable[[], None] = self.carry_out
        self._heard: deque[Ack | Allowance] = deque()
        self.say()

    def say(self) -> None:
        """The ledger's word has changed."""
        growable = max(0, self.room_bytes - self.mapped_bytes)
        self._heard.append(Allowance(growable, self.owed_bytes, self.ceiling_bytes, self.must))

    def carry_out(self) -> None:
        """Carry out everything that was ordered."""
        while self.given:
            order = self.given.popleft()
            size = sum(stop - start for start, stop in order.block_ranges) * self.extent_bytes
            error = ""
            if isinstance(order, Map):
                error, self.fail_next = self.fail_next, ""
                if self.mapped_bytes + size > self.room_bytes:
                    error = "the ledger grants nothing"
                self.mapped_bytes += 0 if error else size
            else:
                self.mapped_bytes -= size
            self._heard.append(Ack(order.seq, error, shortage=bool(error)))
        self.say()

    # What the ticker calls

    @property
    def has_news(self) -> bool:
        return bool(self._heard)

    def send(self, order: Order) -> None:
        if isinstance(order, Report):
            self.reports.append(order)
            return
        self.given.append(order)
        self.log.append(order)

    def take(self) -> list[Ack | Allowance]:
        taken, self._heard = list(self._heard), deque()
        return taken

    def wait(self, seconds: float) -> bool:
        self.waits += 1
        self.clock.seconds += seconds
        self.on_wait()
        return self.has_news

    def note_step(self, step: int, streams: Sequence[int]) -> None:
        pass


def kinds(orders: Sequence[Order]) -> str:
    """Orders as letters: m, r and u."""
    return "".join({Map: "m", Retire: "r", Undo: "u"}[type(order)] for order in orders)


@dataclass
class FakeCache:
    """A prefix cache that holds the pages it is given, oldest first; of one space, if it is told which."""

    held: deque = field(default_factory=deque)
    space: Space | None = None

    def evictable(self, space: Space) -> int:
        if self.space not in (None, space):
            return 0
        return sum(len(pages) for pages in self.held) * space.tokens_per_block

    def evict(self, space: Space, num_tokens: int) -> int:
        evicted = 0
        if self.space not in (None, space):
            return 0
        while self.held and evicted < num_tokens:
            pages = self.held.popleft()
            space.free_list.free_pages = space.free_list.free_pages.new_tensor(
                [*space.free_list.free_pages.tolist(), *pages]
            )
            evicted += len(pages) * space.tokens_per_block
        return evicted
