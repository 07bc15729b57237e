"""Claims of the suites themselves."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ENDLESS = """
import time

def test_endless(runtime_dir):
    print(f"in {runtime_dir}", flush=True)
    time.sleep(60)
"""


def test_a_run_that_is_ended_from_outside_leaves_nothing_behind(tmp_path: Path) -> None:
    Path(tmp_path, "test_endless.py").write_text(ENDLESS)
    command = (sys.executable, "-m", "pytest", "-s", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path))
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        folder = next(Path(line.split()[-1]) for line in run.stdout if "in /" in line)
        assert folder.is_dir()
        run.send_signal(signal.SIGTERM)
        assert "KeyboardInterrupt" in run.communicate(timeout=30)[0]
        assert run.returncode == pytest.ExitCode.INTERRUPTED
    assert not folder.exists()
