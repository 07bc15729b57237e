"""One id space of SGLang: which of its extents are resident, on their way, or leaving.

Full attention is one id space, sliding-window attention another. A draft model's pool has no ids of its own: its
memory comes and goes with the target's. Everything here is the same on every tensor-parallel rank at the same tick;
what differs between ranks (how far an order has got) is in `Growth.outcome` and `Departure.answered`, and is agreed
on before it has an effect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from kvcached_core.errors import InvariantError
from kvcached_core.extents import ExtentPool, Residency
from kvcached_core.geometry import Geometry, extent_block_ranges

if TYPE_CHECKING:
    from kvcached_sglang.allocator import Elastic
    from kvcached_sglang.demand import Demand
    from kvcached_sglang.pools import ElasticPool

PADDING_BLOCK = 0
"""SGLang's page 0 absorbs the writes of padded tokens and is never handed out."""

PINNED_EXTENT = 0
"""The one it is in."""


class Outcome(IntEnum):
    """What has become of an order on this rank; the least over all ranks is what counts."""

    FAILED = 0
    UNKNOWN = 1
    DONE = 2


@dataclass
class Growth:
    """Extents on their way.

    Attributes:
        seq: Of the order that this rank's mapper has to answer next.
        undoing: Some rank could not map them, so nobody keeps them; agreed.
        mapped: Whether they are mapped here; None until the first answer.
    """

    seq: int
    extent_ids: list[int]
    undoing: bool = False
    mapped: bool | None = None

    @property
    def outcome(self) -> Outcome:
        """How it stands on this rank; while undoing, done means that nothing of it is mapped here."""
        if self.mapped is None:
            return Outcome.UNKNOWN
        if self.undoing:
            return Outcome.UNKNOWN if self.mapped else Outcome.DONE
        return Outcome.DONE if self.mapped else Outcome.FAILED


@dataclass
class Departure:
    """Extents that leave, behind a fence; to make room for another space of this engine, or not."""

    seq: int
    extent_ids: list[int]
    makes_room: bool = False
    answered: bool = False


