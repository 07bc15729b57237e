"""What both workers add to vLLM's own: memory from an arena, orders from the scheduler, fences behind steps.

It makes no driver call within a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcached_vllm.member import Member

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

STEP_ATTRIBUTE = "kvcached_step"
"""Number of the step on vLLM's ``SchedulerOutput``: a plain attribute, which pickling to other ranks keeps."""


class ElasticWorker:
    """Mixin over a worker class of vLLM. The subclass joins the ledger in ``init_device``."""

    member: Member | None = None
    _step = 0

    def kv_streams(self) -> Sequence[int]:
        """Handles of the streams that the engine's thread launches KV work on."""
        return ()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Let vLLM build its KV cache over the arena, and take orders from then on."""
        assert self.member is not None
        self.member.allocate(
            kv_cache_config,
            lambda: super(ElasticWorker, self).initialize_from_config(kv_cache_config),  # type: ignore[misc]
            self.compilation_config.static_forward_context,  # type: ignore[attr-defined]
        )
        self.member.serve()

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as vLLM does, which may write real block ids; from then on stray writes fault."""
        result = super().compile_or_warm_up_model()  # type: ignore[misc]
        assert self.member is not None
        self.member.seal_guard()
        return result

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run the step; its work is launched now, or in `sample_tokens` where that follows."""
        self._step = getattr(scheduler_output, STEP_ATTRIBUTE, self._step)
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        if output is not None:
            self._note_step()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, and draft where the model does; everything of the step is launched after it."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        self._note_step()
        return output

    def shutdown(self) -> None:
        """End as vLLM does, then give all memory back."""
        super().shutdown()  # type: ignore[misc]
        if self.member is not None:
            self.member.close()
            self.member = None

    def _note_step(self) -> None:
        if self.member is not None:
            self.member.note_step(self._step, self.kv_streams())
