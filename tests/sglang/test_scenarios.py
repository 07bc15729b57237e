"""Scenarios of one real engine that starts, sleeps or keeps its cache where memory is short."""

from __future__ import annotations

import time
from pathlib import Path

from kvcached_core.ledger import Ledger

from tests.sglang.engine import MIB, Engine, Result, members, prompts, until
from tests.sglang.neighbour import Neighbour
from tests.sglang.pair import BUDGET, EXTENT, NAME, TOKEN, settings


def resident_bytes(ledger: Ledger) -> int:
    return members(ledger, NAME)[0].resident_bytes


def test_a_cache_bound_of_one_token_leaves_caching_on(gqa_model: Path, tmp_path: Path, runtime_dir: Path):
    """V7: requests that run at once share their prefix, however little stays of it afterwards."""
    engine = Engine(gqa_model, tmp_path / "log", settings(runtime_dir, KVCACHED_CACHE_CEILING=str(TOKEN)))
    try:
        engine.wait_ready()
        ledger = Ledger.open("host", None, runtime_dir=runtime_dir)
        shared = prompts(8, 600, seed=1, shared=500)
        mixed = shared + prompts(12, 300, seed=2) + prompts(2, 1500, seed=3)
        first = engine.generate(mixed, 24)
        assert sum(each.cached >= 490 for each in first) >= 4
        until(lambda: resident_bytes(ledger) <= EXTENT, "the cache dropped", 5.0)
        again = engine.generate(mixed, 24)
        assert [each.tokens for each in again] == [each.tokens for each in first]
        assert sum(each.cached >= 490 for each in again) >= 4
        ledger.close()
    finally:
        engine.kill()


def test_a_cache_bound_is_the_memory_of_an_idle_engine_too(gqa_model: Path, tmp_path: Path, runtime_dir: Path):
    """V3: after mixed load, what stays of the cache is scattered over the extents that held all of it."""
    bound = 2 * MIB
    engine = Engine(gqa_model, tmp_path / "log", settings(runtime_dir, KVCACHED_CACHE_CEILING=str(bound)))
    try:
        engine.wait_ready()
        ledger = Ledger.open("host", None, runtime_dir=runtime_dir)
        sizes = [40, 90, 700, 150, 60, 1500, 300, 80]
        mixed = [prompt for seed, size in enumerate(sizes * 3) for prompt in prompts(1, size, seed=30 + seed)]
        first = engine.generate(mixed, 24)
        until(lambda: resident_bytes(ledger) <= 1.5 * bound, "the cache within its bound", 5.0)
        assert any(each.cached for each in engine.generate(mixed[-2:], 24))  # not all of it went
        assert [each.tokens for each in engine.generate(mixed, 24)] == [each.tokens for each in first]
        ledger.close()
    finally:
        engine.kill()


def test_beside_a_neighbour_that_holds_the_device(gqa_model: Path, tmp_path: Path, runtime_dir: Path):
    """V2: an idle cache makes room for a start. V18: while the engine sleeps, a neighbour takes everything and keeps
    it; what comes waits, in words, and is right once the memory is back.
    """
    ledger = Ledger.open("host", BUDGET, runtime_dir=runtime_dir)
    engine = None
    try:
        with Neighbour(ledger, BUDGET, keeps=False) as neighbour:
            assert neighbour.held_bytes == BUDGET
            engine = Engine(gqa_model, tmp_path / "log", settings(runtime_dir))
            engine.wait_ready()
            request = prompts(1, 400, seed=4)
            expected = [each.tokens for each in engine.generate(request, 24)]
            assert neighbour.held_bytes < BUDGET
        engine.do("release")
        until(lambda: resident_bytes(ledger) <= EXTENT, "memory back after a release")
        with Neighbour(ledger, BUDGET, keeps=True) as neighbour:
            assert neighbour.held_bytes >= BUDGET - MIB
            engine.do("resume")
            engine.ask("generate", prompts=request, max_tokens=24)
            until(lambda: "for want of memory" in engine.log_text(), "words about the wait", 30.0)
            time.sleep(0.2)
            neighbour.give_way()
            assert [Result(**each).tokens for each in engine.answer(30.0)] == expected
    finally:
        if engine is not None:
            engine.kill()
        ledger.close()
