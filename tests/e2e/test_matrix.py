"""The matrix's order of work, and one real case of it from end to end."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cases import gpu_cases
from tests.e2e.matrix import Matrix, main
from tests.e2e.run import Mode

CASES = gpu_cases()[:3]


class Runs:
    """Stands in for servers: notes who runs when."""

    def __init__(self, seconds: float = 0.02) -> None:
        self.started: list[tuple[str, Mode]] = []
        self.ended: list[tuple[str, Mode]] = []
        self._seconds = seconds
        self._lock = threading.Lock()

    def __call__(self, case: Any, mode: Mode) -> dict[str, Any]:
        with self._lock:
            assert mode == "native" or (case.name, "native") in self.ended
            self.started.append((case.name, mode))
        time.sleep(self._seconds)
        with self._lock:
            self.ended.append((case.name, mode))
        return {
            "case": case.name,
            "mode": mode,
            "ready_error": "no server",
            "exit": {"seconds": 0, "code": 0, "left": []},
            "error_signatures": [],
            "active_line": "",
            "left_on_device": None,
            "members_after_exit": [],
        }


def test_a_case_is_complete_before_the_next_begins(tmp_path: Path) -> None:
    runs = Runs()
    Matrix(runs, tmp_path).run(CASES, parallel=1, budget_seconds=60)
    assert runs.started == [(case.name, mode) for case in CASES for mode in ("native", "elastic")]


def test_side_by_side_an_elastic_server_never_starts_before_its_native_one_has_ended(tmp_path: Path) -> None:
    runs = Runs()
    matrix = Matrix(runs, tmp_path)
    matrix.run(CASES, parallel=4, budget_seconds=60)
    assert len(runs.ended) == 6
    assert not matrix.missing(CASES)


def test_what_is_complete_is_not_run_again(tmp_path: Path) -> None:
    Matrix(Runs(), tmp_path).run(CASES[:1], parallel=2, budget_seconds=60)
    again = Runs()
    Matrix(again, tmp_path).run(CASES, parallel=2, budget_seconds=60)
    assert {name for name, _ in again.started} == {case.name for case in CASES[1:]}


def test_nothing_is_started_that_would_end_after_the_budget(tmp_path: Path) -> None:
    runs = Runs(seconds=0.3)
    matrix = Matrix(runs, tmp_path)
    matrix.run(CASES, parallel=1, budget_seconds=0.7)
    assert len(runs.ended) == 2
    assert len(matrix.missing(CASES)) == 4


def test_an_unknown_pattern_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cases", "vllm-nothing", "--out", str(tmp_path)]) == 2
    assert "vllm-nothing" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_real_server_passes_every_check_on_a_cpu(tmp_path: Path, runtime_dir: Path) -> None:
    words = ["--vllm", sys.executable, "--cpu", "--cases", "vllm-gqa-cpu", "--models", str(tmp_path / "models")]
    code = main([*words, "--runtime-dir", str(runtime_dir), "--out", str(tmp_path / "out")])
    assert code == 0, (tmp_path / "out" / "report.md").read_text()
    (case,) = json.loads((tmp_path / "out" / "report.json").read_text())["cases"].values()
    passed = {check["name"] for check in case if check["outcome"] == "pass"}
    assert passed >= {"gen_seq_tokens_equal", "apc_2_cached_tokens_equal", "memory_returns_after_reset"}
