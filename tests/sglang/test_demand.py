"""What is read from the scheduler's queues: an upper bound on what the next step allocates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvcached_sglang.demand import AHEAD_STEPS, IDLE, DemandReader
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.runtime_context import get_context


def request(
    num_tokens: int, num_output: int = 0, max_new_tokens: int = 100, *, allocated: int = 0, beam_rows: int = 0
) -> Any:
    return SimpleNamespace(
        origin_input_ids=[0] * num_tokens,
        output_ids=[0] * num_output,
        kv=ReqKvInfo(kv_allocated_len=allocated),
        beam_group=SimpleNamespace(num_member_rows=beam_rows) if beam_rows else None,
        sampling_params=SimpleNamespace(max_new_tokens=max_new_tokens),
    )


def scheduler(waiting: list[Any] | None = None, **changed: Any) -> Any:
    args = {
        "speculative_algorithm": None,
        "schedule_policy": "fcfs",
        "enable_priority_scheduling": False,
    }
    mine = {
        "page_size": 1,
        "max_running_requests": 8,
        "chunked_prefill_size": 512,
        "max_prefill_tokens": 4096,
        "waiting_queue": waiting or [],
        "chunked_req": None,
    }
    args |= {name: value for name, value in changed.items() if name in args}
    mine |= {name: value for name, value in changed.items() if name in mine}
    return SimpleNamespace(server_args=SimpleNamespace(**args), **mine)


def batch(size: int, *, extend: bool = False) -> Any:
    mode = SimpleNamespace(is_extend=lambda: extend)
    return SimpleNamespace(reqs=[request(10)] * size, forward_mode=mode)


def read(made: Any, running: int = 0, last: Any = None) -> Any:
    return DemandReader(made).read(batch(running), last)


def test_nothing_to_do_is_no_demand():
    assert read(scheduler()) is IDLE
    assert not IDLE.busy


def test_every_running_request_may_take_a_page_in_the_next_step():
    found = read(scheduler(page_size=64), running=5)
    assert found.decode == 5 * (64 + 1)
    assert found.ahead == 5 * AHEAD_STEPS


def test_a_batch_that_has_just_prefilled_decodes_next():
    assert read(scheduler(), running=2, last=batch(3, extend=True)).running == 5
    assert read(scheduler(), running=2, last=batch(3)).running == 2


EAGLE = {
    "page_size": 1,
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 8,
}


def test_speculative_steps_take_all_that_is_drafted():
    plain = read(scheduler(), running=1).decode
    with get_context().override_server_args(**EAGLE):
        drafted = read(scheduler(speculative_algorithm="EAGLE"), running=1).decode
    assert drafted >= plain - 1 + 2 * 8


def test_drafted_trees_take_pages_of_their_own_for_every_branch():
    """Seven branches of three steps each, in pages of 64 tokens, twice: more than seven times three tokens."""
    tree = EAGLE | {"speculative_eagle_topk": 7, "page_size": 64}
    with get_context().override_server_args(**tree):
        drafted = read(scheduler(speculative_algorithm="EAGLE", page_size=64), running=1).decode
    assert drafted >= 2 * 7 * 64 * ((63 + 3 + 63) // 64)


def test_every_beam_writes_a_token():
    made = scheduler()
    beams = SimpleNamespace(reqs=[request(10, beam_rows=15)] * 2)
    found = DemandReader(made).read(beams, None)
    assert found.decode >= 2 * 16
    assert found.ahead >= 2 * 16 * AHEAD_STEPS


def test_waiting_prompts_count_up_to_what_one_step_begins_and_the_longest_whole():
    """The last of a step may be cut: it has been let in, so all of it must find room."""
    found = read(scheduler([request(100)] * 4))
    assert 400 <= found.prefill <= 420
    found = read(scheduler([request(400)] * 6 + [request(3000)]))
    assert 3512 <= found.prefill <= 3530
    assert found.chunk <= 530


def test_prompts_of_the_steps_after_the_next_are_mapped_ahead():
    found = read(scheduler([request(400)] * 50))
    assert found.ahead == 4 * 512


def test_the_rest_of_a_prompt_half_prefilled_is_pledged():
    found = read(scheduler(chunked_req=request(2000, allocated=1500)))
    assert 500 <= found.pledged <= 510
    assert 500 <= found.prefill <= 510


def test_retracted_requests_come_back_with_what_they_generated():
    assert read(scheduler([request(100, num_output=50)])).prefill >= 150


def test_no_more_requests_start_than_there_are_slots():
    assert read(scheduler([request(100)] * 4), running=8).prefill == 0


def test_the_first_request_is_known_only_where_the_order_is():
    two = [request(100), request(200)]
    assert read(scheduler(two)).head_prompt >= 100
    assert read(scheduler(two)).head_total >= 200
    assert read(scheduler(two, schedule_policy="lpm")).head_prompt == 0
    assert read(scheduler(two[:1], schedule_policy="lpm")).head_prompt >= 100
    assert read(scheduler(two, enable_priority_scheduling=True)).head_prompt == 0


def test_the_first_request_finds_room_as_if_it_waited_alone():
    waiting = [request(100)] * 16
    assert read(scheduler(waiting)).head_prompt == read(scheduler(waiting[:1])).head_prompt == 104


def test_without_chunks_a_prompt_is_allocated_whole():
    found = read(scheduler([request(9000)], chunked_prefill_size=-1))
    assert found.chunk >= 9000


def test_the_queue_is_read_anew_when_it_changes():
    made = scheduler([request(100)])
    reader = DemandReader(made)
    before = reader.read(batch(0), None).prefill
    made.waiting_queue.append(request(300))
    assert reader.read(batch(0), None).prefill >= before + 300
