"""Unmapping takes no stream: without a fence it overtakes queued kernels."""

from __future__ import annotations

import pytest

from .conftest import RunProgram

pytest.importorskip("torch")


def test_unmap_does_not_wait_for_a_queued_kernel(run_program: RunProgram) -> None:
    done = run_program("unmap_behind_kernel", "no")
    assert "done at once False\nunmapped while the stream was busy\n" in done.stdout
    assert "survived" not in done.stdout
    assert done.returncode != 0


def test_behind_a_fence_it_is_safe(run_program: RunProgram) -> None:
    done = run_program("unmap_behind_kernel", "fence")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done at once False\nunmapped while the stream was idle\nsurvived\n"
