"""Two tensor-parallel ranks whose ledgers let them have different amounts: the smaller one decides, on both.

The ranks are two processes, each with its own slot of the ledger, half of the KV heads, and a ceiling of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.engine import KIB, MIB, members, prompts, until
from tests.sglang.pair import Engines, started

NAME = "ranks"
BUDGET = 64 * MIB
TOKEN = 2 * KIB  # a rank has one of two KV heads
CEILINGS = (24 * MIB, 6 * MIB)
FLAGS = {"tp_size": 2, "max_total_tokens": 12000}


class Ranks(Engines):
    """Engines of two ranks each."""

    @property
    def resident_bytes(self) -> list[int]:
        return [each.resident_bytes for each in members(self.ledger, NAME)]

    def reset(self) -> None:
        self.flush()
        until(lambda: max(self.resident_bytes) <= MIB, "memory back on both ranks", 60.0)


@pytest.fixture(scope="module")
def engines(gqa_model: Path, tmp_path_factory: pytest.TempPathFactory, module_runtime_dir: Path) -> Iterator[Ranks]:
    logs = tmp_path_factory.mktemp("ranks")
    settings = {
        "KVCACHED_STRICT": "1",
        "KVCACHED_NAME": NAME,
        "KVCACHED_HOST_BUDGET": str(BUDGET),
        "KVCACHED_PAGE_SIZE": str(16 * KIB),
        "KVCACHED_RUNTIME_DIR": str(module_runtime_dir),
    }
    ranks = [{"KVCACHED_CEILING": str(ceiling)} for ceiling in CEILINGS]
    with started(gqa_model, logs, settings, ranks=ranks, **FLAGS) as parts:
        yield Ranks(*parts)


def test_both_ranks_are_one_member(engines: Ranks):
    first, second = members(engines.ledger, NAME)
    assert first.member_id == second.member_id
    assert [first.rank, second.rank] == [0, 1]
    assert first.pid != second.pid


def test_tokens_are_equal(engines: Ranks):
    engines.check_equal(prompts(6, 80, seed=1), 32)
    engines.reset()


def test_both_ranks_stop_at_the_smaller_ceiling(engines: Ranks):
    """Together the requests need twice what the second rank may have; the first could have it all."""
    engines.check_equal(prompts(16, 200, seed=2), 48)
    first, second = engines.resident_bytes
    assert first == second
    assert CEILINGS[1] * 0.8 <= second <= CEILINGS[1]
    engines.reset()


def test_cached_prefixes_and_chunked_prompts(engines: Ranks):
    for request in prompts(3, 1300, seed=3, shared=1200):
        [result] = engines.check_equal([request], 16)
    assert result.cached >= 1190
    engines.reset()


def test_abort_storms_leave_the_ranks_together(engines: Ranks):
    requests = prompts(16, 100, seed=4)
    expected = engines.native.generate(requests[::2], 40)
    for delay in (0.0, 0.3):
        outputs = engines.elastic.do("storm", prompts=requests, max_tokens=40, abort_after_seconds=delay)
        assert [output["tokens"] for output in outputs[::2]] == [result.tokens for result in expected]
    # Each rank's thread carries its orders out when it gets a processor.
    until(lambda: len(set(engines.resident_bytes)) == 1, "the same resident on both ranks")
    engines.reset()
