"""A vLLM and an SGLang engine on one host budget that neither could fill alone: memory moves both ways."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvcached_core.ledger import Ledger

from tests.sglang.engine import MIB, Engine, VllmNeighbour, members, prompts, until
from tests.sglang.pair import BUDGET, settings

VARIABLE = "KVC_TEST_VLLM_PYTHON"
MAX_TOKENS = 8


@pytest.fixture
def vllm_python() -> str:
    """The interpreter of vLLM's environment."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} does not name an interpreter with vLLM; `nox -s sglang` sets it")
    return python


def test_memory_moves_between_the_two_engines(gqa_model: Path, vllm_python: str, tmp_path: Path, runtime_dir: Path):
    sglang = Engine(gqa_model, tmp_path / "sglang.log", settings(runtime_dir, "sglang"))
    vllm = VllmNeighbour(
        vllm_python,
        gqa_model,
        tmp_path / "vllm.log",
        settings(runtime_dir, "vllm"),
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=512,
    )
    try:
        sglang.wait_ready()
        vllm.wait_ready()
        ledger = Ledger.open("host", None, runtime_dir=runtime_dir)

        def resident(name: str) -> int:
            return members(ledger, name)[0].resident_bytes

        requests = prompts(14, 900, seed=1)
        first = [each.tokens for each in sglang.generate(requests, MAX_TOKENS)]
        filled = resident("sglang")
        assert filled > 0.6 * BUDGET

        vllm.generate(prompts(14, 900, seed=2), MAX_TOKENS)
        assert resident("vllm") > 0.6 * BUDGET - 4 * MIB
        assert resident("sglang") < filled - 16 * MIB
        assert resident("vllm") + resident("sglang") <= BUDGET

        given = resident("vllm")
        again = [each.tokens for each in sglang.generate(requests, MAX_TOKENS)]
        assert again == first
        assert resident("sglang") > 0.4 * BUDGET
        assert resident("vllm") < given
        assert resident("vllm") + resident("sglang") <= BUDGET

        vllm.stop()
        sglang.stop()
        until(lambda: ledger.snapshot().members == (), "the ledger empty after both engines ended")
        ledger.close()
    finally:
        sglang.kill()
        vllm.kill()
