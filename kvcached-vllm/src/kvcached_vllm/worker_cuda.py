"""vLLM's GPU worker with elastic KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from kvcached_core.backends import load_backend
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.v1.worker.gpu_worker import Worker

from kvcached_vllm import layout, sizing, static, weights
from kvcached_vllm.member import Member
from kvcached_vllm.worker import ElasticWorker

WAKE_DEADLINE_SECONDS = 30.0
"""How long an engine that wakes waits for neighbours to make room. Whoever asked for it waits too, and may retry."""


class ElasticCudaWorker(ElasticWorker, Worker):
    """KV from this worker's own GPU, whatever the current device of a thread is."""

    _static_bytes = 0  # kept of the device beside KV, while all of it is awake

    def init_device(self) -> None:
        """As vLLM's, without its demand for free memory; then become a member of the device's ledger.

        ``gpu_memory_utilization`` keeps its meaning: the most that this engine may use of the card.
        """
        with sizing.no_free_memory_required(self.cache_config):
            super().init_device()
        total_bytes = self.init_snapshot.total_memory
        self.requested_memory = math.ceil(total_bytes * sizing.utilization(self.cache_config))
        backend = load_backend("cuda", ordinal=self.device.index)
        self.member = Member(self.vllm_config, self.rank, backend, lambda: static.used_bytes(self.device))

    def load_model(self, **kwargs: bool) -> None:
        """Load the weights once there is room for them."""
        self._keep_static(self._reserved_bytes() + weights.expected_bytes(self.vllm_config, self.requested_memory))
        super().load_model(**kwargs)
        self._keep_static(self._reserved_bytes() + weights.ALLOWANCE_BYTES)

    def determine_available_memory(self) -> int:
        """The virtual capacity; from the profiling run also what activations take at their peak."""
        given = self.cache_config.kv_cache_memory_bytes
        virtual_bytes = given or sizing.device_virtual_bytes(
            self.init_snapshot.total_memory,
            sizing.utilization(self.cache_config),
            self.model_runner.model_memory_usage,
        )
        torch.cuda.reset_peak_memory_stats(self.device)
        with sizing.explicit_capacity(self.cache_config, virtual_bytes):
            virtual_bytes = super().determine_available_memory()
        self._keep_static(torch.cuda.max_memory_reserved(self.device) + weights.ALLOWANCE_BYTES)
        return sizing.limited(virtual_bytes, self.get_kv_cache_spec())

    def compile_or_warm_up_model(self) -> object:
        """As vLLM's; then the static lease is what is known to be needed."""
        result = super().compile_or_warm_up_model()
        self._keep_static(torch.cuda.max_memory_reserved(self.device))
        return result

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """As vLLM's, block-major first where every kernel takes it; a layout set by the user wins in any case."""
        names = super().get_supported_kv_cache_layouts()
        backends = get_current_attn_backends(self.vllm_config)
        return layout.prefer_block_major(names, backends, self.cache_config.block_size)

    def kv_streams(self) -> Sequence[int]:
        """vLLM launches everything that touches the KV cache on its thread's current stream."""
        return (torch.cuda.current_stream(self.device).cuda_stream,)

    def sleep(self, level: int = 1) -> None:
        """As vLLM's, and what sleeps is neighbours' to lease.

        vLLM insists that the card's free memory grew meanwhile, which neighbours may prevent.
        """
        try:
            super().sleep(level)
        except AssertionError as error:
            if "increased after sleeping" not in str(error):
                raise
        self._keep_static(self._static_bytes)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """As vLLM's, once there is room for what wakes.

        Raises:
            LedgerError: There is none, with the figures. Nothing has changed; it may be tried again.
        """
        still_asleep = 0 if tags is None else static.asleep_bytes(waking=tags)
        self.member.expect_static(self._static_bytes - still_asleep, deadline_seconds=WAKE_DEADLINE_SECONDS)
        super().wake_up(tags)
        self._keep_static(self._static_bytes)

    def _reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device)

    def _keep_static(self, num_bytes: int) -> None:
        """Keep so much of the device in all, less what sleeps."""
        self._static_bytes = num_bytes
        self.member.expect_static(max(0, num_bytes - static.asleep_bytes()))
