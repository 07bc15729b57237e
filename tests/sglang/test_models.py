"""What a model and its flags change of the pool: two id spaces, pages of several tokens. Real engines, tokens equal.

Sliding-window attention frees pages while a prompt is still prefilled, so that both spaces run short apart from each
other; pages of several tokens are allocated by SGLang's other allocator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.models.families import make_model
from tests.sglang.engine import KIB, MIB, prompts
from tests.sglang.pair import Pair, settings, started


@dataclass(frozen=True)
class Case:
    """A model, and what of it fits.

    Attributes:
        family: Of ``tests.models.families``.
        layers: How many.
        low_ceiling: Under which sixteen requests of 260 tokens do not fit together, and one of 1400 does.
        flags: Of the engine.
        settings: More settings of the elastic one.
    """

    family: str
    layers: int
    low_ceiling: int
    flags: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)


# An extent is a page then, not one of each tensor: pages that make extents as many tokens long.
TOKEN_MAJOR = {"KVCACHED_LAYOUT": "token-major", "KVCACHED_PAGE_SIZE": str(256 * KIB)}

CASES = [
    pytest.param(Case("window", 6, 8 * MIB), id="window-pool"),
    pytest.param(Case("gqa", 4, 9 * MIB, {"page_size": 16}), id="pages-of-16"),
    pytest.param(Case("gqa", 4, 9 * MIB, {}, TOKEN_MAJOR), id="token-major"),
    pytest.param(Case("window", 6, 8 * MIB, {"page_size": 16}, TOKEN_MAJOR), id="token-major-window-pool-pages-of-16"),
]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def pair(case: Case, tmp_path_factory: pytest.TempPathFactory, module_runtime_dir: Path) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("engines")
    make_model(case.family, folder / "model", num_layers=case.layers)
    with started(folder / "model", folder, settings(module_runtime_dir, **case.settings), **case.flags) as parts:
        yield Pair(*parts)


def test_it_says_which_layout_it_has(engines: Pair, case: Case):
    [line] = [line for line in engines.elastic.log_text().splitlines() if "is on: SGLang" in line]
    assert f"layout {case.settings.get('KVCACHED_LAYOUT', 'layer-major')} (" in line


def test_tokens_are_equal(engines: Pair):
    engines.check_equal(prompts(6, 60, seed=1) + prompts(2, 900, seed=2), 32)
    engines.reset()


def test_one_long_prompt_four_times(engines: Pair):
    """V9: the first time computed, then from the prefix cache."""
    results = [engines.check_equal(prompts(1, 1400, seed=3), 24)[0] for _ in range(4)]
    assert len({tuple(each.tokens) for each in results}) == 1
    assert all(each.cached >= 1300 for each in results[1:])
    engines.reset()


def test_more_than_a_low_ceiling_holds(engines: Pair, case: Case):
    engines.limit(case.low_ceiling)
    engines.check_equal(prompts(16, 100, seed=4) + prompts(2, 1400, seed=5), 160)
    assert engines.resident_bytes <= case.low_ceiling
    engines.reset()


def test_abort_storms(engines: Pair, case: Case):
    engines.limit(case.low_ceiling)
    requests = prompts(24, 200, seed=6)
    expected = engines.native.generate(requests[::2], 40)
    for delay in (0.0, 0.5):
        outputs = engines.elastic.do("storm", prompts=requests, max_tokens=40, abort_after_seconds=delay)
        assert [output["tokens"] for output in outputs[::2]] == [result.tokens for result in expected]
    engines.reset()
