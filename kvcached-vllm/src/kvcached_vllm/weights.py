"""How much memory a model's weights will take, before they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ALLOWANCE_BYTES = 1 << 30
"""For what is not weights while loading and warming up: workspaces, graphs, fragments."""

_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def expected_bytes(vllm_config: VllmConfig) -> int:
    """Bytes per rank to keep free for loading: the checkpoint's files over the ranks, and an allowance.

    A checkpoint that is not on this machine yet, or dummy weights, count as nothing but the allowance: the driver
    then decides.
    """
    folder = Path(vllm_config.model_config.model)
    parallel = vllm_config.parallel_config
    if vllm_config.load_config.load_format == "dummy" or not folder.is_dir():
        return ALLOWANCE_BYTES
    for pattern in _PATTERNS:
        sizes = [path.stat().st_size for path in folder.glob(pattern)]
        if sizes:
            return sum(sizes) // (parallel.tensor_parallel_size * parallel.pipeline_parallel_size) + ALLOWANCE_BYTES
    return ALLOWANCE_BYTES
