"""What a stray access meets: a fault in strict mode, the guard page otherwise."""

from __future__ import annotations

import pytest

from .conftest import RunProgram

pytest.importorskip("torch")


@pytest.mark.parametrize("access", ["read", "write"])
def test_without_a_guard_a_stray_access_faults(run_program: RunProgram, access: str) -> None:
    done = run_program("stray", access, "none")
    assert done.returncode != 0
    assert "mapped page" not in done.stdout
    assert "illegal memory access" in done.stderr


@pytest.mark.parametrize(("access", "outcome"), [("read", "read"), ("write", "written")])
def test_before_the_seal_a_stray_access_does_no_harm(run_program: RunProgram, access: str, outcome: str) -> None:
    done = run_program("stray", access, "open")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(outcome)
    assert done.stdout.endswith("mapped page 2\n")


def test_after_the_seal_a_stray_read_finds_zeros_whatever_warm_up_wrote(run_program: RunProgram) -> None:
    done = run_program("stray", "read", "sealed")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "read 0\nmapped page 2\n"


def test_after_the_seal_a_stray_write_faults(run_program: RunProgram) -> None:
    done = run_program("stray", "write", "sealed")
    assert done.returncode != 0
    assert "written" not in done.stdout
