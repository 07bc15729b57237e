"""How many blocks vLLM's next steps will take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from kvcached_vllm.request_size import RequestSize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

STANDING_TOKENS = 1024
"""A prompt of this length into an idle engine finds its blocks resident (measured on a CPU: no wait with 64 blocks of
16 tokens, about 3 ms with 16 blocks)."""

_QUEUES = ("kv_holding_waiting", "async_kv_waiting", "skipped_waiting", "waiting")
"""Where requests wait. A release has ``waiting`` and others beside it: 0.30 puts those there that wait for something
else first, a grammar for one; 0.31 on those that hold blocks already, and 0.34 those that may load KV first."""

_READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class Demand:
    """The demand of one scheduler, each figure in O(1), but for a look at every request that is being prefilled.

    vLLM admits a prompt only when all of its blocks are free (``scheduler_reserve_full_isl``), takes them chunk by
    chunk, and preempts running requests when a step finds too few. So the figures are whole prompts, what is left of
    those begun, and a block per group for each that decodes.

    They may come out too small, where vLLM's admission counts what is not known here. So a step that ran nothing says
    so (`turned_away`): the request that it could not admit needs more than was free.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._size = RequestSize(scheduler.vllm_config, scheduler.kv_cache_config)
        self._queues = [name for name in _QUEUES if hasattr(scheduler, name)]
        self._max_admitted = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
        self._max_step_tokens = scheduler.max_num_scheduled_tokens
        self._ahead_tokens = 1 + scheduler.num_lookahead_tokens
        self._blocks_per_running = self._size.more_blocks(self._ahead_tokens + scheduler.num_spec_tokens)
        self._turned_away_blocks = 0

    def next_step_blocks(self) -> int:
        """What the next step needs so as to neither preempt nor turn the first waiting prompt away."""
        return self._running_blocks() + self._begun_blocks() + self._head()[0]

    def full_step_blocks(self) -> int:
        """What the next step takes where memory turns none of the waiting prompts away.

        With fewer, vLLM computes some of them, and the others in a step more: of 47 prompts that came at once into an
        idle engine, 9 found their blocks resident and 31 waited for a second step.
        """
        blocks, tokens = self._head()
        return self._running_blocks() + self._begun_blocks() + blocks + self._more_prompts_blocks(blocks, tokens)

    def next_steps_blocks(self) -> int:
        """What the next few steps take: two blocks for each that runs, prompts begun, and as many as fit a step."""
        blocks, tokens = self._head()
        others = min(blocks * self._num_behind_head(), self._size.blocks(self._max_step_tokens))
        others = max(others, self._more_prompts_blocks(blocks, tokens))
        begun = self._size.more_blocks(self._begun_tokens())
        return max(2 * self._running_blocks() + begun + blocks + others, self._turned_away_blocks)

    def turned_away(self, free_blocks: int) -> int:
        """A step ran nothing, with so many blocks free.

        Returns:
            Blocks that it lacked them for, more than were free; 0 where no request waits that could have run.
        """
        waiting = self.is_busy() and any(request.status in _READY for queue in self._waiting() for request in queue)
        self._turned_away_blocks = max(free_blocks + 1, self.next_step_blocks()) if waiting else 0
        return self._turned_away_blocks

    def first_requests(self) -> list[Request]:
        """The first of each queue that waits for nothing but memory."""
        return [request for request in self._firsts() if request.status in _READY]

    def served(self) -> None:
        """A step ran something."""
        self._turned_away_blocks = 0

    def longest_request(self, num_blocks: int) -> int:
        """Tokens that a request may grow to which comes to hold no more than so many blocks."""
        longest = self._size.most_tokens(num_blocks, self._scheduler.max_model_len)
        return longest if longest == self._scheduler.max_model_len else max(0, longest - self._ahead_tokens + 1)

    def standing_blocks(self, blocks_per_extent: int) -> int:
        """Free blocks to keep while nothing is asked: a typical prompt, in at most four extents."""
        return min(self._size.blocks(STANDING_TOKENS), 4 * blocks_per_extent)

    def is_busy(self) -> bool:
        """Whether vLLM would work on anything: it knows what a pause holds back, and which sessions wait for input."""
        return self._scheduler.get_num_unfinished_requests() > 0

    def _waiting(self) -> Iterator[RequestQueue]:
        return (getattr(self._scheduler, name) for name in self._queues)

    def _firsts(self) -> Iterator[Request]:
        return (queue.peek_request() for queue in self._waiting() if queue)

    def _running_blocks(self) -> int:
        return len(self._scheduler.running) * self._blocks_per_running

    def _begun_blocks(self) -> int:
        """Of prompts begun, what one step can compute."""
        return self._size.more_blocks(min(self._begun_tokens(), self._max_step_tokens))

    def _head(self) -> tuple[int, int]:
        """Blocks and tokens of the first request that waits, or of the largest where several queues have one."""
        if self._scheduler.pause_state != PauseState.UNPAUSED or self._num_slots() <= 0:
            return 0, 0
        firsts = ((self._admission_blocks(each), each.num_tokens - each.num_computed_tokens) for each in self._firsts())
        return max(firsts, default=(0, 0))

    def _more_prompts_blocks(self, head_blocks: int, head_tokens: int) -> int:
        """Of the prompts that one step computes beside the first, were all of its size."""
        if not head_tokens:
            return 0
        num_prompts = min(self._num_behind_head() + 1, self._max_step_tokens // head_tokens, self._num_slots())
        return head_blocks * max(0, num_prompts - 1)

    def _num_slots(self) -> int:
        """Requests that vLLM would admit beside those there are."""
        return self._max_admitted - len(self._scheduler.running) - self._scheduler.num_waiting_for_streaming_input

    def _num_behind_head(self) -> int:
        return max(0, self._scheduler.get_request_counts()[1] - 1)

    def _admission_blocks(self, request: Any) -> int:
        if request.num_computed_tokens:  # it holds blocks for these
            return self._size.more_blocks(request.num_tokens - request.num_computed_tokens + self._ahead_tokens)
        return self._size.blocks(min(request.num_tokens + self._ahead_tokens, self._scheduler.max_model_len))

    def _begun_tokens(self) -> int:
        """Tokens still to be computed of prompts begun; such requests are the last that were admitted."""
        tokens = 0
        for request in reversed(self._scheduler.running):
            left = request.num_tokens - request.num_computed_tokens
            if left <= 1:
                break
            tokens += left
        return tokens
