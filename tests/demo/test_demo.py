"""The demo's own machinery, with stand-ins for the server; and once, small, the whole of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from demo.course import Course, Span
from demo.engine import Answer, Engine, EngineError
from demo.memory import Sample
from demo.reference import Reference, Tokens, reference
from demo.result import conclude
from demo.workload import FULL, MIB, QUICK, Phase, Request, phases

ROOT = Path(__file__).parents[2]

FakeServer = Callable[[str], None]


@pytest.fixture
def fake_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """Puts a program of this body on PATH as ``vllm``."""

    def install(body: str) -> None:
        program = tmp_path / "bin" / "vllm"
        program.parent.mkdir()
        program.write_text(f"#!{sys.executable}\nimport os, signal, subprocess, sys, time\n{body}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")

    return install


def _engine(folder: Path) -> Engine:
    return Engine("A", Path("/model"), [], folder=folder, log=folder / "A.log", environ={})


# --- what is asked ---


@pytest.mark.parametrize("scale", [FULL, QUICK])
def test_no_two_prompts_begin_alike(scale):
    prompts = [request.prompt for phase in phases(scale) for request in phase.requests]
    assert len({prompt[:15] for prompt in prompts}) == len(prompts)


def test_the_same_is_asked_every_time():
    assert phases(QUICK) == phases(QUICK)


# --- the native tokens ---


def test_kept_tokens_that_are_not_those_of_now_are_replaced(tmp_path, monkeypatch):
    """A kept file may come from a processor of the same names whose kernels add in another order."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, asked = Path("/models/one"), [_phase("p")]
    reference(model, [], asked, run=lambda: {"A1": [1]})
    kept = reference(model, [], asked, run=dict)
    assert kept.differing({"A1": [2]}) == ["A1"]
    anew = reference(model, [], asked, run=lambda: {"A1": [2]}, anew=True)
    assert (anew.kept, anew.differing({"A1": [2]})) == (False, [])
    assert reference(model, [], asked, run=dict).tokens == {"A1": [2]}


def _phase(prompt: str) -> Phase:
    return Phase("A loaded", (Request("A", 1, prompt, 8),))


