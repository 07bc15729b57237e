"""How much memory a model's weights will take, before they are loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ALLOWANCE_BYTES = 1 << 30
"""For what is not weights while loading and warming up: workspaces, graphs, fragments."""

_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_INDEX = "model.safetensors.index.json"


def expected_bytes(vllm_config: VllmConfig, share_bytes: int) -> int:
    """Bytes to keep free for loading: this rank's part of the checkpoint, and an allowance.

    It is an estimate, and what loading really takes is known soon after; so it is never more than an engine alone on
    its card could be granted. A checkpoint that is not on this machine yet counts as nothing but the allowance: the
    driver then decides.

    Args:
        vllm_config: The engine's.
        share_bytes: The most that this engine may use of the device. Its context comes off it, within the allowance.
    """
    weights = sum(path.stat().st_size for path in _checkpoint_files(vllm_config)) // _num_parts(vllm_config)
    return max(ALLOWANCE_BYTES, min(weights + ALLOWANCE_BYTES, share_bytes - ALLOWANCE_BYTES))


def _num_parts(vllm_config: VllmConfig) -> int:
    """Ranks that the weights are spread over. Experts, most of a model that has them, also over its replicas."""
    parallel = vllm_config.parallel_config
    replicas = parallel.data_parallel_size if vllm_config.model_config.is_moe else 1
    return parallel.tensor_parallel_size * parallel.pipeline_parallel_size * replicas


def _checkpoint_files(vllm_config: VllmConfig) -> Sequence[Path]:
    place = _place(vllm_config)
    if place is None:
        return []
    if place.is_file():
        return [place]
    if indexed := _indexed_files(place):
        return indexed
    for pattern in _PATTERNS:
        files = [path for path in place.glob(pattern) if path.is_file()]
        # Mistral's repositories hold everything twice: as consolidated files, and as the others.
        if found := [path for path in files if not path.name.startswith("consolidated")] or files:
            return found
    return []


def _place(vllm_config: VllmConfig) -> Path | None:
    """Where the checkpoint is on this machine: a folder, a file, or nowhere yet."""
    model_config = vllm_config.model_config
    if (path := Path(model_config.model)).exists():
        return path
    try:
        folder = snapshot_download(
            model_config.model,
            revision=model_config.revision,
            cache_dir=vllm_config.load_config.download_dir,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(folder)


def _indexed_files(folder: Path) -> Sequence[Path]:
    """The files that an index names: those that vLLM loads, whatever else lies beside them."""
    index = folder / _INDEX
    if not index.is_file():
        return []
    names = set(json.loads(index.read_text())["weight_map"].values())
    return [folder / name for name in names if (folder / name).is_file()]
