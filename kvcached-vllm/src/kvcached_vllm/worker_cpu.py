"""vLLM's CPU worker with elastic KV cache."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from kvcached_vllm import sizing
from kvcached_vllm.member import Member, host_backend
from kvcached_vllm.worker import ElasticWorker


class ElasticCpuWorker(ElasticWorker, CPUWorker):
    """KV from the host's shared budget."""

    def init_device(self) -> None:
        """As vLLM's; then become a member of the host's ledger."""
        super().init_device()
        self.member = Member(self.vllm_config, self.rank, host_backend())

    def determine_available_memory(self) -> int:
        """The virtual capacity. vLLM's own also warms the model up, and would compare with what is free now."""
        virtual_bytes = self.cache_config.kv_cache_memory_bytes
        assert virtual_bytes is not None, "ElasticCpuPlatform sets it"
        with sizing.explicit_capacity(self.cache_config, 1):
            super().determine_available_memory()
        return sizing.limited(virtual_bytes, self.get_kv_cache_spec())