def test_native_tokens_are_kept_for_the_same_question_only(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runs: list[Tokens] = []

    def run() -> Tokens:
        runs.append({"A1": [len(runs)]})
        return runs[-1]

    model = Path("/models/one")
    first = reference(model, ["--flag"], [_phase("p")], run=run)
    again = reference(model, ["--flag"], [_phase("p")], run=run)
    assert (first.kept, again.kept, again.tokens) == (False, True, first.tokens)
    for other in ((Path("/models/two"), ["--flag"], "p"), (model, [], "p"), (model, ["--flag"], "q")):
        assert not reference(other[0], other[1], [_phase(other[2])], run=run).kept
    assert len(runs) == 4


# --- the judgement ---


def _course(tokens: dict[str, tuple[int, ...]]) -> Course:
    titles = ("A loaded", "A idle", "B loaded", "both", "caches dropped")
    spans = [Span(title, 10.0 * place, 10.0 * (place + 1)) for place, title in enumerate(titles)]
    answers = [Answer(Request(name[0], int(name[1:]), "", 1), ids, "", 0.0, 1.0) for name, ids in tokens.items()]
    return Course(spans, answers)


def _samples() -> list[Sample]:
    """A fills 300 of 320 MiB, falls to 40 beside B's 280, shares by halves, and both give back."""
    course = ((5, 300, 4), (15, 300, 4), (21, 300, 20), (22, 200, 120), (29, 40, 280), (39, 160, 160), (49, 4, 4))
    return [Sample(float(at), {"A": a * MIB, "B": b * MIB}) for at, a, b in course]


def test_what_b_held_beyond_what_was_free_at_as_peak_is_reused():
    native = Reference("key", {"A1": [1], "B1": [2]}, kept=True)
    result = conclude(FULL, _course({"A1": (1,), "B1": (2,)}), _samples(), native)
    assert result.good
    assert result.b_reused_bytes == (280 - 20) * MIB
    assert result.a_bytes_kept_beside_b == 40 * MIB
    assert result.seconds_to_first_return == 2.0
    assert result.engines["A"].peak_resident_bytes == 300 * MIB
    assert result.engines["A"].resident_bytes_after_trim == 4 * MIB


def test_one_different_token_fails_it():
    native = Reference("key", {"A1": [1], "B1": [3]}, kept=True)
    result = conclude(FULL, _course({"A1": (1,), "B1": (2,)}), _samples(), native)
    assert (result.tokens_equal, result.differing, result.good) == (False, ["B1"], False)


SHARED = "A shared with B while both were loaded"


def test_memory_is_shared_while_both_are_loaded_and_not_after_one_has_ended():
    """Whose requests have all ended is idle, and the other may take all that it has cached."""
    course = _course({})
    for engine, ended in (("A", 39.0), ("B", 34.0)):
        course.answers.append(Answer(Request(engine, 1, "", 1), (1,), "", 30.0, ended))
    native = Reference("key", {"A1": [1], "B1": [1]}, kept=True)
    before, after = Sample(33.0, {"A": 200 * MIB, "B": 110 * MIB}), Sample(39.5, {"A": 310 * MIB, "B": 4 * MIB})
    *others, _, last = _samples()
    assert conclude(FULL, course, [*others, before, after, last], native).checks[SHARED]
    too_late = replace(before, time=35.0)
    assert not conclude(FULL, course, [*others, too_late, after, last], native).checks[SHARED]


def test_memory_beyond_the_budget_fails_it():
    samples = [*_samples()[:4], Sample(25.0, {"A": 200 * MIB, "B": 121 * MIB}), *_samples()[4:]]
    result = conclude(FULL, _course({}), samples, Reference("key", {}, kept=True))
    assert not result.checks["the budget was never exceeded"]
    assert not result.good


# --- servers ---


def test_a_server_that_ends_at_its_start_is_named_with_the_end_of_its_log(fake_server, tmp_path):
    fake_server("print('no such model'); sys.exit(3)")
    engine = _engine(tmp_path)
    with pytest.raises(EngineError, match=r"(?s)server A ended with 3 at its start.*no such model"):
        engine.wait_ready()
    engine.stop()


def test_stopping_ends_a_child_that_ignores_signals(fake_server, tmp_path, monkeypatch):
    monkeypatch.setattr("demo.engine.HELPERS_SECONDS", 0.2)
    fake_server(
        "child = subprocess.Popen(['sleep', '600'], preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))\n"
        "print(child.pid, flush=True)\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(0))\n"
        "time.sleep(600)"
    )
    engine = _engine(tmp_path)
    child = int(_wait_for_text(engine.log))
    engine.stop()
    _wait_for(lambda: not _runs(child))


def test_an_interrupt_stops_the_servers_and_leaves_nothing(fake_server, tmp_path):
    fake_server(
        "import tempfile; _, kept = tempfile.mkstemp()\n"
        "print(os.getpid(), sys.argv[sys.argv.index('--uds') + 1], kept, flush=True); time.sleep(600)"
    )
    output = tmp_path / "out"
    command = [sys.executable, "-m", "demo", "--quick", "--model", "/model", "--output", str(output)]
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    demo = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)
    started = [_wait_for_text(output / f"native-{name}.log").split() for name in "AB"]
    demo.send_signal(signal.SIGTERM)
    said, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130, said
    assert "nothing is left" in said
    for pid, socket, kept in started:
        assert not _runs(int(pid))
        assert not Path(socket).parent.exists()
        assert not Path(kept).exists()


def _wait_for_text(file: Path) -> str:
    _wait_for(lambda: file.exists() and file.read_text().endswith("\n"))
    return file.read_text()


def _wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- the whole ---


@pytest.mark.slow
def test_two_real_servers_share_a_budget_with_the_native_tokens(tiny_llama, tmp_path):
    command = [sys.executable, "-m", "demo", "--quick", "--model", str(tiny_llama), "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert (tmp_path / "result.json").exists(), done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert [claim for claim, holds in result["checks"].items() if not holds] == [], done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
    assert result["tokens_equal"]
    assert result["b_reused_bytes"] > 0
    assert result["peak_total_bytes"] <= result["budget_bytes"]
    assert (tmp_path / "memory.png").stat().st_size > 10_000
