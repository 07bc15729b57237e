"""Claims of scheduler.py and demand.py: vLLM's real scheduler over a real rank's memory, without a model.

A block holds 32 tokens and takes a page, an extent is four blocks. Steps are scheduled and never run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcached_core import orders
from kvcached_core.arena import Arena
from kvcached_core.backends.host import HostBackend
from kvcached_core.geometry import Geometry, Stripe
from kvcached_core.ledger import Ledger
from kvcached_core.rank import Rank
from kvcached_vllm import scheduler
from kvcached_vllm.member import order_address
from kvcached_vllm.scheduler import STARVED_WAIT_SECONDS, ElasticScheduler
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.vllm.engine import until

PAGE = HostBackend.granularity_bytes
TOKENS = 32
BLOCKS_PER_EXTENT = 4
NUM_BLOCKS = 64
EXTENT = BLOCKS_PER_EXTENT * PAGE
MAX_MODEL_LEN = 1024
NAME = "scheduled"
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)


@pytest.fixture(scope="module")
def vllm_config(tiny_llama: Path) -> VllmConfig:
    config = EngineArgs(
        model=str(tiny_llama), dtype="float32", block_size=TOKENS, enforce_eager=True, skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN, max_num_seqs=16, max_num_batched_tokens=MAX_MODEL_LEN,
        kv_cache_memory_bytes=1 << 26, enable_prefix_caching=False,
    ).create_engine_config()  # fmt: skip
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    return config


class Scene:
    """A scheduler, its rank, and the ledger that both are in."""

    def __init__(self, scheduler: ElasticScheduler, ledger: Ledger) -> None:
        self.scheduler = scheduler
        self.ledger = ledger

    @property
    def num_resident_blocks(self) -> int:
        return self.scheduler._blocks.extents.num_resident * BLOCKS_PER_EXTENT

    def add(self, name: str, num_tokens: int, *, max_tokens: int = 1, **arguments: Any) -> Request:
        request = Request(
            name, [7] * num_tokens, SamplingParams(max_tokens=max_tokens, ignore_eos=True), None, **arguments
        )
        self.scheduler.add_request(request)
        return request

    def until_runs(self, request: Request) -> None:
        def runs() -> bool:
            self.output = self.scheduler.schedule()
            return request.status == RequestStatus.RUNNING

        until(runs, f"{request.request_id} runs")

    def sample(self, request: Request) -> None:
        """A token for what was scheduled, as a model would give it."""
        output = self.output
        assert list(output.num_scheduled_tokens) == [request.request_id]
        given: dict[str, Any] = {"req_ids": [request.request_id], "sampled_token_ids": [[7]]}
        if "req_id_to_index" in ModelRunnerOutput.__dataclass_fields__:  # until 0.33
            given["req_id_to_index"] = {request.request_id: 0}
        self.scheduler.update_from_output(output, ModelRunnerOutput(**given))

    def answer(self) -> dict[int, Any]:
        """What a step that ran nothing is answered with."""
        output = self.scheduler.schedule()
        assert output.total_num_scheduled_tokens == 0
        return self.scheduler.update_from_output(output, ModelRunnerOutput([], {}))


@contextmanager
def scene_of(
    vllm_config: VllmConfig, runtime_dir: Path, spec: KVCacheSpec = FULL, *, ceiling_extents: int | None = None
) -> Iterator[Scene]:
    geometry = Geometry(NUM_BLOCKS, (Stripe(0, PAGE, PAGE),), NUM_BLOCKS * PAGE, PAGE, BLOCKS_PER_EXTENT)
    backend = HostBackend(geometry.size_bytes)
    ledger = Ledger.open("host", geometry.size_bytes, runtime_dir=runtime_dir)
    ceiling = None if ceiling_extents is None else ceiling_extents * EXTENT
    account = ledger.join(NAME, engine="vllm", floor_bytes=0, ceiling_bytes=ceiling)
    arena = Arena(backend, geometry.size_bytes, PAGE)
    rank = Rank(arena, geometry, account, backend, index=0)
    rank.pin(range(1))
    address = order_address(vllm_config, 0)
    orders.offer(address, rank, local=True)
    kv_cache_config = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    elastic = ElasticScheduler(vllm_config, kv_cache_config, StructuredOutputManager(vllm_config), TOKENS)
    try:
        yield Scene(elastic, ledger)
    finally:
        elastic.shutdown()
        orders.withdraw(address)
        rank.close()
        ledger.close()
        backend.close()


@pytest.fixture
def scene(vllm_config: VllmConfig, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("KVCACHED_RUNTIME_DIR", str(runtime_dir))
    with scene_of(vllm_config, runtime_dir) as made:
        yield made


# The agent while steps go on


def test_the_agent_sleeps_on_while_steps_find_all_calm(scene: Scene) -> None:
    request = scene.add("answered", 8, max_tokens=MAX_MODEL_LEN - 8)
    scene.until_runs(request)

    def turns_during_steps(seconds: float) -> int:
        before, deadline = scene.scheduler.agent_statistics.turns, time.monotonic() + seconds
        while time.monotonic() < deadline:
            scene.sample(request)
            scene.output = scene.scheduler.schedule()
            time.sleep(0.001)
        return scene.scheduler.agent_statistics.turns - before

    turns = [turns_during_steps(10 * orders.TICK_SECONDS) for _ in range(5)]
    assert min(turns) <= 2, turns  # of ten; a pause of this thread is one more


# Requests that wait


def test_a_long_prompt_gets_its_memory(scene: Scene) -> None:
    scene.until_runs(scene.add("long", 1000))
    assert scene.num_resident_blocks >= 1000 // TOKENS


def test_prompts_that_come_at_once_are_computed_in_one_step(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of them would else wait for the memory that a step in between lets arrive."""
    monkeypatch.setattr(scheduler, "ALONE_WAIT_SECONDS", 10.0)
    monkeypatch.setattr(scene.scheduler, "_may_gain", lambda: False)  # no head start
    burst = [scene.add(str(number), 80) for number in range(12)]
    assert scene.num_resident_blocks < 12 * 80 // TOKENS
    output = scene.scheduler.schedule()
    assert output.num_scheduled_tokens == {request.request_id: 80 for request in burst}


