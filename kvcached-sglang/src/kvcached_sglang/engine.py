"""The elastic KV cache of one scheduler process, from the first pool that is built to the tick before every batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvcached_core import metrics as core_metrics
from kvcached_core.config import Settings
from kvcached_core.errors import InvariantError
from kvcached_core.logs import active_line, inactive_line

from kvcached_sglang.agreement import Agreement
from kvcached_sglang.allocator import ElasticSWAAllocator, elastic_like, has_elastic_kind
from kvcached_sglang.cache import TreeCache
from kvcached_sglang.demand import DemandReader
from kvcached_sglang.member import LOADING_DEADLINE_SECONDS, Member
from kvcached_sglang.pools import ElasticPool, create_elastic_buffers
from kvcached_sglang.space import PINNED_EXTENT, Space
from kvcached_sglang.tick import Ticker
from kvcached_sglang.trimming import CachePolicy

log = logging.getLogger(__name__)


class Engine:
    """One rank's elastic pools, allocators and decisions.

    Attributes:
        spaces: By name: ``full``, and ``swa`` where the model has sliding-window attention.
        ticker: Decides; None until the first tick.
    """

    def __init__(self, settings: Settings, member: Member, version: str, layout: str) -> None:
        """No pool yet.

        Args:
            version: Of SGLang.
            layout: How every pool lies in its arena, by a name of ``placement.PLACES``.
        """
        self.spaces: dict[str, Space] = {}
        self.ticker: Ticker | None = None
        self._settings = settings
        self._member = member
        self._version = version
        self._layout = layout
        self._pools: dict[int, tuple[ElasticPool, range]] = {}
        self._demand: DemandReader | None = None
        self._streams: tuple[int, ...] = ()

    # Pools

    def create_buffers(self, original: Callable[[Any], None], pool: Any, buffer_lists: Sequence[str]) -> None:
        """Put a pool of SGLang over an arena. Only the extent of the padding page is mapped, for good.

        Where neighbours hold the device, this waits for them to make room.
        """
        page_bytes: int | None = None
        if self._pools:
            page_bytes = self._member.layout.page_bytes
        elif self._settings.page_size is not None:
            page_bytes = self._settings.page_size.resolve(self._member.limits.total_bytes)
        made = create_elastic_buffers(
            original,
            pool,
            buffer_lists,
            self._member.backend,
            page_bytes=page_bytes,
            guard=self._settings.guard,
            layout=self._layout,
            blocks_per_extent={space.geometry.num_blocks: space.blocks_per_extent for space in self.spaces.values()},
        )
        numbers = self._member.layout.add(made)
        self._pin(numbers[PINNED_EXTENT : PINNED_EXTENT + 1])
        self._pools[id(pool)] = (made, numbers)

    def _pin(self, numbers: range) -> None:
        self._member.rank.pin(numbers, deadline_seconds=LOADING_DEADLINE_SECONDS)

    # Allocators

    def build(self, native: Any, kv_pool: Any, window_tokens: int | None) -> Any:
        """The elastic allocator in a native one's place, over the pools that were made elastic.

        Returns:
            The native one where a pool or the allocator is of a kind that stays native; what is elastic of the pools is
            then mapped for good.
        """
        parts = self._parts(kv_pool)
        elastic = [part for part in parts.values() if part is not None]
        fits = has_elastic_kind(native) and (len(parts) == 2) == hasattr(native, "swa_attn_allocator")
        if self.spaces or not fits or len(elastic) < len(parts):
            self._map_for_good(
                elastic, f"{type(kv_pool).__name__} and {type(native).__name__} are not elastic together"
            )
            return native
        for name, (pool, numbers) in zip(parts, elastic, strict=True):
            window = window_tokens if name == "swa" else None
            self.spaces[name] = Space(name, pool.geometry, pool.tokens_per_block, window_tokens=window)
            self.spaces[name].back(pool, numbers)
        log.info(self._active_line(kv_pool))
        if len(parts) == 1:
            return elastic_like(native, self.spaces["full"])
        return ElasticSWAAllocator(
            self.spaces["full"],
            self.spaces["swa"],
            native.size_full,
            native.size_swa,
            native.page_size,
            native.dtype,
            native.device,
            native.get_kvcache(),
            native.need_sort,
        )

    def attach(self, kv_pool: Any) -> None:
        """Let a draft model's pools, which have the target's ids, come and go with it."""
        for name, part in self._parts(kv_pool).items():
            if part is None:
                continue
            pool, numbers = part
            space = self.spaces.get(name) or self.spaces.get("full")
            if space is not None and pool.geometry.num_blocks == space.geometry.num_blocks:
                space.back(pool, numbers)
                log.info("a draft model's KV pool follows the target's: %d layers", pool.num_layers)
            else:
                self._map_for_good([part], "a draft model's KV pool is cut otherwise than the target's")

    def _parts(self, kv_pool: Any) -> dict[str, tuple[ElasticPool, range] | None]:
        """The pools of one of SGLang's, by the name of their ids; None where one is native."""
        if hasattr(kv_pool, "swa_kv_pool"):
            named = {"full": kv_pool.full_kv_pool, "swa": kv_pool.swa_kv_pool}
        else:
            named = {"full": getattr(kv_pool, "full_kv_pool", kv_pool)}
        return {name: self._pools.get(id(pool)) for name, pool in named.items()}

    def _map_for_good(self, parts: Sequence[tuple[ElasticPool, range]], reason: str) -> None:
        """Back pools whose ids stay SGLang's own; in strict mode end the process."""
        if self._settings.strict:
            raise SystemExit(inactive_line(engine="SGLang", reason=reason))
        for pool, numbers in parts:
            log.error("%s: %d layers are mapped for good, %d extents", reason, pool.num_layers, len(numbers))
            self._pin(numbers[PINNED_EXTENT + 1 :])

    def _active_line(self, kv_pool: Any) -> str:
        limits = self._member.limits
        pool = self._member.layout.pools[0]
        return active_line(
            engine="SGLang",
            engine_version=self._version,
            member=self._member.account.name,
            device_id=self._member.backend.device_id,
            virtual_bytes=sum(pool.geometry.size_bytes for pool in self._member.layout.pools),
            floor_bytes=limits.floor_bytes,
            ceiling_bytes=limits.ceiling_bytes,
            layout=f"{self._layout} ({type(kv_pool).__name__}, {pool.num_layers} layers)",
            page_bytes=pool.arena.page_bytes,
        )

    # Ticks

    @property
    def starves(self) -> bool:
        """Whether nothing has run for long because the first request finds no room; the same on every rank."""
        return self.ticker is not None and self.ticker.starves

    def beyond_ceiling(self, num_tokens: int) -> str | None:
        """Why a prompt of so many tokens cannot run, if it cannot."""
        if self.ticker is None:
            return None
        assert self._demand is not None
        needed, ceiling = num_tokens + self._demand.margin_tokens, self.ticker.ceiling_tokens
        if needed <= ceiling:
            return None
        return (
            f"the request takes {needed} tokens of KV cache, and this engine's ceiling leaves {ceiling}: raise it "
            "with `kvcached limit`"
        )

    def tick(self, scheduler: Any, running_batch: Any, last_batch: Any) -> None:
        """Before every batch."""
        if self.ticker is None:
            self._begin(scheduler)
        assert self.ticker is not None
        assert self._demand is not None
        self.ticker.tick(self._demand.read(running_batch, last_batch), self._streams)

    def _begin(self, scheduler: Any) -> None:
        """The first tick: warm-up is over, the scheduler is complete."""
        args = scheduler.server_args
        self._streams = _handles(scheduler.device, scheduler.forward_stream, scheduler.schedule_stream)
        agreement = Agreement(scheduler.attn_tp_cpu_group if args.enable_dp_attention else scheduler.tp_cpu_group)
        self._agree_on_layout(agreement)
        total = self._member.limits.total_bytes
        ceiling = self._settings.cache_ceiling
        self._demand = DemandReader(scheduler)
        self.ticker = Ticker(
            list(self.spaces.values()),
            self._member.mapper,
            agreement,
            TreeCache(scheduler.tree_cache, is_split=scheduler.is_hybrid_swa or scheduler.is_hybrid_ssm),
            CachePolicy(
                floor_bytes=self._settings.cache_floor.resolve(total),
                ceiling_bytes=ceiling.resolve(total) if ceiling is not None else None,
            ),
            extent_bytes=self._member.extent_bytes,
            chunk_tokens=self._demand.chunk_tokens,
            attainable_bytes=self._member.attainable_bytes,
        )
        if args.enable_metrics:
            core_metrics.register(self._settings)
        if args.sleep_on_idle:
            log.warning("--sleep-on-idle: an idle engine looks up once a second, so memory comes back that much later")
        self._member.mapper.send(self._member.arenas.seal_guards)

    def _agree_on_layout(self, agreement: Agreement) -> None:
        """Ranks that cut their ids differently could not take the same decisions."""
        own = [n for space in self.spaces.values() for n in (space.geometry.num_blocks, space.blocks_per_extent)]
        least = agreement.least([*own, *(-n for n in own)])
        if least[: len(own)] != [-n for n in least[len(own) :]]:
            raise InvariantError(f"ranks of one engine cut their KV cache differently; here into {own}")


def _handles(device: str, *streams: Any) -> tuple[int, ...]:
    """The streams that touch the KV cache, and the default one, as the driver knows them; none on a CPU."""
    if device == "cpu":
        return ()
    return (0, *(stream.cuda_stream for stream in streams if stream is not None))
