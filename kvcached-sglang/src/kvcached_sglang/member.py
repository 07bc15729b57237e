"""This process as a member of its device's ledger: backend, account, pools, the rank and its thread."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvcached_core.account import Account
from kvcached_core.backends.base import Backend, load_backend
from kvcached_core.config import Settings
from kvcached_core.ledger import Ledger
from kvcached_core.rank import Rank
from kvcached_core.sizes import Size

from kvcached_sglang.layout import Arenas, Layout
from kvcached_sglang.mapper import Mapper

log = logging.getLogger(__name__)

CUDA_HEADROOM_BYTES = 1 << 30
LOADING_DEADLINE_SECONDS = 120.0
"""How long an engine that is loading waits for its neighbours to trim."""


@dataclass(frozen=True)
class Limits:
    """This member's limits, in bytes of its device."""

    total_bytes: int
    floor_bytes: int
    ceiling_bytes: int
    headroom_bytes: int

    @classmethod
    def of(cls, settings: Settings, backend: Backend) -> Limits:
        """From the settings; shares are of the device's total."""
        total = backend.memory().total_bytes
        default_headroom = Size(num_bytes=0 if backend.device_id == "host" else CUDA_HEADROOM_BYTES)
        headroom = (settings.headroom or default_headroom).resolve(total)
        floor = settings.floor.resolve(total) if settings.floor else 0
        ceiling = settings.ceiling.resolve(total) if settings.ceiling else total - headroom
        return cls(total, floor, ceiling, headroom)


def open_backend(settings: Settings, device: str, ordinal: int) -> Backend:
    """The backend of SGLang's device.

    Args:
        device: SGLang's word for it: ``cuda`` or ``cpu``, without a number.
        ordinal: Its number in this process. With ``--base-gpu-id 1`` it is 1, while every new thread's current device
            is 0.
    """
    budget = None
    if settings.host_budget is not None and device == "cpu":
        machine = load_backend("host").memory().total_bytes
        budget = settings.host_budget.resolve(machine)
    return load_backend("host" if device == "cpu" else "cuda", ordinal=ordinal, budget_bytes=budget)


class Member:
    """One rank's share of its device.

    Attributes:
        backend: The device.
        limits: As asked for at the start.
        account: Its slot.
        layout: All elastic pools.
        arenas: Their addresses.
        rank: Maps and unmaps; the mapper's, but for ``pin`` and ``note_step``.
        mapper: The thread; it runs from here on, so that others see that an engine which loads is alive.
        static_bytes: What it has leased beside the KV cache.
    """

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        *,
        name: str,
        model: str,
        rank: int,
        static_used_bytes: Callable[[], int] | None,
    ) -> None:
        """Join the ledger of the device. Nothing is mapped yet.

        Args:
            name: In the ledger, if ``KVCACHED_NAME`` gives none.
            model: For people.
            rank: Of this process among the engine's.
            static_used_bytes: What this process holds of the device beside KV; None where that is not accounted.
        """
        self.backend = backend
        self.limits = Limits.of(settings, backend)
        self.static_bytes = 0
        self.layout = Layout(backend.granularity_bytes)
        self.arenas = Arenas(self.layout)
        self._ledger = Ledger.open(
            backend.device_id,
            self.limits.total_bytes,
            runtime_dir=settings.runtime_dir,
            headroom_bytes=self.limits.headroom_bytes,
            driver_free=None if backend.device_id == "host" else self._driver_free,
        )
        self.account: Account = self._ledger.join(
            settings.name or name,
            engine="sglang",
            rank=rank,
            floor_bytes=self.limits.floor_bytes,
            ceiling_bytes=self.limits.ceiling_bytes,
            weight=settings.weight,
            engine_id=settings.engine_id,
            model=model,
        )
        # Rank takes an Arena and a Geometry; these have their methods.
        self.rank = Rank(
            self.arenas,  # type: ignore[arg-type]
            self.layout,  # type: ignore[arg-type]
            self.account,
            backend,
            index=rank,
            static_used_bytes=static_used_bytes,
        )
        self.mapper = Mapper(self.rank, lambda: self.extent_bytes)
        self.mapper.start()
        atexit.register(self.close)

    @property
    def extent_bytes(self) -> int:
        """What the rank counts an extent as: the dearest pool's."""
        return self.layout.worst_case_pages(1) * self.layout.page_bytes

    @property
    def attainable_bytes(self) -> int:
        """What its device leaves for its KV cache were it alone."""
        return self.limits.total_bytes - self.limits.headroom_bytes - self.static_bytes

    def close(self) -> None:
        """Give everything back. Idempotent. The engine's work has ended."""
        atexit.unregister(self.close)
        self.mapper.stop()
        self._ledger.close()
        self.backend.close()

    def _driver_free(self) -> int:
        free = self.backend.memory().free_bytes
        assert free is not None
        return free
