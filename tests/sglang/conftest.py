"""SGLang imports here once, with its warnings let be: everything else in these tests turns warnings into errors."""

from __future__ import annotations

import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.sglang.pair import Pair

pytest.register_assert_rewrite("tests.sglang.pair")

STUBS = Path(__file__).parent / "stubs"
sys.path.append(str(STUBS))

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang.srt.managers.scheduler  # noqa: F401


@pytest.fixture(scope="session")
def gqa_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights, under which output depends on the whole context: 4 KiB of KV a token."""
    from tests.models.families import make_model

    folder = tmp_path_factory.mktemp("models") / "gqa"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_model("gqa", folder, num_layers=4)
    return folder


@pytest.fixture(scope="module")
def module_runtime_dir() -> Iterator[Path]:
    """The runtime directory of engines that the tests of one module share."""
    path = Path(tempfile.mkdtemp(prefix="kvcached-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def engines(pair: Pair) -> Iterator[Pair]:
    """A module's pair of engines; without a limit again after each test, however it ends."""
    yield pair
    pair.unlimit()
