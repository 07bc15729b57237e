"""What both platforms add to vLLM's own: the worker and the scheduler, chosen in the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvcached_core.config import Settings
from kvcached_core.errors import UnsupportedError

from kvcached_vllm import plugin, qualnames, refusals, sizing

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ElasticPlatform:
    """Mixin over a platform class of vLLM. Everything else about the platform stays as it was."""

    stock_worker: ClassVar[str]
    elastic_worker: ClassVar[str]

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Let vLLM's platform decide, then put our worker and scheduler in its place, or say why not.

        vLLM calls this several times for one configuration, and in several processes.
        """
        super().check_and_update_config(vllm_config)  # type: ignore[misc]
        settings = Settings.load()
        try:
            refusals.check(vllm_config, cls.stock_worker, cls.elastic_worker)
        except UnsupportedError as error:
            plugin.inactive(settings, str(error))
            return
        cls.install(vllm_config)

    @classmethod
    def install(cls, vllm_config: VllmConfig) -> None:
        """Set the configuration fields that vLLM has for this."""
        vllm_config.parallel_config.worker_cls = cls.elastic_worker
        scheduler = vllm_config.scheduler_config
        scheduler.scheduler_cls = qualnames.ASYNC_SCHEDULER if scheduler.async_scheduling else qualnames.SCHEDULER
        sizing.leave_out_extensible(vllm_config.cache_config)