def test_a_session_gets_memory_for_the_long_prompt_that_it_goes_on_with(scene: Scene) -> None:
    """It holds blocks already, so it waits in a queue of its own."""
    session = scene.add("session", 40, resumable=True)
    scene.until_runs(session)
    scene.sample(session)
    assert session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    assert not scene.scheduler.busy()  # it waits for its user
    scene.add("session", 900, resumable=True)
    assert scene.scheduler.busy()
    scene.until_runs(session)


def test_a_prompt_gets_its_memory_though_vllm_wants_more_than_was_thought(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.scheduler._demand._size = SimpleNamespace(blocks=lambda _: 1, more_blocks=lambda _: 1)  # type: ignore[assignment]
    request = scene.add("long", 1000)
    scene.until_runs(request)
    assert scene.scheduler._demand.next_steps_blocks() < 10  # and no more is asked for it


def with_grammar(num_tokens: int) -> Request:
    """A request with a JSON schema whose grammar is being compiled."""
    request = Request("json", [7] * num_tokens, SamplingParams(max_tokens=1), None)
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    request.structured_output_request = SimpleNamespace(grammar=None)  # type: ignore[assignment]
    return request


def test_what_waits_for_something_else_than_memory_takes_none_and_is_not_held_up(scene: Scene) -> None:
    scene.scheduler.add_request(with_grammar(32))
    began = time.monotonic()
    for _ in range(20):
        assert scene.scheduler.schedule().total_num_scheduled_tokens == 0
    assert time.monotonic() - began < 20 * STARVED_WAIT_SECONDS
    assert scene.scheduler.wanted_blocks() == 2


def test_a_long_prompt_with_a_json_schema_gets_its_memory(scene: Scene) -> None:
    """On 0.30 such requests wait in a queue of their own, and stay there when they are ready."""
    request = with_grammar(1000)
    scene.scheduler.add_request(request)
    scene.scheduler.schedule()
    request.structured_output_request.grammar = object()  # type: ignore[union-attr,assignment]
    scene.until_runs(request)


def test_a_pause_holds_back_what_vllm_holds_back(scene: Scene) -> None:
    paused = scene.scheduler
    running = scene.add("running", 32, max_tokens=100)
    scene.until_runs(running)
    waiting = scene.add("waiting", 320)
    unpaused = paused.wanted_blocks()
    paused.set_pause_state(PauseState.PAUSED_NEW)
    assert paused.busy()
    assert 2 <= paused.wanted_blocks() < unpaused - 320 // TOKENS
    paused.set_pause_state(PauseState.PAUSED_ALL)
    assert not paused.busy()
    assert paused.wanted_blocks() == 0
    paused.set_pause_state(PauseState.PAUSED_NEW)
    paused.finish_requests(running.request_id, RequestStatus.FINISHED_ABORTED)
    assert not paused.busy()
    paused.set_pause_state(PauseState.UNPAUSED)
    scene.until_runs(waiting)


def test_a_request_asks_for_memory_at_once_unless_there_is_none_to_be_had(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, kicks = scene.scheduler._agent, []
    monkeypatch.setattr(agent, "kick", lambda: kicks.append(True))
    scene.add("below the ceiling", 10)
    assert kicks
    scene.ledger.set_limits(NAME, ceiling_bytes=scene.num_resident_blocks // BLOCKS_PER_EXTENT * EXTENT)
    until(lambda: agent.ceiling_extents == scene.scheduler._blocks.extents.num_resident, "the ceiling is heard of")
    kicks.clear()
    scene.add("at the ceiling", 10)
    assert not kicks


# Under a ceiling: eight extents are 32 blocks, one of them the null block, and hold a request of 992 tokens

LONGEST = (8 * BLOCKS_PER_EXTENT - 1) * TOKENS


@pytest.fixture
def low(vllm_config: VllmConfig, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("KVCACHED_RUNTIME_DIR", str(runtime_dir))
    with scene_of(vllm_config, runtime_dir, ceiling_extents=8) as made:
        yield made


def test_an_answer_that_could_outgrow_the_ceiling_ends_there(low: Scene) -> None:
    """vLLM's servers set ``max_tokens`` to all that the model's length leaves."""
    request = low.add("chat", 900, max_tokens=MAX_MODEL_LEN - 900)
    low.until_runs(request)
    while low.scheduler.running:
        low.sample(request)
        low.output = low.scheduler.schedule()
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert request.num_tokens == LONGEST
    assert request.num_preemptions == 0


def test_a_prompt_beyond_the_ceiling_is_refused_and_its_client_told(low: Scene) -> None:
    low.add("prompt", LONGEST, client_index=3)
    assert low.scheduler.has_requests()
    answers = low.answer()
    assert answers[3].finished_requests == {"prompt"}
    [output] = answers[3].outputs
    assert (output.request_id, output.finish_reason) == ("prompt", FinishReason.ERROR)
    assert not low.scheduler.has_requests()
    low.until_runs(low.add("shorter", LONGEST - 1))


def test_a_prompt_that_waited_while_the_ceiling_was_lowered_is_refused_and_holds_nobody_up(low: Scene) -> None:
    running = low.add("running", 500)
    low.until_runs(running)
    large = low.add("large", 700, client_index=3)
    small = low.add("small", 100)
    low.ledger.set_limits(NAME, ceiling_bytes=5 * EXTENT)
    until(lambda: low.scheduler._agent.ceiling_extents == 5, "the ceiling lowered")
    low.sample(running)
    low.scheduler._starvation._now = lambda: time.monotonic() * 20
    began = time.monotonic()
    while not (answers := low.answer()):
        assert time.monotonic() - began < 10
    [output] = answers[3].outputs
    assert (output.request_id, output.finish_reason) == ("large", FinishReason.ERROR)
    assert large.is_finished()
    low.until_runs(small)


def test_a_request_that_has_begun_waits_for_a_ceiling_to_be_raised(low: Scene) -> None:
    large = low.add("large", 500, max_tokens=100)
    low.until_runs(large)
    low.sample(large)
    low.ledger.set_limits(NAME, ceiling_bytes=3 * EXTENT)

    def is_preempted() -> bool:
        low.output = low.scheduler.schedule()
        if large.status == RequestStatus.RUNNING:
            low.sample(large)
        return large.status == RequestStatus.PREEMPTED

    until(is_preempted, "it gives its memory back")
    low.scheduler._starvation._now = lambda: time.monotonic() * 100
    until(lambda: not low.answer() and low.scheduler._starvation.is_long, "a long wait")
    assert not low.answer()
    low.ledger.set_limits(NAME, ceiling_bytes=8 * EXTENT)
    low.until_runs(large)


def test_the_reason_of_a_refusal_reaches_the_user_where_vllm_passes_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since 0.33."""
    monkeypatch.setattr("vllm.v1.engine.RequestError", SimpleNamespace, raising=False)
    monkeypatch.setattr(scheduler, "EngineCoreOutput", lambda *_, **__: SimpleNamespace(error=None))
    output = scheduler._refused_output(SimpleNamespace(request_id="a"), "too long")  # type: ignore[arg-type]
    assert vars(output.error) == {"code": "validation_error", "message": "too long"}


def test_a_ceiling_below_the_models_length_is_said_at_start_and_when_it_changes(
    low: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    said = f"allows requests of {LONGEST} tokens, the model {MAX_MODEL_LEN}"
    assert caplog.get_records("setup")[-1].getMessage().count(said) == 1
    low.add("a", 500, max_tokens=524)
    low.add("b", 500, max_tokens=524)
    assert said not in caplog.text
    low.ledger.set_limits(NAME, ceiling_bytes=NUM_BLOCKS * PAGE)
    until(lambda: low.scheduler._agent.ceiling_extents == NUM_BLOCKS // BLOCKS_PER_EXTENT, "the ceiling raised")
    assert low.add("c", 500, max_tokens=524).max_tokens == 524
    assert caplog.text == ""
    low.ledger.set_limits(NAME, ceiling_bytes=8 * EXTENT)
    until(lambda: low.scheduler._agent.ceiling_extents == 8, "the ceiling lowered")
    low.add("d", 500)
    assert caplog.text.count(said) == 1


def test_what_a_neighbours_floor_takes_for_a_while_refuses_and_shortens_nothing(scene: Scene) -> None:
    scene.until_runs(scene.add("running", 700, max_tokens=100))
    neighbour = scene.ledger.join("neighbour", engine="vllm", floor_bytes=12 * EXTENT, ceiling_bytes=12 * EXTENT)
    neighbour.report(demand_bytes=12 * EXTENT, unmet_bytes=12 * EXTENT, free_bytes=0, cached_bytes=0, busy=True)
    until(lambda: scene.scheduler._blocks.extents.ceiling < 8, "the limit lowered for the neighbour's floor")
    assert scene.add("long", 900, max_tokens=100).max_tokens == 100
    assert not scene.scheduler._refused
    neighbour.leave()
