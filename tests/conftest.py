"""Fixtures for every suite."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import settings

# No deadline per example: two cores are shared with engines and other suites. On CI the same examples every time, so
# that a red run is the change's; everywhere else new ones.
settings.register_profile("kvcached", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("kvcached")


def pytest_configure() -> None:
    """A run that is ended by SIGTERM ends as by Ctrl-C: its servers and directories are left to nobody."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A private runtime directory in memory, as an operator's would be; it is gone after the test."""
    path = Path(tempfile.mkdtemp(prefix="kvcached-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, trained; bfloat16, 22.5 KiB of KV per token."""
    return _small_model("smollm2")


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """A Llama of four layers with random weights and a tokenizer of its own; float32."""
    return _small_model("tiny-llama")


@pytest.fixture(scope="session")
def tiny_gemma3() -> Path:
    """A hybrid with random weights, two sliding-window layers to one full-attention layer; float32."""
    return _small_model("tiny-gemma3")


@pytest.fixture(scope="session")
def tiny_gemma3n() -> Path:
    """A hybrid with random weights whose last layers read the KV of earlier ones; float32."""
    return _small_model("tiny-gemma3n")


def _small_model(name: str) -> Path:
    from tests.models.small import model  # needs transformers, which the core's environments do not have

    return model(name)
