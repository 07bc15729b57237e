"""One engine whose backend is watched: what its threads do, a cache bound of one token, and its sudden end.

The tests run in this order; the last one kills the engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvcached_core.ledger import Ledger

from tests.vllm import watched_backend
from tests.vllm.engine import MIB, Engine, member, prompts, until

NAME = "watched"
BUDGET = 64 * MIB
EXTENT = MIB
ONE_TOKEN_BYTES = 4096


@dataclass
class Watched:
    engine: Engine
    ledger: Ledger
    folder: Path

    @property
    def resident_bytes(self) -> int:
        return member(self.ledger, NAME).resident_bytes


@pytest.fixture(scope="module")
def watched(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, module_runtime_dir: Path) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    settings = {
        "KVCACHED_STRICT": "1",
        "KVCACHED_NAME": NAME,
        "KVCACHED_HOST_BUDGET": str(BUDGET),
        "KVCACHED_PAGE_SIZE": str(EXTENT // 4),
        "KVCACHED_CACHE_CEILING": str(ONE_TOKEN_BYTES),
        "KVCACHED_RUNTIME_DIR": str(module_runtime_dir),
        **watched_backend.install(folder),
    }
    engine = Engine(tiny_llama, folder / "log", settings, max_model_len=1024, max_num_seqs=16)
    try:
        engine.wait_ready()
        ledger = Ledger.open("host", None, runtime_dir=module_runtime_dir)
        yield Watched(engine, ledger, folder)
        ledger.close()
    finally:
        engine.kill()


def test_no_step_makes_a_driver_call(watched: Watched) -> None:
    """Memory comes and goes under load, and every call is the agent's thread's."""
    before = len(watched_backend.calls(watched.folder, watched.engine.process.pid))
    for seed in range(3):
        watched.engine.generate(prompts(12, 500, seed=seed), 16)
        until(lambda: watched.resident_bytes <= 2 * EXTENT, "memory back")
    calls = watched_backend.calls(watched.folder, watched.engine.process.pid)[before:]
    assert {call for call, _ in calls} >= {"map", "zero", "unmap", "fence"}
    assert {thread for _, thread in calls} == {"kvcached-agent"}


def test_a_cache_bound_of_one_token_leaves_caching_on(watched: Watched) -> None:
    """V7. Requests that run at once share their prefix; a quiet moment later only the pinned extent is left of it."""
    requests = prompts(20, 320, seed=10, shared=256)
    first = watched.engine.generate(requests, 8)
    assert sum(each.cached >= 256 for each in first) >= 4
    until(lambda: watched.resident_bytes <= EXTENT, "the cache dropped", 5)
    later = watched.engine.generate(requests, 8)
    assert [each.tokens for each in later] == [each.tokens for each in first]


def test_an_engine_killed_while_it_grows_frees_its_lease_at_once(watched: Watched) -> None:
    watched.engine.ask("generate", prompts=prompts(16, 900, seed=20), max_tokens=100)
    until(lambda: member(watched.ledger, NAME).lease_bytes > 4 * EXTENT, "growth")
    killed = time.perf_counter()
    watched.engine.kill()
    until(lambda: watched.ledger.snapshot().unleased_bytes == BUDGET, "the lease free", 2)
    assert watched.ledger.snapshot().members == ()
    print(f"lease free {time.perf_counter() - killed:.3f} s after the kill")
