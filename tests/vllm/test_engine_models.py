"""Models whose layers keep KV unlike one another: sliding windows beside full attention, and layers that share KV.

For each an elastic engine against the stock one, started once. Twelve extents of these models hold about 3000 tokens of
the layers with full attention, and the windows' tokens.
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

    def check_equal(self, requests: list[list[int]], max_tokens: int) -> list[list[int]]:
        native, elastic = together([self.native, self.elastic], requests, max_tokens)
        assert elastic == native
        return elastic

    @property
    def resident_bytes(self) -> int:
        return member(self.ledger, NAME).resident_bytes

    @property
    def extent_bytes(self) -> int:
        """What an idle engine with an empty cache holds: the extent of the null block."""
        self.elastic.do("reset_prefix_cache")
        until(lambda: self.resident_bytes < 4 * MIB, "memory back")
        return self.resident_bytes


@pytest.fixture(scope="module", params=["tiny_gemma3", "tiny_gemma3n"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, module_runtime_dir: Path
) -> Iterator[Pair]:
    model, logs = request.getfixturevalue(request.param), tmp_path_factory.mktemp(request.param)
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
        yield Pair(native, elastic, ledger)
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
    pair.ledger.set_limits(NAME, ceiling_bytes=ceiling, floor_bytes=0)
    before = pair.elastic.num_preemptions()
    pair.check_equal(prompts(16, 150, seed=4), 250)
    assert pair.elastic.num_preemptions() > before
    pair.check_equal(prompts(6, 600, seed=5), 16)
    pair.check_equal(prompts(16, 150, seed=4)[:4], 16)
    assert pair.resident_bytes <= ceiling
    pair.ledger.set_limits(NAME, ceiling_bytes=BUDGET)


def test_a_request_that_fits_only_because_of_its_windows_is_not_refused(pair: Pair) -> None:
    [line] = [line for line in pair.elastic.log_text().splitlines() if "kvcached 0" in line]
    floor = float(line.partition("floor ")[2].split()[0]) * MIB
    pair.ledger.set_limits(NAME, ceiling_bytes=int(floor), floor_bytes=0)
    until(lambda: member(pair.ledger, NAME).limits_followed, "the ceiling followed")
    pair.check_equal(prompts(1, 950, seed=6), 32)
    assert pair.resident_bytes <= floor
    pair.ledger.set_limits(NAME, ceiling_bytes=BUDGET)


def test_memory_returns_after_the_cache_was_reset_with_no_further_request(pair: Pair) -> None:
    extent_bytes = pair.extent_bytes
    pair.elastic.generate(prompts(8, 800, seed=7), 8)
    assert pair.resident_bytes >= 4 * extent_bytes
    pair.elastic.do("reset_prefix_cache")
    until(lambda: pair.resident_bytes <= 2 * extent_bytes, "memory back")
