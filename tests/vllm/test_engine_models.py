"""Models whose layers keep KV unlike one another: sliding windows beside full attention, and layers that share KV.

For each an elastic engine against the stock one, started once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvcached_core.ledger import Ledger

from tests.vllm.engine import MIB, Engine, member, prompts, together, until

NAME = "hybrid"
BUDGET = 64 * MIB
FLAGS = {"max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 256}


@dataclass
class Pair:
    native: Engine
    elastic: Engine
    ledger: Ledger
    extent_bytes: int

    def check_equal(self, requests: list[list[int]], max_tokens: int) -> list[list[int]]:
        native, elastic = together([self.native, self.elastic], requests, max_tokens)
        assert elastic == native
        return elastic

    @property
    def resident_bytes(self) -> int:
        return member(self.ledger, NAME).resident_bytes

    def drop_cache(self) -> None:
        self.elastic.do("reset_prefix_cache")
        until(lambda: self.resident_bytes <= 2 * self.extent_bytes, "memory back")


# An extent is 16 blocks of 32 tokens; gemma3 keeps two layers of KV in each of its three groups, gemma3n one.
@pytest.fixture(scope="module", params=[("tiny_gemma3", MIB), ("tiny_gemma3n", MIB // 2)], ids=lambda param: param[0])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, module_runtime_dir: Path
) -> Iterator[Pair]:
    name, extent_bytes = request.param
    model, logs = request.getfixturevalue(name), tmp_path_factory.mktemp(name)
    settings = {
        "KVCACHED_STRICT": "1",
        "KVCACHED_NAME": NAME,
        "KVCACHED_HOST_BUDGET": str(BUDGET),
        "KVCACHED_PAGE_SIZE": str(MIB // 2),
        "KVCACHED_RUNTIME_DIR": str(module_runtime_dir),
    }
    native = Engine(model, logs / "native.log", None, kv_cache_memory_bytes=BUDGET, **FLAGS)
    elastic = Engine(model, logs / "elastic.log", settings, **FLAGS)
    try:
        native.wait_ready()
        elastic.wait_ready()
        ledger = Ledger.open("host", None, runtime_dir=module_runtime_dir)
        yield Pair(native, elastic, ledger, extent_bytes)
        ledger.close()
    finally:
        native.kill()
        elastic.kill()


def test_tokens_are_the_stock_engines(pair: Pair) -> None:
    pair.check_equal(prompts(8, 120, seed=1), 24)
    pair.check_equal(prompts(4, 700, seed=2), 24)


def test_one_long_prompt_four_times_gives_one_answer(pair: Pair) -> None:
    """V9: the prefix cache's blocks of a sliding window are not there any more when the prompt comes again."""
    [prompt] = prompts(1, 900, seed=3)
    answers = [pair.check_equal([prompt], 32) for _ in range(4)]
    assert answers == [answers[0]] * 4


def test_requests_are_preempted_and_prefixes_evicted_where_the_ceiling_is_twelve_extents(pair: Pair) -> None:
    ceiling = 12 * pair.extent_bytes
    pair.drop_cache()
    pair.ledger.set_limits(NAME, ceiling_bytes=ceiling, floor_bytes=0)
    before = pair.elastic.num_preemptions()
    pair.check_equal(prompts(16, 150, seed=4), 250)
    assert pair.elastic.num_preemptions() > before
    pair.check_equal(prompts(6, 600, seed=5), 16)
    pair.check_equal(prompts(16, 150, seed=4)[:4], 16)
    assert pair.resident_bytes <= ceiling
    pair.ledger.set_limits(NAME, ceiling_bytes=BUDGET)


def test_a_request_that_fits_only_because_of_its_windows_is_not_refused(pair: Pair) -> None:
    """The prompt has 31 blocks in each of three groups; two of them hold at most 13 at a time. Here are 80."""
    pair.ledger.set_limits(NAME, ceiling_bytes=5 * pair.extent_bytes, floor_bytes=0)
    until(lambda: member(pair.ledger, NAME).limits_followed, "the ceiling followed")
    pair.check_equal(prompts(1, 950, seed=6), 32)
    assert pair.resident_bytes <= 5 * pair.extent_bytes
    pair.ledger.set_limits(NAME, ceiling_bytes=BUDGET)


def test_memory_returns_after_the_cache_was_reset_with_no_further_request(pair: Pair) -> None:
    pair.drop_cache()
    pair.elastic.generate(prompts(8, 800, seed=7), 8)
    assert pair.resident_bytes > 8 * pair.extent_bytes
    pair.drop_cache()
