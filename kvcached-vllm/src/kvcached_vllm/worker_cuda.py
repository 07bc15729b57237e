"""vLLM's GPU worker with elastic KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from kvcached_core.backends import load_backend
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.v1.worker.gpu_worker import Worker

from kvcached_vllm import layout, sizing, weights
from kvcached_vllm.member import Member
from kvcached_vllm.worker import ElasticWorker


class ElasticCudaWorker(ElasticWorker, Worker):
    """KV from this worker's own GPU, whatever the current device of a thread is."""

    def init_device(self) -> None:
        """As vLLM's, without its demand for free memory; then become a member of the device's ledger.

        ``gpu_memory_utilization`` keeps its meaning: the most that this engine may use of the card.
        """
        with sizing.no_free_memory_required(self.cache_config):
            super().init_device()
        total_bytes = self.init_snapshot.total_memory
        self.requested_memory = math.ceil(total_bytes * self.cache_config.gpu_memory_utilization)
        self.member = Member(self.vllm_config, self.rank, load_backend("cuda", ordinal=self.device.index))

    def load_model(self, **kwargs: bool) -> None:
        """Load the weights once there is room for them."""
        self.member.expect_static(self._reserved_bytes() + weights.expected_bytes(self.vllm_config))
        super().load_model(**kwargs)
        self._settle_static(self._reserved_bytes() + weights.ALLOWANCE_BYTES)

    def determine_available_memory(self) -> int:
        """The virtual capacity; from the profiling run also what activations take at their peak."""
        given = self.cache_config.kv_cache_memory_bytes
        virtual_bytes = given or sizing.device_virtual_bytes(
            self.init_snapshot.total_memory,
            self.cache_config.gpu_memory_utilization,
            self.model_runner.model_memory_usage,
        )
        torch.cuda.reset_peak_memory_stats(self.device)
        with sizing.explicit_capacity(self.cache_config, virtual_bytes):
            virtual_bytes = super().determine_available_memory()
        self._settle_static(torch.cuda.max_memory_reserved(self.device) + weights.ALLOWANCE_BYTES)
        return sizing.limited(virtual_bytes, self.get_kv_cache_spec())

    def compile_or_warm_up_model(self) -> object:
        """As vLLM's; then the static lease is what is known to be needed."""
        result = super().compile_or_warm_up_model()
        self._settle_static(torch.cuda.max_memory_reserved(self.device))
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
        """As vLLM's. It insists that the card's free memory grew meanwhile, which neighbours may prevent."""
        try:
            super().sleep(level)
        except AssertionError as error:
            if "increased after sleeping" not in str(error):
                raise

    def _reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device)

    def _settle_static(self, num_bytes: int) -> None:
        self.member.expect_static(num_bytes)
        self.member.account.static_used(self._reserved_bytes())
