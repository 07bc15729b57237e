"""Fixtures for every suite."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A private runtime directory in memory, as an operator's would be; it is gone after the test."""
    path = Path(tempfile.mkdtemp(prefix="kvcached-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
