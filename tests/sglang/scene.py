"""One rank's spaces and ticker without a pool's memory: ids, orders and decisions only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from kvcached_core.geometry import Geometry, Stripe
from kvcached_sglang.agreement import Agreement
from kvcached_sglang.allocator import elastic_like
from kvcached_sglang.demand import Demand
from kvcached_sglang.space import Space
from kvcached_sglang.tick import Ticker
from kvcached_sglang.trimming import CachePolicy
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

from tests.sglang.fakes import NO_LIMIT, Clock, FakeCache, FakeHands

ROW_BYTES = 64
EXTENT_TOKENS = 64
EXTENT_BYTES = ROW_BYTES * EXTENT_TOKENS


def make_space(num_extents: int = 32, name: str = "full", window_tokens: int | None = None, short_by: int = 0) -> Space:
    """A space of one-token pages; extent 0 is resident, and all but the padding page of it free.

    Args:
        short_by: Tokens that the last extent lacks.
    """
    num_blocks = num_extents * EXTENT_TOKENS - short_by
    geometry = Geometry(
        num_blocks, (Stripe(0, ROW_BYTES, ROW_BYTES),), num_blocks * ROW_BYTES, EXTENT_BYTES, EXTENT_TOKENS
    )
    space = Space(name, geometry, 1, window_tokens=window_tokens)
    space.back(SimpleNamespace(geometry=geometry, bytes_per_token=ROW_BYTES), range(num_extents))
    elastic_like(TokenToKVPoolAllocator(num_blocks - 1, torch.float16, "cpu", None, False), space)
    return space


def demand(tokens: int = 0, *, ahead: int = 0, running: int = 0, pledged: int = 0, waiting: int = 0) -> Demand:
    """So many tokens to decode next."""
    return Demand(decode=tokens, ahead=ahead, running=running, pledged=pledged, prefill=pledged, waiting=waiting)


@dataclass
class Scene:
    """A rank that decides."""

    hands: FakeHands = field(default_factory=FakeHands)
    spaces: list[Space] = field(default_factory=lambda: [make_space()])
    cache: FakeCache = field(default_factory=FakeCache)
    clock: Clock = field(default_factory=Clock)
    agreement: Agreement = field(default_factory=lambda: Agreement(None))
    policy: CachePolicy = field(default_factory=CachePolicy)
    chunk_tokens: int = NO_LIMIT
    attainable_bytes: int = NO_LIMIT

    def __post_init__(self) -> None:
        self.hands.clock = self.clock
        self.ticker = Ticker(
            self.spaces,
            self.hands,
            self.agreement,
            self.cache,
            self.policy,
            extent_bytes=EXTENT_BYTES,
            chunk_tokens=self.chunk_tokens,
            attainable_bytes=self.attainable_bytes,
            now=self.clock,
        )

    @property
    def space(self) -> Space:
        return self.spaces[0]

    def tick(self, wanted: Demand | None = None, *, after_seconds: float = 0.01) -> None:
        self.clock.seconds += after_seconds
        self.ticker.tick(wanted if wanted is not None else demand())

    def settle(self, wanted: Demand | None = None, *, ticks: int = 40, after_seconds: float = 0.05) -> None:
        """Tick on, every order carried out between ticks."""
        for _ in range(ticks):
            self.hands.carry_out()
            self.tick(wanted, after_seconds=after_seconds)

    @property
    def num_resident(self) -> int:
        return self.space.extents.num_resident


class Lockstep(Agreement):
    """An agreement between threads. A rank that enters alone, or with other numbers than its peers, fails the test."""

    def __init__(self, barrier: threading.Barrier, table: list[Sequence[int]]) -> None:
        super().__init__(None)
        self.alone = False
        self._barrier = barrier
        self._table = table

    def least(self, numbers: Sequence[int]) -> list[int]:
        self.count += 1
        self._table.append(numbers)
        self._barrier.wait(10.0)
        rows = list(self._table)
        self._barrier.wait(10.0)
        if len({len(row) for row in rows}) != 1 or len(rows) != self._barrier.parties:
            raise AssertionError(f"ranks disagree on what is agreed on: {rows}")
        least = [min(column) for column in zip(*rows, strict=True)]
        if self._barrier.wait(10.0) == 0:
            self._table.clear()
        self._barrier.wait(10.0)
        return least


def in_lockstep(
    num_ranks: int, make: Callable[[int, Agreement], Scene], steps: Callable[[int, Scene], None]
) -> list[Scene]:
    """Run the same steps on every rank, each in a thread.

    Returns:
        The ranks' scenes afterwards.

    Raises:
        AssertionError: A rank entered an agreement that the others did not.
    """
    barrier, table = threading.Barrier(num_ranks), []
    scenes = [make(rank, Lockstep(barrier, table)) for rank in range(num_ranks)]
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            steps(rank, scenes[rank])
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        first = next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        raise AssertionError(f"a rank failed: {first!r}") from first
    return scenes
