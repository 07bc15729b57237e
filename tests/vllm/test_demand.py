"""Claims of demand.py, on vLLM's real requests and queues; beside a whole scheduler in test_scheduler.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcached_vllm.demand import Demand
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

TOKENS = 32
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32)


class Waiting(SimpleNamespace):
    """What `Demand` reads of a scheduler: nothing runs, and its queues are those that it is given."""

    def __init__(self, *queues: str, lookahead: int = 0, **attributes: Any) -> None:
        super().__init__(
            vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=1)),
            kv_cache_config=SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["layer"], FULL)]),
            max_num_running_reqs=16,
            max_num_scheduled_tokens=4 * TOKENS,
            max_model_len=1024,
            num_lookahead_tokens=lookahead,
            num_spec_tokens=lookahead,
            num_waiting_for_streaming_input=0,
            pause_state=PauseState.UNPAUSED,
            running=[],
            **attributes,
        )
        self.queues = [create_request_queue(SchedulingPolicy.FCFS) for _ in queues]
        for name, queue in zip(queues, self.queues, strict=True):
            setattr(self, name, queue)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), sum(map(len, self.queues))

    def get_num_unfinished_requests(self) -> int:
        return sum(self.get_request_counts())


def request(num_tokens: int, status: RequestStatus = RequestStatus.WAITING) -> Request:
    made = Request("a", [7] * num_tokens, SamplingParams(max_tokens=8), None)
    made.status = status
    return made


@pytest.mark.parametrize("name", ["waiting", "skipped_waiting", "kv_holding_waiting"])
def test_a_prompt_counts_in_whatever_queue_it_waits(name: str) -> None:
    scheduler = Waiting(*dict.fromkeys(["waiting", name]))
    demand = Demand(scheduler)  # type: ignore[arg-type]
    assert demand.next_step_blocks() == 0
    getattr(scheduler, name).add_request(request(320))
    assert demand.next_step_blocks() == 11
    scheduler.waiting.add_request(request(32))
    assert demand.next_step_blocks() == 11
    assert demand.next_steps_blocks() == 11 + 4


def test_a_full_step_takes_as_many_prompts_as_it_has_tokens_for() -> None:
    scheduler = Waiting("waiting")
    demand = Demand(scheduler)  # type: ignore[arg-type]
    assert demand.full_step_blocks() == 0
    scheduler.waiting.add_request(request(20))
    assert demand.full_step_blocks() == 1
    for _ in range(2):
        scheduler.waiting.add_request(request(20))
    assert demand.full_step_blocks() == 3
    for _ in range(5):
        scheduler.waiting.add_request(request(20))
    assert demand.full_step_blocks() == 6
    scheduler.running = [request(1)] * 3
    assert demand.full_step_blocks() == 3 + 6
    assert demand.next_steps_blocks() >= demand.full_step_blocks()  # what a step waits for is asked for
    scheduler.running = [request(1)] * 14
    assert demand.full_step_blocks() == 14 + 2  # vLLM admits no more than 16
    scheduler.running = [request(1)] * 3
    scheduler.waiting.prepend_request(request(320))  # computed over several steps, and admitted whole
    assert demand.full_step_blocks() == 3 + 11


def test_of_a_prompt_that_holds_blocks_what_is_left_counts() -> None:
    scheduler = Waiting("waiting", "kv_holding_waiting")
    held = request(320)
    held.num_computed_tokens = 256
    scheduler.kv_holding_waiting.add_request(held)
    assert Demand(scheduler).next_step_blocks() == 3  # type: ignore[arg-type]


def test_what_a_draft_model_looks_ahead_counts_up_to_the_longest_request() -> None:
    scheduler = Waiting("waiting", lookahead=40)
    scheduler.waiting.add_request(request(32))
    assert Demand(scheduler).next_step_blocks() == 3  # type: ignore[arg-type]
    scheduler.waiting.remove_request(scheduler.waiting.peek_request())
    scheduler.waiting.add_request(request(1010))
    assert Demand(scheduler).next_step_blocks() == 1024 // TOKENS  # type: ignore[arg-type]


@pytest.mark.parametrize("taken", [{"running": 2}, {"num_waiting_for_streaming_input": 2}])
def test_nothing_counts_that_vllm_would_not_admit(taken: dict[str, int]) -> None:
    scheduler = Waiting("waiting", max_num_active_reqs=2)
    demand = Demand(scheduler)  # type: ignore[arg-type]
    scheduler.waiting.add_request(request(320))
    scheduler.running = [request(8)] * taken.get("running", 0)
    scheduler.num_waiting_for_streaming_input = taken.get("num_waiting_for_streaming_input", 0)
    assert demand.next_step_blocks() <= 3
    scheduler.num_waiting_for_streaming_input = 0
    del scheduler.running[1:]
    assert demand.next_step_blocks() >= 11


def test_a_prompt_that_was_turned_away_needs_more_than_was_free_until_something_runs() -> None:
    scheduler = Waiting("waiting")
    demand = Demand(scheduler)  # type: ignore[arg-type]
    assert demand.turned_away(100) == 0
    scheduler.waiting.add_request(request(32, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR))
    assert demand.turned_away(100) == 0
    scheduler.waiting.add_request(request(320, RequestStatus.PREEMPTED))
    assert demand.turned_away(100) == 101
    assert demand.next_steps_blocks() == 101
    assert demand.turned_away(0) == 2
    demand.served()
    assert demand.next_steps_blocks() == 4
