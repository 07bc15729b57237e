"""The one collective: tensor-parallel ranks agree on a few numbers, at ticks that are the same on all of them.

What a rank's ledger lets it hold, and how far its orders have got, is its own; what the scheduler is told must be the
same on all. A rank that entered a collective alone would hang the group, so *when* to agree follows from numbers that
are already the same everywhere (the count of ticks, free pages, requests), and *what* counts is the least over the
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NO_LIMIT = (1 << 62) - 1


@dataclass(frozen=True)
class Agreed:
    """The numbers of an agreement, the same on all ranks.

    Attributes:
        now_ms: A time between the ranks' entries into the agreement.
        growable_bytes: What every rank's ledger would grant beyond what is mapped.
        owed_bytes: What some rank's ledger wants back.
        must: On some rank what is owed binds even where running requests have to give way.
        ceiling_bytes: What no rank may exceed.
    """

    now_ms: int = 0
    growable_bytes: int = 0
    owed_bytes: int = 0
    must: bool = False
    ceiling_bytes: int = NO_LIMIT


class Agreement:
    """The least of each number over the ranks of a group."""

    def __init__(self, group: ProcessGroup | None) -> None:
        """None: this rank is alone, and agrees with itself without a collective."""
        self.alone = group is None or torch.distributed.get_world_size(group) == 1
        self.count = 0
        self._group = group

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The least of each number. Every rank calls this, with equally many numbers, in the same order.

        Numbers are whole and below 2**63; one whose greatest counts is passed negated.
        """
        self.count += 1
        if self.alone:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN, group=self._group)
        agreed: list[int] = tensor.tolist()
        return agreed
