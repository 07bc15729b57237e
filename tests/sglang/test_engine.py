"""One real engine against the stock one: the same tokens whatever happens to its memory.

SGLang's own checks run at every step and end the engine at the first page that is lost, free twice, or free and in use.
A token takes 4 KiB of KV cache. The engines start once and every test leaves its limits as they were, so the order of
tests does not matter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.engine import KIB, MIB, Engine, Result, members, prompts, resident_of_arenas, until
from tests.sglang.pair import BUDGET, CAPACITY, EXTENT, NAME, TOKEN, Pair, settings, started


@pytest.fixture(scope="module")
def pair(gqa_model: Path, tmp_path_factory: pytest.TempPathFactory, module_runtime_dir: Path) -> Iterator[Pair]:
    with started(gqa_model, tmp_path_factory.mktemp("engines"), settings(module_runtime_dir)) as parts:
        yield Pair(*parts)


def test_it_says_that_it_is_on(engines: Pair):
    [line] = [line for line in engines.elastic.log_text().splitlines() if "kvcached 0" in line]
    assert "is on: SGLang 0.5.23, member gqa on host, virtual capacity 57." in line


def test_its_capacity_is_its_own_and_not_what_is_free(engines: Pair):
    assert engines.elastic.do("capacity") == CAPACITY


def test_an_idle_engine_holds_next_to_nothing(engines: Pair):
    engines.reset()
    assert engines.resident_bytes <= EXTENT


def test_plain(engines: Pair):
    engines.check_equal(prompts(6, 50, seed=1) + prompts(2, 700, seed=2), 48)
    engines.reset()


def test_one_at_a_time_and_cached_prefixes(engines: Pair):
    for request in prompts(4, 600, seed=3, shared=500):
        [result] = engines.check_equal([request], 24)
    assert result.cached >= 490
    engines.reset()


def test_cached_prefixes_at_once(engines: Pair):
    engines.check_equal(prompts(1, 500, seed=4), 8)
    results = engines.check_equal(prompts(8, 600, seed=4, shared=500), 24)
    assert all(result.cached >= 490 for result in results)
    engines.reset()


def test_more_than_the_ceiling_holds_waits_and_is_right(engines: Pair):
    """Sixteen requests that need twice what they may have."""
    engines.limit(8 * MIB)
    engines.check_equal(prompts(16, 100, seed=5), 160)
    assert engines.resident_bytes <= 8 * MIB
    engines.reset()


def test_a_ceiling_lowered_under_load_makes_the_engine_retract(engines: Pair):
    """All are running when the ceiling falls below what they hold: SGLang retracts, and every answer is right."""
    requests = prompts(16, 100, seed=23)
    engines.elastic.ask("generate", prompts=requests, max_tokens=200)
    until(lambda: engines.resident_bytes >= 10 * MIB, "all requests running", 60.0)
    engines.limit(5 * MIB)
    until(lambda: engines.resident_bytes <= 5 * MIB, "a lowered ceiling followed under load", 30.0)
    results = [Result(**each) for each in engines.elastic.answer()]
    assert sum(result.retractions for result in results) > 0
    expected = engines.native.generate(requests, 200)
    assert [each.tokens for each in results] == [each.tokens for each in expected]
    engines.reset()


def test_a_cache_larger_than_the_ceiling_is_evicted(engines: Pair):
    engines.limit(6 * MIB)
    for seed in range(6, 12):
        engines.check_equal(prompts(1, 700, seed=seed), 16)
        assert engines.resident_bytes <= 6 * MIB
    engines.reset()


def test_chunked_prompts_at_the_ceiling(engines: Pair):
    """Prompts of three chunks each, that together need more than there is."""
    engines.limit(10 * MIB)
    engines.check_equal(prompts(4, 1400, seed=12), 32)
    engines.reset()


def test_a_prompt_beyond_the_ceiling_is_refused_in_words(engines: Pair):
    """The longest that is not refused is served, though it could generate more than there is room for.

    Of the 1024 tokens that the ceiling holds, one is padding, and four more are what a prompt may take beyond itself.
    """
    engines.limit(4 * MIB)
    longest, too_long = prompts(2, 1019, seed=13)

    def refused() -> bool:  # once the engine has heard of the ceiling
        [result] = engines.elastic.generate([[*too_long, 7]], 1)
        return "takes 1024 tokens of KV cache, and this engine's ceiling leaves 1023" in result.message

    until(refused, "a prompt beyond the ceiling refused")
    engines.check_equal([longest], 4)
    engines.reset()


def test_a_prompt_that_waited_while_the_ceiling_was_lowered_is_refused_and_holds_nobody_up(engines: Pair):
    """The first runs on under the lower ceiling, the second no longer fits, and the third waits behind it."""
    engines.limit(5 * MIB)
    requests = [prompts(1, size, seed=24)[0] for size in (600, 900, 300)]
    engines.elastic.ask("generate", prompts=requests, max_tokens=200)
    until(lambda: engines.resident_bytes >= 600 * TOKEN, "the first running", 60.0)
    engines.limit(3584 * KIB)
    first, second, third = (Result(**each) for each in engines.elastic.answer())
    assert "takes 904 tokens of KV cache, and this engine's ceiling leaves 895" in second.message
    expected = engines.native.generate([requests[0], requests[2]], 200)
    assert [first.tokens, third.tokens] == [each.tokens for each in expected]
    engines.reset()


def test_what_a_request_may_generate_beyond_the_ceiling_does_not_keep_it_waiting(engines: Pair):
    """SGLang clips to the virtual capacity of 14745 tokens; the ceiling leaves 1500."""
    engines.limit(6 * MIB)
    time.sleep(0.2)
    [request] = prompts(1, 300, seed=14)
    [result] = engines.elastic.generate([request], 5000)
    assert result.message.startswith("Out of memory even after retracting all other requests")
    engines.check_equal([request], 200)
    engines.reset()


def test_abort_storms(engines: Pair):
    requests = prompts(24, 120, seed=15)
    expected = engines.native.generate(requests[::2], 40)
    for delay in (0.0, 0.15, 0.5):
        outputs = engines.elastic.do("storm", prompts=requests, max_tokens=40, abort_after_seconds=delay)
        assert [output["tokens"] for output in outputs[::2]] == [result.tokens for result in expected]
    engines.check_equal(requests[:4], 24)
    engines.reset()


def test_memory_is_really_unmapped_after_a_flush(engines: Pair):
    pid = members(engines.ledger, NAME)[0].pid
    engines.check_equal(prompts(10, 600, seed=16), 16)
    time.sleep(1.0)  # what is surplus has left
    held = engines.resident_bytes
    assert held >= 20 * MIB
    assert resident_of_arenas(pid) == held
    engines.reset()
    # The ledger counts pages down before the kernel has taken them back, never after.
    until(lambda: resident_of_arenas(pid) == engines.resident_bytes == EXTENT, "unmapped pages")


def test_a_ceiling_lowered_while_idle_is_followed_with_no_request(engines: Pair):
    engines.check_equal(prompts(10, 600, seed=17), 16)
    assert engines.resident_bytes >= 10 * MIB
    engines.limit(5 * MIB)
    assert until(lambda: engines.resident_bytes <= 5 * MIB, "a lowered ceiling followed") < 2.0
    engines.check_equal(prompts(10, 600, seed=17)[:1], 16)
    engines.reset()


def test_releasing_and_resuming_twenty_times(engines: Pair):
    request = prompts(1, 400, seed=18)
    expected = [result.tokens for result in engines.native.generate(request, 24)]
    for _ in range(20):
        assert [result.tokens for result in engines.elastic.generate(request, 24)] == expected
        engines.elastic.do("release")
        until(lambda: engines.resident_bytes <= MIB, "memory back after a release")
        engines.elastic.do("resume")
    engines.reset()


def test_usage_means_used_of_what_can_be_had(engines: Pair):
    engines.limit(4 * MIB)
    engines.elastic.generate(prompts(12, 100, seed=19), 120)
    usages = [
        float(line.split("token usage: ")[1].split(",")[0])
        for line in engines.elastic.log_text().splitlines()
        if "Decode batch" in line and "token usage: " in line
    ]
    assert 0.7 < max(usages) <= 1.0
    engines.reset()


def test_a_neighbour_of_the_same_flags_has_the_same_capacity_and_memory_moves_both_ways(
    engines: Pair, gqa_model: Path, tmp_path: Path, module_runtime_dir: Path
):
    """V19, and two engines that neither could fill their budget alone."""
    engines.check_equal(prompts(14, 900, seed=20), 8)
    assert engines.resident_bytes > BUDGET * 0.6
    neighbour = Engine(gqa_model, tmp_path / "neighbour.log", settings(module_runtime_dir, "neighbour"))
    try:
        neighbour.wait_ready()
        assert neighbour.do("capacity") == CAPACITY
        [slot] = members(engines.ledger, "neighbour")
        requests = prompts(12, 900, seed=21)
        expected = engines.native.generate(requests, 8)
        assert [each.tokens for each in neighbour.generate(requests, 8)] == [each.tokens for each in expected]
        [slot] = members(engines.ledger, "neighbour")
        assert slot.resident_bytes > BUDGET * 0.4
        assert slot.resident_bytes + engines.resident_bytes <= BUDGET
        engines.check_equal(prompts(12, 900, seed=22), 8)
        [slot] = members(engines.ledger, "neighbour")
        assert engines.resident_bytes > BUDGET * 0.4
        assert slot.resident_bytes + engines.resident_bytes <= BUDGET
        neighbour.stop()
    finally:
        neighbour.kill()
    until(lambda: not members(engines.ledger, "neighbour"), "the neighbour out of the ledger", 5.0)
    engines.reset()
