"""The devices of this machine, and programs that run on them in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvcached_core.backends.driver import load_driver
from kvcached_core.errors import UnsupportedError

ROOT = Path(__file__).parents[2]
RunProgram = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def num_devices() -> int:
    """How many devices there are; without any the test is skipped with the driver's reason."""
    try:
        driver: Any = load_driver()
    except UnsupportedError as error:
        pytest.skip(str(error))
    return int(driver.cuDeviceGetCount()[1])


@pytest.fixture
def two_devices(num_devices: int) -> None:
    if num_devices < 2:
        pytest.skip(f"needs two devices, and this machine has {num_devices}")


@pytest.fixture
def run_program() -> RunProgram:
    """Run a function of `tests.gpu.programs` in a fresh process, which may lose its context."""

    def run(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tests.gpu.programs", name, *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run
