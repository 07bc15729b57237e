"""A worker as a member of its device's ledger: how it joins, what it holds, how it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcached_core import logs, orders
from kvcached_core.account import Account
from kvcached_core.arena import Arena
from kvcached_core.backends import Backend, load_backend
from kvcached_core.config import Settings
from kvcached_core.errors import ConfigError
from kvcached_core.ledger import Ledger
from kvcached_core.rank import Rank
from kvcached_core.sizes import format_bytes, parse_size

from kvcached_vllm import layout, sizing
from kvcached_vllm.allocation import KVAllocation
from kvcached_vllm.request_size import RequestSize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached_core.geometry import Geometry
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger(__name__)

CUDA_HEADROOM = parse_size("1GiB")
START_DEADLINE_SECONDS = 120.0
"""How long an engine that starts waits for neighbours to make room for its weights, and for its first page."""


def order_address(vllm_config: VllmConfig, rank: int) -> Path:
    """Where the orders for a rank of this engine are taken; the same in the scheduler's process and the worker's."""
    return Settings.load().runtime_dir / "orders" / f"{_replica(vllm_config)}-{rank}.sock"


def _replica(vllm_config: VllmConfig) -> str:
    """One scheduler and its workers. All replicas of a server have one ``instance_id``; dense ones also rank 0 each."""
    return f"{vllm_config.instance_id}-{vllm_config.parallel_config.data_parallel_index}"


def is_local(vllm_config: VllmConfig) -> bool:
    """Whether scheduler and worker share a process: true without tensor or pipeline parallelism."""
    parallel = vllm_config.parallel_config
    return parallel.world_size == 1 and parallel.distributed_executor_backend == "uni"


class Member:
    """One worker's memory and its slot in the ledger."""

    def __init__(
        self, vllm_config: VllmConfig, rank: int, backend: Backend, static_used: Callable[[], int] | None = None
    ) -> None:
        """Join the ledger of the backend's device.

        Args:
            vllm_config: The engine's.
            rank: Of this worker in its engine.
            backend: Of its device.
            static_used: What this process holds of the device beside KV; None on the host, whose budget is for KV.

        Raises:
            ConfigError: Limits that cannot work.
            LedgerError: The ledger cannot be used, and why.
        """
        self._vllm_config = vllm_config
        self._settings = Settings.load()
        self._backend = backend
        self._static_used = static_used
        self._rank_index = rank
        self._rank: Rank | None = None
        self._arena: Arena | None = None
        self._server: orders.OrderServer | None = None
        self._total_bytes = backend.memory().total_bytes
        self._ledger = self._open_ledger()
        self.account = self._join()

    def expect_static(self, num_bytes: int, *, deadline_seconds: float = START_DEADLINE_SECONDS) -> None:
        """Keep so much of the device, in all, for weights, activations and graphs; wait while neighbours trim for it.

        Raises:
            LedgerError: Not granted within the deadline, with the figures.
        """
        if self._static_used is not None:
            self.account.static_used(self._static_used())  # first: what is there need not be free a second time
        self.account.static_lease(num_bytes, deadline_seconds=deadline_seconds)

    def allocate(
        self, kv_cache_config: KVCacheConfig, initialize: Callable[[], None], layers: Mapping[str, Any]
    ) -> None:
        """Run vLLM's own initialisation of the KV cache, over an arena; map the null block.

        Args:
            kv_cache_config: As the engine core sends it to this process.
            initialize: vLLM's own.
            layers: Its static forward context: each layer's ``kv_cache`` is bound when ``initialize`` returns.

        Raises:
            UnsupportedError: The KV cache is not where the configuration says.
            ConfigError: The ceiling is less than one extent.
            DeviceMemoryError, DriverError, LedgerError: No addresses, or no page for the null block.
        """
        geometry = layout.kv_cache_geometry(
            kv_cache_config,
            granularity_bytes=self._backend.granularity_bytes,
            page_bytes=self._setting("page_size"),
        )
        self._check_ceiling(geometry)
        arena = self._arena = Arena(self._backend, geometry.size_bytes, geometry.page_bytes, guard=self._settings.guard)
        allocation = KVAllocation(geometry.size_bytes, lambda: arena.tensor(0, geometry.size_bytes))
        with allocation:
            initialize()
        allocation.check()
        layout.check_tensors(geometry, arena.address, layout.bound_tensors(kv_cache_config, layers))
        self._rank = Rank(
            arena, geometry, self.account, self._backend, index=self._rank_index, static_used_bytes=self._static_used
        )
        self._set_default_floor(kv_cache_config, geometry)
        self._rank.pin(range(1), deadline_seconds=START_DEADLINE_SECONDS)
        self._say_active(kv_cache_config, geometry)

    def serve(self) -> None:
        """Take orders from the scheduler from now on."""
        assert self._rank is not None
        address = order_address(self._vllm_config, self._rank_index)
        self._server = orders.offer(address, self._rank, local=is_local(self._vllm_config))

    def seal_guard(self) -> None:
        """Warm-up is over: stray writes fault from now on."""
        if self._arena is not None:
            self._arena.seal_guard()

    def note_step(self, step: int, streams: Sequence[int]) -> None:
        """Everything of this step is launched."""
        if self._rank is not None:
            self._rank.note_step(step, streams)
        if self._server is not None:
            self._server.note_step()

    def close(self) -> None:
        """Stop taking orders, unmap everything, leave the ledger. Idempotent."""
        if self._server is not None:
            self._server.close()
        orders.withdraw(order_address(self._vllm_config, self._rank_index))
        if self._rank is not None:
            self._rank.close()
        else:
            self.account.leave()
        self._ledger.close()
        self._backend.close()

    # Joining

    def _open_ledger(self) -> Ledger:
        on_host = self._backend.device_id == "host"
        headroom = self._settings.headroom or (None if on_host else CUDA_HEADROOM)
        return Ledger.open(
            self._backend.device_id,
            self._total_bytes,
            runtime_dir=self._settings.runtime_dir,
            headroom_bytes=0 if headroom is None else headroom.resolve(self._total_bytes),
            driver_free=None if on_host else lambda: self._backend.memory().free_bytes,
        )

    def _join(self) -> Account:
        model_config = self._vllm_config.model_config
        served = model_config.served_model_name
        model = served[0] if isinstance(served, list) else served or model_config.model
        return self._ledger.join(
            self._settings.name or Path(model).name[:55],
            engine="vllm",
            rank=self._rank_index,
            floor_bytes=self._setting("floor") or 0,
            ceiling_bytes=self._setting("ceiling"),
            weight=self._settings.weight,
            engine_id=self._engine_id(),
            model=model,
        )

    def _engine_id(self) -> str:
        """One for all ranks; the part before the slash is common to the processes of a server."""
        return f"{self._settings.engine_id}/{_replica(self._vllm_config)}"

    def _setting(self, name: str) -> int | None:
        size = getattr(self._settings, name)
        return None if size is None else size.resolve(self._total_bytes)

    def _check_ceiling(self, geometry: Geometry) -> None:
        ceiling_bytes = self._setting("ceiling")
        if ceiling_bytes is not None and ceiling_bytes < geometry.extent_bytes:
            raise ConfigError(
                f"KVCACHED_CEILING is {format_bytes(ceiling_bytes)}, and this model's KV cache grows in extents of "
                f"{format_bytes(geometry.extent_bytes)}: set it to that at least, or KVCACHED_PAGE_SIZE to less than "
                f"{format_bytes(geometry.page_bytes)}."
            )

    def _set_default_floor(self, kv_cache_config: KVCacheConfig, geometry: Geometry) -> None:
        if self._settings.floor is None:
            size = RequestSize(self._vllm_config, kv_cache_config)
            blocks = size.blocks(self._vllm_config.model_config.max_model_len)
            self.account.set_floor(geometry.worst_case_pages(min(blocks, geometry.num_blocks)) * geometry.page_bytes)

    def _say_active(self, kv_cache_config: KVCacheConfig, geometry: Geometry) -> None:
        if self._rank_index == 0:
            import vllm

            ours = next(member for member in self._ledger.snapshot().members if member.name == self.account.name)
            log.info(
                logs.active_line(
                    engine="vLLM",
                    engine_version=vllm.__version__,
                    member=self.account.name,
                    device_id=self._backend.device_id,
                    virtual_bytes=geometry.size_bytes,
                    floor_bytes=ours.floor_bytes,
                    ceiling_bytes=ours.ceiling_bytes,
                    layout=kv_cache_config.kv_cache_layout or "unknown",
                    page_bytes=geometry.page_bytes,
                )
            )


def host_backend() -> Backend:
    """The host's backend with the budget that its engines share."""
    return load_backend("host", budget_bytes=sizing.host_total_bytes(Settings.load()))
