"""One real engine against the stock one: the same tokens whatever happens to its memory.

The model is a small Llama. An extent is 8 blocks of 32 tokens, 1 MiB; twelve of them hold 3072 tokens. The engines
start once and every test leaves them as they were, so the order of tests does not matter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvcached_core.ledger import Ledger

from tests.core.follower import Follower
from tests.vllm.engine import MIB, Engine, member, prompts, together, until

NAME = "llama"
BUDGET = 64 * MIB
EXTENT = MIB
TWELVE_EXTENTS = 12 * EXTENT
FLAGS = {"max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 256}


@dataclass
class Pair:
    """The stock engine, the elastic one, and the ledger that the latter is in."""

    native: Engine
    elastic: Engine
    ledger: Ledger

    def check_equal(self, requests: list[list[int]], max_tokens: int) -> list[list[int]]:
        native, elastic = together([self.native, self.elastic], requests, max_tokens)
        assert all(len(tokens) == max_tokens for tokens in native)
        assert elastic == native
        return elastic

    @property
    def resident_bytes(self) -> int:
        return member(self.ledger, NAME).resident_bytes

    def limit(self, ceiling_bytes: int) -> None:
        self.ledger.set_limits(NAME, ceiling_bytes=ceiling_bytes, floor_bytes=0)

    def reset(self) -> None:
        """No limit, no cached prefix; the elastic engine has followed."""
        self.limit(BUDGET)
        for engine in (self.native, self.elastic):
            assert engine.do("reset_prefix_cache")
        until(lambda: self.resident_bytes <= 2 * EXTENT, "memory back after the cache was reset")


@pytest.fixture(scope="module")
def engines(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, module_runtime_dir: Path) -> Iterator[Pair]:
    logs = tmp_path_factory.mktemp("engines")
    settings = {
        "KVCACHED_STRICT": "1",
        "KVCACHED_NAME": NAME,
        "KVCACHED_HOST_BUDGET": str(BUDGET),
        "KVCACHED_PAGE_SIZE": str(EXTENT // 4),
        "KVCACHED_RUNTIME_DIR": str(module_runtime_dir),
    }
    native = Engine(tiny_llama, logs / "native.log", None, kv_cache_memory_bytes=BUDGET, **FLAGS)
    elastic = Engine(tiny_llama, logs / "elastic.log", settings, **FLAGS)
    try:
        native.wait_ready()
        elastic.wait_ready()
        ledger = Ledger.open("host", None, runtime_dir=module_runtime_dir)
        yield Pair(native, elastic, ledger)
        elastic.stop()
        assert ledger.snapshot().members == ()
        ledger.close()
    finally:
        native.kill()
        elastic.kill()


@pytest.fixture
def pair(engines: Pair) -> Iterator[Pair]:
    engines.reset()
    yield engines
    engines.reset()


def test_the_start_up_line_says_what_it_is(pair: Pair) -> None:
    [line] = [line for line in pair.elastic.log_text().splitlines() if "kvcached 0" in line]
    assert "is on: vLLM 0.32.0" in line
    assert "member llama on host, virtual capacity 64.00 MiB" in line
    assert "ceiling 64.00 MiB" in line
    assert "page 256.00 KiB" in line
    assert "kvcached 0" not in pair.native.log_text()


def test_tokens_are_the_stock_engines(pair: Pair) -> None:
    pair.check_equal(prompts(12, 90, seed=1), 24)


def test_long_prompts_are_prefilled_in_chunks(pair: Pair) -> None:
    """With 256 tokens to a step, a prompt of 900 takes four, and chunks of one run beside the decoding of others."""
    pair.check_equal(prompts(6, 900, seed=2) + prompts(4, 40, seed=3), 32)


def test_a_cached_prefix_is_used_again(pair: Pair) -> None:
    requests = prompts(8, 320, seed=4, shared=256)
    first = pair.check_equal(requests, 16)
    again = pair.elastic.generate(requests, 16)
    assert [each.tokens for each in again] == first
    assert all(each.cached >= 256 for each in again)


def test_an_abort_storm_leaves_the_others_as_they_were(pair: Pair) -> None:
    for round_ in range(3):
        requests = prompts(24, 200, seed=10 + round_)
        for engine in (pair.native, pair.elastic):
            engine.ask("storm", prompts=requests, max_tokens=24, abort_after_steps=7 * round_)
        native, elastic = pair.native.answer(), pair.elastic.answer()
        assert sum(tokens is not None for tokens in native) >= 12
        assert elastic[::2] == native[::2]
    assert pair.elastic.do("usage") == 0
    pair.check_equal(prompts(4, 200, seed=20), 16)


def test_prefixes_are_evicted_where_the_ceiling_is_twelve_extents(pair: Pair) -> None:
    """Each of these rounds would alone fill the cache; the first prompts come again when theirs are long gone."""
    pair.limit(TWELVE_EXTENTS)
    for seed in (30, 31, 32, 30):
        pair.check_equal(prompts(6, 400, seed=seed), 16)
        assert pair.resident_bytes <= TWELVE_EXTENTS
    assert pair.resident_bytes >= TWELVE_EXTENTS - 2 * EXTENT


def test_requests_are_preempted_where_the_ceiling_is_twelve_extents(pair: Pair) -> None:
    """16 requests that end at 450 tokens each want 7200 tokens of the 3072 there are."""
    pair.limit(TWELVE_EXTENTS)
    before = pair.elastic.num_preemptions()
    pair.check_equal(prompts(16, 150, seed=40), 300)
    assert pair.elastic.num_preemptions() > before
    assert pair.resident_bytes <= TWELVE_EXTENTS


def test_memory_returns_after_the_cache_was_reset_with_no_further_request(pair: Pair) -> None:
    pair.elastic.generate(prompts(12, 800, seed=50), 8)
    assert pair.resident_bytes > 30 * EXTENT
    pair.elastic.do("reset_prefix_cache")
    seconds = until(lambda: pair.resident_bytes <= 2 * EXTENT, "memory back")
    print(f"memory back {seconds:.3f} s after the reset")


def test_memory_returns_to_a_neighbour_while_idle(pair: Pair, module_runtime_dir: Path) -> None:
    pair.elastic.generate(prompts(14, 900, seed=51), 8)
    held = pair.resident_bytes
    assert held > 45 * EXTENT
    with Follower(module_runtime_dir, "neighbour", total_bytes=BUDGET, wants=BUDGET // 2):
        seconds = until(lambda: pair.resident_bytes <= BUDGET // 2, "half of the budget back")
        print(f"{(held - BUDGET // 2) // MIB} MiB back {seconds:.3f} s after the demand")
    requests = prompts(14, 900, seed=51)
    pair.check_equal(requests, 8)


def test_a_ceiling_lowered_while_idle_is_followed_with_no_request_sent(pair: Pair) -> None:
    pair.elastic.generate(prompts(14, 900, seed=52), 8)
    assert pair.resident_bytes > 45 * EXTENT
    pair.limit(6 * EXTENT)
    seconds = until(lambda: pair.resident_bytes <= 6 * EXTENT, "the ceiling followed")
    until(lambda: member(pair.ledger, NAME).limits_followed, "and said so", 2)
    print(f"ceiling followed in {seconds:.3f} s")


def test_a_ceiling_lowered_under_load_preempts_and_every_request_ends(pair: Pair) -> None:
    requests = prompts(16, 300, seed=53)
    pair.native.ask("generate", prompts=requests, max_tokens=200)
    before = pair.elastic.num_preemptions()
    pair.elastic.ask("generate", prompts=requests, max_tokens=200)
    until(lambda: member(pair.ledger, NAME).in_use_bytes > 20 * EXTENT, "load")
    pair.limit(8 * EXTENT)
    seconds = until(lambda: pair.resident_bytes <= 8 * EXTENT, "the ceiling followed under load")
    assert pair.elastic.at_work()
    print(f"ceiling followed under load in {seconds:.3f} s")
    elastic, native = pair.elastic.answer(), pair.native.answer()
    assert [each["tokens"] for each in elastic] == [each["tokens"] for each in native]
    assert pair.elastic.num_preemptions() > before
    assert pair.resident_bytes <= 8 * EXTENT


def test_a_request_that_can_never_fit_is_refused_with_the_figures_and_nothing_hangs(pair: Pair) -> None:
    pair.limit(2 * EXTENT)
    until(lambda: member(pair.ledger, NAME).limits_followed, "the ceiling followed")
    time.sleep(0.1)
    started = time.monotonic()
    [large] = pair.elastic.generate(prompts(1, 800, seed=60), 100)
    assert time.monotonic() - started < 5
    assert (large.finish, large.tokens) == ("error", [])
    assert "The prompt of 800 tokens and an answer do not fit: the ceiling of this engine's KV cache allows 480" in (
        pair.elastic.log_text()
    )
    [chat] = pair.elastic.generate(prompts(1, 400, seed=60), 600)
    assert (chat.finish, len(chat.tokens)) == ("length", 80)
    pair.check_equal(prompts(2, 100, seed=61), 16)


def test_a_ceiling_lowered_below_what_a_request_needs_makes_it_wait_and_says_so(pair: Pair) -> None:
    """Preempted, never killed; it goes on when the ceiling is raised, and the wait takes no processor time."""
    requests = prompts(1, 700, seed=62)
    pair.native.ask("generate", prompts=requests, max_tokens=320)
    pair.elastic.ask("generate", prompts=requests, max_tokens=320)
    until(lambda: member(pair.ledger, NAME).in_use_bytes > 2 * EXTENT, "load")
    pair.limit(2 * EXTENT)
    until(
        lambda: "Nothing has run for 5 s for want of memory: the first request needs" in pair.elastic.log_text(), "it"
    )
    began, used = time.monotonic(), pair.elastic.cpu_seconds()
    time.sleep(1)
    assert pair.elastic.cpu_seconds() - used < 0.5 * (time.monotonic() - began)
    pair.limit(BUDGET)
    assert pair.elastic.answer()[0]["tokens"] == pair.native.answer()[0]["tokens"]


def test_the_agent_holds_the_scheduler_up_for_about_a_millisecond(pair: Pair) -> None:
    pair.check_equal(prompts(16, 600, seed=70), 64)
    pair.limit(4 * EXTENT)
    until(lambda: pair.resident_bytes <= 4 * EXTENT, "the ceiling followed")
    statistics = pair.elastic.do("agent")
    print(f"agent: {statistics}")
    assert statistics["longest_hold_seconds"] < 0.05  # it may lose the processor while it holds the lock
