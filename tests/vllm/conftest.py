"""The engine is imported once, before any test, with its own warnings left alone; ours stay errors."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.v1.core.block_pool  # noqa: F401


@pytest.fixture(scope="module")
def module_runtime_dir() -> Iterator[Path]:
    """The runtime directory of engines that the tests of one module share."""
    path = Path(tempfile.mkdtemp(prefix="kvcached-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)
