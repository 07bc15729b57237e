"""Start-up capacity that does not depend on neighbours.

SGLang sizes its KV cache from the memory that is free when it starts, so a busy neighbour would fix a small pool for
the life of the engine. While it does that arithmetic, its question "how much is free?" is answered as if the device
were this engine's alone: the device's total, less what this process has taken. Everything else of the arithmetic (the
static fraction, state pools, token limits, the least over all ranks) stays SGLang's.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from kvcached_core.backends.base import Backend
from kvcached_core.errors import KvcachedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

GIB = 1 << 30
_FAILED = -1.0


class Sizing:
    """Answers SGLang's questions about free memory while it sizes its pools.

    Attributes:
        answered_bytes: The last answer.
    """

    def __init__(self) -> None:
        self._backend: Backend | None = None
        self._most_bytes: int | None = None
        self.answered_bytes = 0

    @contextmanager
    def as_if_alone(self, backend: Backend, most_bytes: int | None = None) -> Iterator[None]:
        """Within this, `available_gib` answers for this device as if nobody else used it; at most so much."""
        self._backend, self._most_bytes = backend, most_bytes
        try:
            yield
        finally:
            self._backend = None

    @property
    def active(self) -> bool:
        """Whether SGLang is sizing its pools now."""
        return self._backend is not None

    def available_gib(self, ordinal: int, group: ProcessGroup | None) -> float:
        """Total less what this process has taken; the least over ``group``.

        Every rank enters the reduction, also one whose device cannot be asked: it passes a number that no other can
        be, so that all fail together instead of waiting for it.

        Raises:
            KvcachedError: Here or on another rank.
        """
        try:
            own, error = self._alone_gib(ordinal), None
        except KvcachedError as failure:
            own, error = _FAILED, failure
        if group is not None:
            tensor = torch.tensor(own, dtype=torch.float64)
            torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN, group=group)
            own = float(tensor)
        if own == _FAILED:
            raise error or KvcachedError("another rank could not ask its device for its memory; its log says why")
        self.answered_bytes = int(own * GIB)
        return own

    def _alone_gib(self, ordinal: int) -> float:
        assert self._backend is not None
        alone = self._backend.memory().total_bytes - own_bytes(self._backend, ordinal)
        return (alone if self._most_bytes is None else min(alone, self._most_bytes)) / GIB


def drop_garbage(backend: Backend, ordinal: int) -> None:
    """Give back what loading has left in this process, so that it is not taken for weights.

    SGLang does the same before it asks how much is free; what answers for it asks for no emptying.
    """
    if backend.device_id == "host":
        return
    gc.collect()
    with torch.cuda.device(ordinal):
        torch.cuda.empty_cache()


def own_bytes(backend: Backend, ordinal: int) -> int:
    """What this process has taken of its device beside the KV cache; none of a host budget, which is for KV alone."""
    return 0 if backend.device_id == "host" else int(torch.cuda.memory_reserved(ordinal))


def member_name(server_args: Any) -> str:
    """A name for the ledger from the model's: its last path component, with what names may hold."""
    last = str(server_args.served_model_name or server_args.model_path).rstrip("/").rsplit("/", 1)[-1].lower()
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in last).lstrip("._-")
    return name[:55] or "sglang"
