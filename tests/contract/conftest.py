"""Where the unpacked sources of the engines' releases are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

VARIABLE = "KVC_TEST_ENGINE_SOURCES"


@pytest.fixture(scope="session")
def engine_root() -> Callable[[str], Path]:
    """The folder with the sources of a release such as ``vllm-0.33.0``; skips the test where it is missing."""

    def root_of(release: str) -> Path:
        folder = os.environ.get(VARIABLE)
        if folder is None:
            pytest.skip(f"{VARIABLE} does not name a folder with unpacked engine sources; `nox -s contract` sets it")
        root = Path(folder, release)
        if not root.is_dir():
            pytest.skip(f"{root} is missing; tests/contract/fetch.py unpacks it")
        return root

    return root_of
