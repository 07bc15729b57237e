"""What is installed: the three wheels of this checkout, as nox has built and installed them."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

DISTRIBUTIONS = ("kvcached-core", "kvcached-vllm", "kvcached-sglang")

_IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(("torch", "cuda", "vllm", "sglang")))  # None: ImportError
import kvcached_core
names = [module.name for module in pkgutil.walk_packages(kvcached_core.__path__, "kvcached_core.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_wheel_is_one_for_every_python_and_machine_and_leaves_torch_to_the_engine(name: str) -> None:
    """So that no wheel needs to be built for a torch, a CUDA or an engine."""
    distribution = importlib.metadata.distribution(name)
    wheel = (distribution.read_text("WHEEL") or "").splitlines()
    assert [line for line in wheel if line.startswith(("Tag:", "Root-Is-Purelib:"))] == [
        "Root-Is-Purelib: true",
        "Tag: py3-none-any",
    ]
    files = distribution.files or []
    assert len(files) > 10
    assert [str(file) for file in files if ".so" in file.suffixes or file.suffix in (".pyd", ".pth", ".a")] == []
    required = {Requirement(text).name for text in distribution.requires or []}
    assert required
    assert not {word for word in required if word.startswith("torch")}


def test_the_core_is_imported_without_torch_cuda_or_an_engine() -> None:
    command = [sys.executable, "-W", "error", "-c", _IMPORT_ALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30
