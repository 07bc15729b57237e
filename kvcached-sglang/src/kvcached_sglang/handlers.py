"""What SGLang calls of kvcached once the hooks are in place.

The hooks do something only where a KV pool is built and a scheduler runs: in the scheduler process of each rank.
State lives in one `Plugin` object of the process, which they are methods of; nothing is stored on SGLang's objects.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import torch
from kvcached_core.config import Settings
from kvcached_core.metrics import register as register_metrics
from kvcached_core.sizes import format_bytes
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.runtime_context import get_schedule

from kvcached_sglang import hooks, metrics
from kvcached_sglang.engine import Engine
from kvcached_sglang.member import Member, open_backend
from kvcached_sglang.refusals import BALANCE_CHECK, refused_arguments, refused_pools
from kvcached_sglang.sizing import GIB, Sizing, drop_garbage, member_name, own_bytes
from kvcached_sglang.static import StaticLease, checkpoint_bytes
from kvcached_sglang.token_major import choose_layout

log = logging.getLogger(__name__)


class Plugin:
    """kvcached in one process of SGLang; the handlers of ``hooks.HOOKS`` are its methods.

    Args:
        settings: From the environment.
        engine_version: SGLang's.
        run_natively: Says that kvcached is off, and why.
    """

    def __init__(self, settings: Settings, engine_version: str, run_natively: Callable[[Settings, str], None]) -> None:
        self._settings = settings
        self._engine_version = engine_version
        self._run_natively = run_natively
        self._sizing = Sizing()
        self._member: Member | None = None
        self._static: StaticLease | None = None
        self._engine: Engine | None = None
        self._native = False

    # Before weights are loaded

    def load_model(self, model_runner: Any) -> None:
        """BEFORE: become a member of the device's ledger, and wait for room for the weights.

        A flag that kvcached cannot go with is found here, before anything is taken.
        """
        if model_runner.is_draft_worker or self._member is not None or self._native:
            return
        reasons = refused_arguments(model_runner.server_args) + missing_hooks()
        if reasons:
            self._stay_native(reasons)
            return
        self._join(model_runner)

    def _join(self, model_runner: Any) -> None:
        args = model_runner.server_args
        backend = open_backend(self._settings, model_runner.device, model_runner.gpu_id)
        used = None if backend.device_id == "host" else partial(own_bytes, backend, model_runner.gpu_id)
        self._member = Member(
            self._settings,
            backend,
            name=member_name(args),
            model=str(args.model_path),
            rank=world_rank(),
            static_used_bytes=used,
        )
        register_metrics(self._settings)
        if args.tp_size > 1 and world_rank() == 0 and os.environ.get(BALANCE_CHECK) == "0":
            log.info("%s=0: neighbours may leave more free on one device than on another", BALANCE_CHECK)
        self._static = StaticLease(self._member, used, model_runner.mem_fraction_static)
        self._static.take(checkpoint_bytes(args))

    def _stay_native(self, reasons: list[str]) -> None:
        self._native = True
        self._run_natively(self._settings, "; ".join(reasons))

    # Sizing and pools

    def profile_available_bytes(
        self, original: Callable[[Any, float], int], configurator: Any, pre_model_load_memory: float
    ) -> int:
        """AROUND: size the KV cache as if the device were this engine's alone."""
        if self._member is None or self._static is None:
            return original(configurator, pre_model_load_memory)
        layout, lacking = choose_layout(self._settings.layout, configurator, self._engine_version)
        reasons = refused_pools(configurator) + lacking
        if reasons:
            self._member.close()
            self._member = None
            self._stay_native(reasons)
            return original(configurator, pre_model_load_memory)
        backend, limits = self._member.backend, self._member.limits
        drop_garbage(backend, configurator.gpu_id)
        self._static.take()
        self._engine = Engine(self._settings, self._member, self._engine_version, layout)
        if configurator.mambaish_config is None:
            with self._sizing.as_if_alone(backend):
                return original(configurator, limits.total_bytes / GIB)
        slack_bytes = int(limits.total_bytes * (1 - get_schedule().mem_fraction_static))
        # SGLang gives states a share of what there is, and they stay: of what the ceiling leaves, then. A size that was
        # asked for takes nothing from what the KV cache may grow to.
        is_share = get_schedule().max_mamba_cache_size is None
        with self._sizing.as_if_alone(backend, limits.ceiling_bytes + slack_bytes if is_share else None):
            kv_bytes = original(configurator, limits.total_bytes / GIB)
        self._lease_state(self._sizing.answered_bytes - slack_bytes - kv_bytes)
        return kv_bytes

    def _lease_state(self, num_bytes: int) -> None:
        """States of linear attention are allocated whole, and stay: they have to find room beside the neighbours."""
        assert self._static is not None
        log.info("%s are for states of linear attention; --max-mamba-cache-size sets them", format_bytes(num_bytes))
        self._static.take(num_bytes)

    def get_available_memory(
        self,
        original: Callable[..., float],
        device: str,
        gpu_id: int,
        distributed: bool = False,
        empty_cache: bool = True,
        cpu_group: Any = None,
    ) -> float:
        """AROUND: while the KV cache is sized, what would be free if nobody else used the device."""
        if self._sizing.active:
            return self._sizing.available_gib(gpu_id, cpu_group if distributed else None)
        return original(device, gpu_id, distributed=distributed, empty_cache=empty_cache, cpu_group=cpu_group)

    def create_mha_buffers(self, original: Callable[[Any], None], pool: Any) -> None:
        """AROUND: K and V of each layer, over an arena."""
        self._create_buffers(original, pool, "MHATokenToKVPool", ("k_buffer", "v_buffer"))

    def create_mla_buffers(self, original: Callable[[Any], None], pool: Any) -> None:
        """AROUND: the latent of each layer, over an arena."""
        self._create_buffers(original, pool, "MLATokenToKVPool", ("kv_buffer",))

    def _create_buffers(
        self, original: Callable[[Any], None], pool: Any, kind: str, buffer_lists: tuple[str, ...]
    ) -> None:
        # A subclass keeps more beside these buffers, so it stays native.
        if self._engine is None or type(pool).__name__ != kind or pool.layer_num == 0:
            original(pool)
        else:
            self._engine.create_buffers(original, pool, buffer_lists)

    def build_allocator(self, original: Callable[..., Any], configurator: Any, **arguments: Any) -> Any:
        """AROUND: an allocator that hands out resident ids only; a draft model's pool joins the target's."""
        native = original(configurator, **arguments)
        if self._engine is None:
            return native
        kv_pool = arguments["token_to_kv_pool"]
        if arguments["token_to_kv_pool_allocator"] is not None:
            self._engine.attach(kv_pool)
            return native
        return self._engine.build(native, kv_pool, configurator.sliding_window_size)

    # Scheduling

    def before_batch(self, scheduler: Any, running_batch: Any, last_batch: Any) -> None:
        """BEFORE: the tick."""
        if self._engine is not None and self._engine.spaces:
            self._engine.tick(scheduler, running_batch, last_batch)
            if self._engine.starves and scheduler.waiting_queue:
                self._refuse_first(scheduler, scheduler.waiting_queue[0])
            if not running_batch.reqs:
                # 0.5.20 and 0.5.21 clear this flag only where a request leaves a batch, later ones here too: a prompt
                # that once waited for memory with nothing running would wait for ever.
                running_batch.batch_is_full = False

    def _refuse_first(self, scheduler: Any, first: Any) -> None:
        """The first request has found no room for long: refuse it if the ceiling, lowered since, leaves none.

        One that has begun to answer is not ended; it goes on when the ceiling is raised.
        """
        assert self._engine is not None
        reason = self._engine.beyond_ceiling(len(first.origin_input_ids)) if not first.output_ids else None
        if reason is not None:
            log.error("Request %s is refused: %s", first.rid, reason)
            finish = {"type": "abort", "status_code": HTTPStatus.SERVICE_UNAVAILABLE, "message": reason}
            scheduler.abort_request(AbortReq(rid=first.rid, finished_reason=finish))

    def limit_request(self, _: None, scheduler: Any, req: Any) -> None:
        """AFTER: refuse a prompt that cannot fit under this member's ceiling; it would wait for ever."""
        reason = self._engine.beyond_ceiling(len(req.origin_input_ids)) if self._engine is not None else None
        if reason is not None:
            req.set_finish_with_abort(f"{reason}, or shorten the prompt")

    # Figures

    def pool_stats(self, stats: Any, observer: Any) -> Any:
        """AFTER: usage means used / attainable."""
        if self._engine is None or self._engine.ticker is None:
            return None
        for name, space in self._engine.spaces.items():
            translate = metrics.of_swa if name == "swa" else metrics.of_full
            stats = translate(stats, space, self._engine.ticker.growable_bytes)
        return stats

    def check_full_pool(self, original: Callable[..., Any], checker: Any, ps: Any, uncached: int = 0) -> Any:
        """AROUND: the leak check counts what is not resident as available."""
        if self._engine is not None and "full" in self._engine.spaces:
            ps = metrics.conserving_full(ps, self._engine.spaces["full"])
        return original(checker, ps, uncached)

    def check_swa_pool(self, original: Callable[..., Any], checker: Any, ps: Any, uncached: int = 0) -> Any:
        """AROUND: the same for sliding-window attention."""
        if self._engine is not None and "swa" in self._engine.spaces:
            ps = metrics.conserving_swa(ps, self._engine.spaces["swa"])
        return original(checker, ps, uncached)


def missing_hooks() -> list[str]:
    """Why not every hook is in place: SGLang's registry logs a failure to apply one, and goes on without it."""
    targets = hooks.missing()
    return [f"SGLang did not apply the hooks on {', '.join(targets)}; its log says why"] if targets else []


def world_rank() -> int:
    """This process's number among the engine's ranks."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