@dataclass
class Space:
    """The extents of one id space; the pinned one is resident from the start.

    Attributes:
        name: For log lines: ``full`` or ``swa``.
        geometry: Of the pool that has the ids.
        tokens_per_block: SGLang's page size.
        free_list: The allocator over these ids; it registers itself.
        credit_tokens: Room to grow that ``available_size`` counts; negative while in debt.
        growth: The one growth on its way, if any.
        departures: In the order in which they were ordered.
        window_tokens: Of sliding-window attention; None for full attention.
        supply: Asks for so many free pages before an allocation; set by the tick.
        cleared: Says that every page has become free at once; set by the tick.
    """

    name: str
    geometry: Geometry
    tokens_per_block: int
    free_list: Elastic = field(init=False)
    extents: ExtentPool = field(init=False)
    credit_tokens: int = 0
    growth: Growth | None = None
    departures: deque[Departure] = field(default_factory=deque)
    window_tokens: int | None = None
    supply: Callable[[Space, int], None] | None = None
    cleared: Callable[[Space], None] | None = None
    _layout_extents: list[range] = field(default_factory=list)
    _extent_bytes: int = 0
    _worst_extent_bytes: int = 0
    _num_resident_blocks: int = 0

    def __post_init__(self) -> None:
        self.extents = ExtentPool(self.geometry.num_extents, pinned=(PINNED_EXTENT,))
        self.arrived(self.extents.take_absent(1))

    @property
    def blocks_per_extent(self) -> int:
        return self.geometry.blocks_per_extent

    def step_tokens(self, demand: Demand) -> int:
        """What the next step may need of this space."""
        return min(demand.decode + self.prompt_tokens(demand.prefill, demand.chunk), self.num_usable_tokens)

    def kept_tokens(self, demand: Demand) -> int:
        """What has been admitted needs so much of this space: it stays free, whoever wants the memory."""
        return min(demand.decode + self.prompt_tokens(demand.pledged, demand.chunk), self.num_usable_tokens)

    def prompt_tokens(self, num_tokens: int, chunk: int) -> int:
        """What prompts of so many tokens hold of this space at once while they are prefilled."""
        if self.window_tokens is None:
            return num_tokens
        return min(num_tokens, chunk + self.window_tokens)  # what has left the window is freed between the chunks

    def ahead_tokens(self, demand: Demand) -> int:
        """What should be free: the next step and some more."""
        return min(self.step_tokens(demand) + demand.ahead, self.num_usable_tokens)

    @property
    def num_usable_tokens(self) -> int:
        """Virtual capacity."""
        return (self.geometry.num_blocks - 1) * self.tokens_per_block

    @property
    def absent_tokens(self) -> int:
        """Tokens that growing could add to the resident ones."""
        return self.num_usable_tokens - self.num_resident_blocks * self.tokens_per_block

    @property
    def free_tokens(self) -> int:
        """Tokens that are resident and free."""
        return self.free_list.num_free * self.tokens_per_block

    @property
    def extent_tokens(self) -> int:
        """Tokens of a whole extent."""
        return self.geometry.blocks_per_extent * self.tokens_per_block

    @property
    def extent_bytes(self) -> int:
        """What one extent holds, in all pools of this space. Pages that two extents share count by half."""
        return self._extent_bytes

    @property
    def worst_extent_bytes(self) -> int:
        """What mapping one extent costs at most."""
        return self._worst_extent_bytes

    def back(self, pool: ElasticPool, numbers: range) -> None:
        """Add a pool that is addressed with these ids, and whose pinned extent is mapped.

        Args:
            numbers: Of its extents in the process's layout.

        Raises:
            InvariantError: The pool is cut otherwise, so the same ids would be other extents.
        """
        cut = pool.geometry.num_blocks, pool.geometry.blocks_per_extent
        if cut != (self.geometry.num_blocks, self.geometry.blocks_per_extent):
            raise InvariantError(
                f"a pool of {cut[0]} pages in extents of {cut[1]} cannot share the ids of one of "
                f"{self.geometry.num_blocks} in extents of {self.geometry.blocks_per_extent}"
            )
        self._layout_extents.append(numbers)
        self._extent_bytes += round(pool.bytes_per_token * self.extent_tokens)
        self._worst_extent_bytes += pool.geometry.extent_bytes

    # Moving extents

    def arrived(self, extent_ids: Iterable[int]) -> None:
        """They are resident, on every rank."""
        ids = list(extent_ids)
        self.extents.arrived(ids)
        self._num_resident_blocks += sum(map(len, self.usable_ranges(ids)))

    def leave(self, extent_ids: Iterable[int]) -> None:
        """They are out of use, and resident until their departure."""
        ids = list(extent_ids)
        self.extents.retire(ids)
        self._num_resident_blocks -= sum(map(len, self.usable_ranges(ids)))

    @property
    def held_bytes(self) -> int:
        """Of all extents that hold memory or are about to."""
        return (self.extents.num_extents - self.extents.num_absent) * self._extent_bytes

    @property
    def retiring_bytes(self) -> int:
        """Of extents that are on their way out."""
        return sum(len(departure.extent_ids) for departure in self.departures) * self._extent_bytes

    # Blocks

    @property
    def num_resident_blocks(self) -> int:
        """Resident pages that the engine may be handed, free or not."""
        return self._num_resident_blocks

    def usable_ranges(self, extent_ids: Iterable[int]) -> list[range]:
        """The pages of these extents that the engine may be handed."""
        ranges = extent_block_ranges(extent_ids, self.geometry.num_blocks, self.blocks_per_extent)
        return [range(max(r.start, PADDING_BLOCK + 1), r.stop) for r in ranges]

    def resident_ranges(self) -> list[range]:
        """The pages of every resident extent. In time per extent."""
        resident = (e for e in range(self.extents.num_extents) if self.extents.state(e) is Residency.RESIDENT)
        return self.usable_ranges(resident)

    def orders(self, extent_ids: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """These extents in the process's layout, in every pool, as orders carry them."""
        ids = sorted(extent_ids)
        ranges: list[tuple[int, int]] = []
        for numbers in self._layout_extents:
            for extent in ids:
                number = numbers.start + extent
                if ranges and ranges[-1][1] == number:
                    ranges[-1] = (ranges[-1][0], number + 1)
                else:
                    ranges.append((number, number + 1))
        return tuple(ranges)

    def cover(self, num_blocks: int) -> None:
        """Before an allocation: see to it that so many pages are free, if anything can be done about it.

        The tick keeps more than one step can take, so that this is one comparison.
        """
        if num_blocks > self.free_list.num_free and self.supply is not None:
            self.supply(self, num_blocks)
