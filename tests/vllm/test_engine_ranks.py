"""Two tensor-parallel ranks in processes of their own, orders over sockets: the same tokens, and one rank's failures.

The tests run in this order; the last one ends the engine.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvcached_core.ledger import Ledger
from kvcached_core.ledger_statistics import MemberStatistics

from tests.vllm import watched_backend
from tests.vllm.engine import MIB, Engine, EngineDied, prompts, together, until

BUDGET = 96 * MIB
FLAGS = {"tensor_parallel_size": 2, "max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 512}
EXTENT = MIB // 2
"""Of one rank: half of the layers' heads for 8 blocks of 32 tokens."""


@dataclass
class Pair:
    """The stock engine, the elastic one, the ledger, and the folder through which its backend is disturbed."""

    native: Engine
    elastic: Engine
    ledger: Ledger
    folder: Path

    @property
    def ranks(self) -> list[MemberStatistics]:
        return sorted(self.ledger.snapshot().members, key=lambda member: member.rank)

    def check_equal(self, requests: list[list[int]], max_tokens: int) -> None:
        native, elastic = together([self.native, self.elastic], requests, max_tokens)
        assert elastic == native


@pytest.fixture(scope="module")
def pair(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, module_runtime_dir: Path) -> Iterator[Pair]:
    logs, folder = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("watched")
    layout = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "PYTHONFAULTHANDLER": "1"}
    settings = {
        "KVCACHED_STRICT": "1",
        "KVCACHED_NAME": "tp",
        "KVCACHED_HOST_BUDGET": str(BUDGET),
        "KVCACHED_PAGE_SIZE": str(EXTENT // 4),
        "KVCACHED_RUNTIME_DIR": str(module_runtime_dir),
        **watched_backend.install(folder),
    }
    native = Engine(tiny_llama, logs / "native.log", None, layout, kv_cache_memory_bytes=BUDGET // 2, **FLAGS)
    elastic = Engine(tiny_llama, logs / "elastic.log", settings, layout, **FLAGS)
    try:
        native.wait_ready()
        elastic.wait_ready()
        ledger = Ledger.open("host", None, runtime_dir=module_runtime_dir)
        yield Pair(native, elastic, ledger, folder)
        ledger.close()
    finally:
        native.kill()
        elastic.kill()


def test_both_ranks_are_one_member(pair: Pair) -> None:
    assert [(member.name, member.rank) for member in pair.ranks] == [("tp", 0), ("tp", 1)]
    assert len({member.member_id for member in pair.ranks}) == 1
    assert pair.elastic.log_text().count(" is on: vLLM") == 1


def test_tokens_are_the_stock_engines(pair: Pair) -> None:
    pair.check_equal(prompts(8, 120, seed=1), 24)
    pair.check_equal(prompts(6, 320, seed=2, shared=256), 16)
    pair.check_equal(prompts(6, 320, seed=2, shared=256), 16)


def test_ranks_hold_the_same_and_give_back_the_same(pair: Pair) -> None:
    assert pair.ranks[0].resident_bytes == pair.ranks[1].resident_bytes > 4 * EXTENT
    pair.elastic.do("reset_prefix_cache")
    until(lambda: all(member.resident_bytes <= 2 * EXTENT for member in pair.ranks), "memory of both ranks back")


def test_requests_are_preempted_where_the_ceiling_is_twelve_extents_of_each_rank(pair: Pair) -> None:
    pair.ledger.set_limits("tp", ceiling_bytes=2 * 12 * EXTENT)
    before = pair.elastic.num_preemptions()
    pair.check_equal(prompts(16, 150, seed=3), 250)
    assert pair.elastic.num_preemptions() > before
    assert all(member.resident_bytes <= 12 * EXTENT for member in pair.ranks)
    pair.ledger.set_limits("tp", ceiling_bytes=BUDGET)


def test_no_rank_keeps_a_page_of_an_order_that_one_could_not_carry_out(pair: Pair) -> None:
    """V5, V6: the reason names rank and driver result; both roll back, and the next requests are right."""
    pair.elastic.do("reset_prefix_cache")
    until(lambda: all(member.resident_bytes <= 2 * EXTENT for member in pair.ranks), "memory of both ranks back")
    failed = pair.elastic.do("agent")["failed_orders"]
    fails = pair.folder / f"fail-{pair.ranks[1].pid}"
    fails.write_text("cuMemCreate failed: CUDA_ERROR_UNKNOWN")
    started = time.monotonic()
    pair.elastic.ask("generate", prompts=prompts(8, 600, seed=4), max_tokens=8)
    until(lambda: "rank 1 did not map order" in pair.elastic.log_text(), "the failure in the log", 5)
    assert "cuMemCreate failed: CUDA_ERROR_UNKNOWN" in pair.elastic.log_text()
    print(f"named {time.monotonic() - started:.3f} s after the request")
    until(lambda: pair.ranks[0].resident_bytes == pair.ranks[1].resident_bytes, "rank 0 rolled back", 5)
    fails.unlink()
    elastic = [each["tokens"] for each in pair.elastic.answer()]
    assert elastic == [each.tokens for each in pair.native.generate(prompts(8, 600, seed=4), 8)]
    assert pair.elastic.do("agent")["failed_orders"] > failed
    assert pair.ranks[0].resident_bytes == pair.ranks[1].resident_bytes
    assert pair.ranks[1].create_failures_total > 0
    pair.check_equal(prompts(8, 120, seed=5), 24)


def test_a_skipped_map_kills_the_rank_whose_name_is_said_within_five_seconds(pair: Pair) -> None:
    """Teeth: on the host a block without memory is a fault, as on a GPU. V6: the engine ends and says who was lost."""
    rank = pair.ranks[1]
    (pair.folder / f"skip-{rank.pid}").touch()
    pair.elastic.ask("generate", prompts=prompts(8, 900, seed=6), max_tokens=8)
    until(lambda: len(pair.ranks) < 2, "a rank dead", 30)
    died = time.monotonic()
    until(lambda: "rank 1 is lost" in pair.elastic.log_text(), "the rank named", 5)
    print(f"named {time.monotonic() - died:.3f} s after its death")
    with pytest.raises(EngineDied):
        pair.elastic.answer(60)
    # Either Python's handler of the signal or PyTorch's says so, whichever was set last.
    assert re.search("Segmentation fault|Segfault encountered", pair.elastic.log_text())
    until(lambda: not pair.ranks, "nothing left in the ledger", 10)
