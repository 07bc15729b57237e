"""How many blocks vLLM's next steps will take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcached_vllm import sizing

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

STANDING_TOKENS = 1024
"""A prompt of this length into an idle engine finds its blocks resident (measured on a CPU: no wait with 64 blocks of
16 tokens, about 3 ms with 16 blocks)."""


class Demand:
    """The demand of one scheduler, each figure in O(1), but for a look at every request that is being prefilled.

    vLLM admits a prompt only when all of its blocks are free (``scheduler_reserve_full_isl``), takes them chunk by
    chunk, and preempts running requests when a step finds too few. So the figures are whole prompts, what is left of
    those begun, and a block per group for each that decodes.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._size = sizing.RequestSize(scheduler.vllm_config, scheduler.kv_cache_config)
        self._max_step_tokens = scheduler.max_num_scheduled_tokens
        lookahead_tokens = 1 + scheduler.num_lookahead_tokens + scheduler.num_spec_tokens
        self._blocks_per_running = self._size.blocks(lookahead_tokens)

    def next_step_blocks(self) -> int:
        """What the next step needs so as to neither preempt nor turn the first waiting prompt away."""
        begun = self._size.blocks(min(self._begun_tokens(), self._max_step_tokens))
        return self._running_blocks() + begun + self._head_blocks()

    def next_steps_blocks(self) -> int:
        """What the next few steps take: two blocks for each that runs, prompts begun, and as many as fit a step."""
        head = self._head_blocks()
        others = head * max(0, len(self._scheduler.waiting) - 1)
        begun = self._size.blocks(self._begun_tokens())
        return 2 * self._running_blocks() + begun + head + min(others, self._size.blocks(self._max_step_tokens))

    def request_blocks(self, request: Any) -> int:
        """What a request can come to hold: its prompt and all that it may generate."""
        num_tokens = request.num_prompt_tokens + (request.max_tokens or 0)
        return self._size.blocks(min(num_tokens, self._scheduler.max_model_len))

    def standing_blocks(self, blocks_per_extent: int) -> int:
        """Free blocks to keep while nothing is asked: a typical prompt, in at most four extents."""
        return min(self._size.blocks(STANDING_TOKENS), 4 * blocks_per_extent)

    def is_busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._scheduler.running) or bool(self._scheduler.waiting)

    def _running_blocks(self) -> int:
        return len(self._scheduler.running) * self._blocks_per_running

    def _head_blocks(self) -> int:
        scheduler = self._scheduler
        if not scheduler.waiting or len(scheduler.running) >= scheduler.max_num_running_reqs:
            return 0
        return self._size.blocks(scheduler.waiting.peek_request().num_tokens + 1)

    def _begun_tokens(self) -> int:
        """Tokens still to be computed of prompts begun; such requests are the last that were admitted."""
        tokens = 0
        for request in reversed(self._scheduler.running):
            left = request.num_tokens - request.num_computed_tokens
            if left <= 1:
                break
            tokens += left
        return tokens
