"""What both schedulers add to vLLM's own: a queue that holds only resident blocks, and the agent that moves them.

One lock per scheduler covers every method that changes its block lists; the agent takes it for about a millisecond
at a time. A step adds one check of the free blocks against what the step needs, which is O(1).
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import vllm.v1.engine
from kvcached_core import orders
from kvcached_core.agent import WAIT_SECONDS, Agent, AgentStatistics, Policy
from kvcached_core.config import Settings
from kvcached_core.sizes import Size, format_bytes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from kvcached_vllm.demand import Demand
from kvcached_vllm.member import order_address
from kvcached_vllm.queue import ElasticFreeQueue
from kvcached_vllm.starvation import Starvation
from kvcached_vllm.worker import STEP_ATTRIBUTE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

FIRST_BLOCKS_SECONDS = 10.0
"""How long an engine waits at start for its first memory before it says so and serves what it can."""

ALONE_WAIT_SECONDS = 0.05
"""The longest that a step waits for blocks on their way while nothing runs that it would delay. The first prompt then
takes new memory instead of evicting cached prefixes: on the host backend 25 MiB take 8 ms to map, more than
`WAIT_SECONDS`."""

STARVED_WAIT_SECONDS = 0.02
"""How long a step that found no memory for anybody waits for some. vLLM would try again at once, as often as it can."""


class ElasticScheduling:
    """Mixin over a scheduler class of vLLM."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lock = threading.RLock()  # add_request may call finish_requests
        self._step = 0
        self._refused: list[tuple[Request, str]] = []
        self._starvation = Starvation()
        super().__init__(*args, **kwargs)
        self._demand = Demand(self)  # type: ignore[arg-type]
        links, self._welcomes = _connect(self)
        self._blocks = self._replace_free_queue(self._welcomes[0].blocks_per_extent)
        self._agent = Agent(self._blocks, links, self, self._lock, self._make_policy())
        self._agent.start()
        self._await_first_blocks()
        self._longest_said = self.max_model_len  # type: ignore[attr-defined]
        with self._lock:
            self._longest_request()

    @property
    def agent_statistics(self) -> AgentStatistics:
        """What the agent has done since it started, and the longest that it held this scheduler up."""
        return self._agent.statistics

    # What the agent asks

    def wanted_blocks(self) -> int:
        """Free blocks that the next few steps would take; none while vLLM would work on nothing."""
        return self._demand.next_steps_blocks() if self.busy() else 0

    def busy(self) -> bool:
        """Whether there are requests to work on; none while paused or asleep."""
        return self._demand.is_busy()

    def last_step(self) -> int:
        """Number of the step scheduled last."""
        return self._step

    # What vLLM calls, each under the lock

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step; before it, wait a moment for blocks that are on their way."""
        with self._lock:
            if self._agent.may_grow:
                wait_seconds = WAIT_SECONDS if self.running else ALONE_WAIT_SECONDS
                self._agent.await_blocks(self._demand.full_step_blocks(), wait_seconds)
            self._size_watermark()
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
            self._step += 1
            setattr(output, STEP_ATTRIBUTE, self._step)
            lacking = self._lacking_blocks(output)
            if self._agent.may_grow and self._blocks.num_clean_blocks < self._demand.next_steps_blocks():
                self._agent.kick()
            else:
                self._agent.note_step()
            if lacking:
                self._agent.await_growth(STARVED_WAIT_SECONDS)
            return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        """As vLLM's; also answers the requests that were refused."""
        with self._lock:
            outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
            return self._answer_refused(outputs) if self._refused else outputs

    def add_request(self, request: Request) -> None:
        """As vLLM's; refuses a prompt that could never fit under this engine's ceiling, which would wait forever."""
        with self._lock:
            refusal = self._refusal(request)
            if refusal is None:
                super().add_request(request)  # type: ignore[misc]
            else:
                log.error("Request %s is refused. %s", request.request_id, refusal)
                self._refused.append((request, refusal))
            may_gain = self._may_gain()
        if may_gain:
            self._agent.kick()  # a head start before the next step

    def has_requests(self) -> bool:
        """Also true while a refused request waits for its answer."""
        return bool(self._refused) or super().has_requests()  # type: ignore[misc]

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return super().finish_requests(*args, **kwargs)  # type: ignore[misc]

    def update_draft_token_ids(self, *args: Any, **kwargs: Any) -> None:
        with self._lock:
            super().update_draft_token_ids(*args, **kwargs)  # type: ignore[misc]

    def update_draft_token_ids_in_output(self, *args: Any, **kwargs: Any) -> None:
        with self._lock:
            super().update_draft_token_ids_in_output(*args, **kwargs)  # type: ignore[misc]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """As vLLM's, which learns from the count of free blocks whether any is in use."""
        with self._lock:
            with self._blocks.counting_absent():
                done = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
            self._blocks.forget_cache()
        self._agent.kick()
        return bool(done)

    def get_kv_cache_usage(self) -> float:
        """Blocks in use as a share of those that this engine could use now, 0 to 1."""
        with self._lock:
            attainable = self._blocks.num_attainable_blocks
            return self._blocks.num_used_blocks / attainable if attainable else 0.0

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, with the usage of `get_kv_cache_usage`: routers take an endpoint at 0.8 for full."""
        with self._lock:
            stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
            if stats is not None:
                stats.kv_cache_usage = self.get_kv_cache_usage()
            return stats

    def shutdown(self) -> None:
        """End the agent, then as vLLM's."""
        self._agent.stop()
        super().shutdown()  # type: ignore[misc]

    # Setting up

    def _replace_free_queue(self, blocks_per_extent: int) -> ElasticFreeQueue:
        pool = self.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        pool.free_block_queue = blocks = ElasticFreeQueue(pool, blocks_per_extent)
        return blocks

    def _make_policy(self) -> Policy:
        settings = Settings.load()
        return Policy(
            standing_blocks=self._demand.standing_blocks(self._blocks.blocks_per_extent),
            cache_floor_blocks=self._blocks_in(settings.cache_floor),
            cache_ceiling_blocks=None if settings.cache_ceiling is None else self._blocks_in(settings.cache_ceiling),
        )

    def _blocks_in(self, size: Size) -> int:
        """Blocks that a size on each rank's device holds; the smallest rank decides."""
        return min(
            size.resolve(rank.total_bytes) * rank.blocks_per_extent // rank.extent_bytes for rank in self._welcomes
        )

    def _await_first_blocks(self) -> None:
        if not self._agent.await_first_blocks(FIRST_BLOCKS_SECONDS):
            log.warning(
                "kvcached got no memory for a first extent (%s) within %.0f s: neighbours hold the device. "
                "Requests wait until they give way; see `kvcached status`.",
                format_bytes(self._welcomes[0].extent_bytes), FIRST_BLOCKS_SECONDS,
            )  # fmt: skip

    # Working

    def _may_gain(self) -> bool:
        """Whether anybody has memory for this engine: whole, or at its ceiling, it would only be held up by asking."""
        return self._blocks.extents.num_resident < self._agent.ceiling_extents

    def _lacking_blocks(self, output: SchedulerOutput) -> int:
        """Blocks that a request needs which waits while nothing runs; 0 where something runs, or nothing could."""
        if output.total_num_scheduled_tokens or self.running:  # type: ignore[attr-defined]
            self._demand.served()
            self._starvation.ended()
            return 0
        free = self._blocks.num_free_blocks
        needed = self._demand.turned_away(free)
        if needed:
            attainable = self._blocks.num_attainable_blocks
            self._starvation.goes_on(needed_blocks=needed, free_blocks=free, attainable_blocks=attainable)
            if self._starvation.is_long:
                self._refuse_first_requests()
        else:
            self._starvation.ended()
        return needed

    def _refuse_first_requests(self) -> None:
        """Nothing has run for long: refuse first requests that the ceiling, lowered since, leaves no room for.

        One that has begun is not ended; it goes on when the ceiling is raised.
        """
        for request in self._demand.first_requests():
            refusal = self._refusal(request) if not request.num_preemptions else None
            if refusal is not None:
                log.error("Request %s is refused. %s", request.request_id, refusal)
                self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
                self._refused.append((request, refusal))

    def _size_watermark(self) -> None:
        """vLLM computed its watermark from all virtual blocks; it means a share of those that can be had."""
        watermark = self.scheduler_config.watermark  # type: ignore[attr-defined]
        if watermark:
            manager = self.kv_cache_manager  # type: ignore[attr-defined]
            manager.watermark_blocks = int(watermark * self._blocks.num_attainable_blocks)

    def _refusal(self, request: Request) -> str | None:
        """Why a request can never run under the ceiling that is set. One that could not end under it will end earlier.

        vLLM's servers set ``max_tokens`` to all that the model's length leaves, so it says little of what is wanted.
        """
        longest = self._longest_request()
        if longest >= self.max_model_len:  # type: ignore[attr-defined]
            return None
        if request.num_prompt_tokens >= longest:
            return (
                f"The prompt of {request.num_prompt_tokens} tokens and an answer do not fit: the ceiling of this "
                f"engine's KV cache allows {longest} tokens. Raise the ceiling (kvcached limit), or shorten the prompt."
            )
        if request.num_prompt_tokens + request.max_tokens > longest:
            request.max_tokens = longest - request.num_prompt_tokens
        return None

    def _longest_request(self) -> int:
        """Tokens that a request may grow to; said at each change to less than the model allows."""
        ceiling, most = self._agent.ceiling_extents, self.max_model_len  # type: ignore[attr-defined]
        if ceiling < self._blocks.extents.num_extents:
            longest = self._demand.longest_request(self._blocks.usable_blocks(ceiling))
        else:
            longest = most
        if longest != self._longest_said:
            self._longest_said = longest
            if longest < most:
                log.warning(
                    "The ceiling of this engine (%d blocks) allows requests of %d tokens, the model %d: answers end "
                    "there, and longer prompts are refused. See `kvcached limit`.",
                    ceiling * self._blocks.blocks_per_extent, longest, most,
                )  # fmt: skip
        return longest

    def _answer_refused(self, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        for request, reason in self._refused:
            to_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            to_client.outputs.append(_refused_output(request, reason))
            to_client.finished_requests = {*(to_client.finished_requests or ()), request.request_id}
        self._refused.clear()
        return outputs


def _refused_output(request: Request, reason: str) -> EngineCoreOutput:
    """The end of a request that cannot run; since 0.33 with the reason, which its user then reads."""
    output = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR)
    request_error = getattr(vllm.v1.engine, "RequestError", None)
    if request_error is not None:
        output.error = request_error(code="validation_error", message=reason)
    return output


def _connect(scheduler: Any) -> tuple[Sequence[orders.Link], Sequence[orders.Welcome]]:
    """Links to every rank of the engine, greeted."""
    ranks = range(scheduler.parallel_config.world_size)
    links = [orders.connect(order_address(scheduler.vllm_config, rank), rank) for rank in ranks]
    return links, orders.greet(links, scheduler.kv_cache_config.num_blocks)


class ElasticScheduler(ElasticScheduling, Scheduler):
    """vLLM's synchronous scheduler over elastic memory."""


class ElasticAsyncScheduler(ElasticScheduling, AsyncScheduler):
    """vLLM's asynchronous scheduler over elastic memory."""
