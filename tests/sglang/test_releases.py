"""Every supported release of SGLang, really imported and really run: the same tokens elastic as native.

The other releases than the installed one are unpacked from their wheels, in front of it on the path.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvcached_sglang.placement import LAYER_MAJOR, TOKEN_MAJOR
from kvcached_sglang.releases import STRIDED_BACKENDS, TESTED_RELEASES

from tests.sglang.engine import Engine, prompts
from tests.sglang.pair import CAPACITY, settings

OTHERS = [release for release in TESTED_RELEASES if release != importlib.metadata.version("sglang")]


def unpacked(release: str) -> Path:
    """The release's wheel, unpacked in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcached" / "sglang" / release
    if not (cache / "sglang").is_dir():
        target = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(cache)]
        subprocess.run([*target, f"sglang=={release}"], check=True, timeout=300)
    return cache


CASES = [
    (OTHERS[0], LAYER_MAJOR),
    *(pytest.param(each, LAYER_MAJOR, marks=pytest.mark.slow) for each in OTHERS[1:]),
    *(pytest.param(each, TOKEN_MAJOR, marks=pytest.mark.slow) for each in OTHERS if each in STRIDED_BACKENDS),
]


@pytest.mark.parametrize(("release", "layout"), CASES)
def test_elastic_equals_native(release: str, layout: str, gqa_model: Path, tmp_path: Path, runtime_dir: Path):
    requests = prompts(6, 120, seed=1) + prompts(2, 900, seed=2)
    ours = settings(runtime_dir, KVCACHED_CEILING="6MiB", KVCACHED_LAYOUT=layout)
    tokens = []
    for name, environment in (("native", None), ("elastic", ours)):
        engine = Engine(
            gqa_model,
            tmp_path / f"{name}.log",
            environment,
            python_path=[unpacked(release)],
            **({} if environment else {"max_total_tokens": CAPACITY}),
        )
        try:
            engine.wait_ready()
            tokens.append([each.tokens for each in engine.generate(requests, 32)])
            assert engine.do("flush_cache")
            engine.stop()
        finally:
            engine.kill()
    [line] = [line for line in engine.log_text().splitlines() if f"is on: SGLang {release}" in line]
    assert f"layout {layout} (" in line
    assert tokens[0] == tokens[1]
