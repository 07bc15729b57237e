"""The claims on demand, and on a scheduler without a model, with a release's own scheduler and KV cache managers.

Run with the release's sources first on PYTHONPATH.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import vllm.platforms
from vllm.platforms import CpuArchEnum
from vllm.platforms.cpu import CpuPlatform

TESTS = Path(__file__).parents[1] / "vllm"


class AnyCpu(CpuPlatform):
    """A CPU for which vLLM wants no Triton: from 0.34 on it does on x86, though nothing here runs a kernel."""

    @classmethod
    def get_cpu_architecture(cls) -> CpuArchEnum:
        return CpuArchEnum.OTHER


if __name__ == "__main__":
    vllm.platforms.current_platform = AnyCpu()  # sources alone do not say what they were built for
    claims = [str(TESTS / f"test_{name}.py") for name in ("request_size", "demand", "scheduler")]
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-W", "ignore", *claims])
    print(f"scheduler of {Path(vllm.__file__).parents[1].name}")
    sys.exit(code)
