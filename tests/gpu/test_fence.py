"""Fences, and everything else that another thread does, while a graph is captured."""

from __future__ import annotations

import pytest

from .conftest import RunProgram

pytest.importorskip("torch")


def test_nothing_that_the_backend_does_disturbs_a_capture(run_program: RunProgram) -> None:
    done = run_program("work_during_capture", "all")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "replayed True\n"


def test_a_bare_event_query_would(run_program: RunProgram) -> None:
    done = run_program("work_during_capture", "bare query")
    assert done.stdout.startswith("query ")
    assert "replayed" not in done.stdout
