"""The matrix's verdicts: each check passes on a good pair of runs and fails on the one thing it is about."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvcached_core.config import Settings

from tests.e2e.cases import cpu_cases, gpu_cases, select
from tests.e2e.checks import Check, Outcome, check_case
from tests.e2e.report import read_records, write_report
from tests.e2e.run import Place, settings_of
from tests.models.families import MATRIX_FAMILIES

MIB = 1 << 20
CASE = gpu_cases()[0]


def answers(phase: str) -> list[dict[str, Any]]:
    return [{"prompt": f"p{n}", "tokens": [n, len(phase), 7], "cached_tokens": 16 * n, "error": ""} for n in range(3)]


def run(mode: str) -> dict[str, Any]:
    phases = ("gen_seq", "gen_conc", "apc_0", "apc_1", "apc_2", "apc_conc", "fill")
    one_pass = {phase: answers(phase) for phase in phases}
    member = {"name": CASE.name, "device": "GPU-1", "lease_bytes": 96 * MIB}
    memory = (
        {"ready": 32, "full": 256, "after_reset": 64}
        if mode == "elastic"
        else dict.fromkeys(("ready", "full", "after_reset"), 0)
    )
    members = [member] if mode == "elastic" else []
    return {
        "case": CASE.name,
        "mode": mode,
        "engine": "vllm",
        "release": "0.33.0",
        "command": ["python", "-m", "vllm"],
        "variables": {"A": "1"},
        "ready_seconds": 40.0,
        "passes": [copy.deepcopy(one_pass) for _ in range(2 if mode == "native" else 1)],
        "resets": [True, True],
        "readings": {
            moment: {"resident_bytes": mib * MIB, "driver_bytes": (1000 + mib) * MIB, "members": members}
            for moment, mib in memory.items()
        },
        "alive_after_load": True,
        "exit": {"seconds": 2.0, "code": 0, "left": []},
        "left_on_device": [],
        "members_after_exit": [],
        "active_line": "kvcached 0.1.0 is on: …" if mode == "elastic" else "",
        "layout": "BLNHC",
        "error_signatures": [],
    }


def failed(native: dict[str, Any], elastic: dict[str, Any]) -> list[Check]:
    return [check for check in check_case(native, elastic) if check.outcome is Outcome.FAIL]


def test_two_good_runs_pass_every_check() -> None:
    checks = check_case(run("native"), run("elastic"))
    assert {check.outcome for check in checks} == {Outcome.PASS}
    assert {check.name for check in checks} >= {
        "server_ready",
        "gen_seq_ok",
        "prefix_cache_reset",
        "kvcached_active",
        "kvcached_inactive",
        "gen_seq_tokens_equal",
        "apc_2_tokens_equal",
        "apc_2_cached_tokens_equal",
        "memory_returns_after_reset",
        "ledger_empty_after_exit",
        "no_gpu_process_left",
        "clean_exit_on_signal",
    }


def set_token(record: dict[str, Any]) -> None:
    record["passes"][0]["apc_1"][2]["tokens"][1] = 99


def set_path(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        for step in path[:-1]:
            record = record[step]
        record[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (set_token, "apc_1_tokens_equal"),
        (set_path("passes", 0, "apc_0", 1, "cached_tokens", to=0), "apc_0_cached_tokens_equal"),
        (set_path("passes", 0, "gen_conc", 0, "error", to="HTTP 500"), "gen_conc_ok"),
        (set_path("resets", 0, to=False), "prefix_cache_reset"),
        (set_path("alive_after_load", to=False), "server_alive_after_load"),
        (set_path("exit", "left", to=["12 worker"]), "clean_exit_on_signal"),
        (set_path("exit", "code", to=-11), "clean_exit_on_signal"),
        (set_path("error_signatures", to=["CUDA error: …"]), "no_error_signatures"),
        (set_path("active_line", to=""), "kvcached_active"),
        (set_path("readings", "ready", "members", to=[]), "kvcached_active"),
        (set_path("left_on_device", to=[12]), "no_gpu_process_left"),
        (set_path("members_after_exit", to=["x on GPU-1"]), "ledger_empty_after_exit"),
        (set_path("readings", "after_reset", "resident_bytes", to=128 * MIB), "memory_returns_after_reset"),
        (set_path("readings", "full", "resident_bytes", to=32 * MIB), "memory_returns_after_reset"),
        (set_path("readings", "after_reset", "driver_bytes", to=1256 * MIB), "memory_returns_after_reset"),
    ],
)
def test_each_fault_fails_its_check_alone(change: Callable[[dict[str, Any]], None], name: str) -> None:
    elastic = run("elastic")
    change(elastic)
    assert [check.name for check in failed(run("native"), elastic)] == [name]


def test_a_native_engine_with_kvcached_in_it_is_found() -> None:
    native = run("native")
    native["active_line"] = "kvcached 0.1.0 is on: …"
    assert [(check.name, check.of) for check in failed(native, run("elastic"))] == [("kvcached_inactive", "native")]


def test_tokens_are_asked_only_where_native_repeats_itself() -> None:
    native, elastic = run("native"), run("elastic")
    native["passes"][1]["gen_seq"][0]["tokens"] = [5, 5, 5]
    elastic["passes"][0]["gen_seq"][0]["tokens"] = [6, 6, 6]
    assert not failed(native, elastic)
    for answer in native["passes"][1]["gen_seq"]:
        answer["tokens"] = [5, 5, 5]
    (check,) = [check for check in check_case(native, elastic) if check.name == "gen_seq_tokens_equal"]
    assert check.outcome is Outcome.SKIP
    assert "0 repeated by native" in check.detail


def test_a_difference_is_named_by_prompt_and_place() -> None:
    elastic = run("elastic")
    set_token(elastic)
    (check,) = failed(run("native"), elastic)
    assert "p2 from token 1" in check.detail


def test_a_server_that_never_started_is_a_failure_with_its_reason() -> None:
    elastic = run("elastic")
    for key in ("ready_seconds", "passes", "resets", "readings", "alive_after_load"):
        del elastic[key]
    elastic["ready_error"] = "it ended with code 1 after 3 s"
    first, *_ = failed(run("native"), elastic)
    assert (first.name, first.detail) == ("server_ready", "it ended with code 1 after 3 s")


def test_the_report_names_failures_first_and_cases_not_run(tmp_path: Path) -> None:
    elastic = run("elastic")
    set_token(elastic)
    runs = tmp_path / "runs"
    runs.mkdir()
    for record in (run("native"), elastic):
        (runs / f"{record['mode']}.json").write_text(json.dumps(record))
    cases = select(gpu_cases(), [CASE.name, "vllm-mla-block-tp2"])
    (checks,) = write_report(tmp_path, cases, read_records(runs), {"GPUs": "1"}).values()
    report = (tmp_path / "report.md").read_text()
    assert sum(check.outcome is Outcome.FAIL for check in checks) == 1
    assert report.index("apc_1_tokens_equal") < report.index("## Set-up")
    assert "needs 2 GPUs, 1 here" in report
    assert json.loads((tmp_path / "report.json").read_text())["runs"][0]["passes"]


def test_cases_are_selected_in_the_order_of_the_patterns() -> None:
    names = [case.name for case in select(gpu_cases(), ["sglang-gqa", "vllm-gqa-*", "vllm-gqa-block", "sglang-*"])]
    assert names[:2] == ["sglang-gqa", "vllm-gqa-block"]
    assert len(set(names)) == len(names)
    assert all(name.startswith("sglang") for name in names[names.index("vllm-gqa-profiled") + 1 :])


def test_token_major_is_asked_of_the_elastic_server_alone(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path, tmp_path, tmp_path, {"KVCACHED_GUARD": "0"}, 1.0)
    for family in MATRIX_FAMILIES:
        plain, token = select(gpu_cases(), [f"sglang-{family}", f"sglang-{family}-token"])
        assert (token.flags, token.variables) == (plain.flags, plain.variables)
        settings = settings_of(token, place)
        assert Settings.load(settings).layout == "token-major"
        own = {"KVCACHED_LAYOUT": "token-major", "KVCACHED_NAME": token.name}
        assert settings == settings_of(plain, place) | own


def test_every_case_has_a_name_of_its_own_that_is_a_member_name() -> None:
    names = [case.name for case in (*gpu_cases(), *cpu_cases())]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 55 for name in names)
