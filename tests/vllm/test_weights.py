"""Claims of weights.py, with real folders (their files are holes) and the hub's own cache on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvcached_vllm.weights import ALLOWANCE_BYTES, expected_bytes

GIB = 1 << 30
CARD = 80 * GIB


def config(model: Path | str, *, tp: int = 1, pp: int = 1, dp: int = 1, moe: bool = False, **others: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), revision=others.get("revision"), is_moe=moe),
        load_config=SimpleNamespace(download_dir=others.get("download_dir")),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=pp, data_parallel_size=dp),
    )


def fill(folder: Path, name_to_gib: Mapping[str, int]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, num_gib in name_to_gib.items():
        with (folder / name).open("wb") as file:
            file.truncate(num_gib * GIB)
    return folder


def weights_gib(model: Path | str, **others: Any) -> float:
    return (expected_bytes(config(model, **others), CARD) - ALLOWANCE_BYTES) / GIB


@pytest.mark.parametrize(
    ("files", "num_gib"),
    [
        ({"model-1.safetensors": 5, "model-2.safetensors": 3, "config.json": 1}, 8),
        ({"pytorch_model.bin": 4}, 4),
        ({"consolidated.safetensors": 14, "model-1.safetensors": 8, "model-2.safetensors": 6}, 14),
        ({"consolidated.safetensors": 14}, 14),
        ({"config.json": 1}, 0),
    ],
)
def test_a_folder_counts_each_weight_once(tmp_path: Path, files: Mapping[str, int], num_gib: int) -> None:
    assert weights_gib(fill(tmp_path, files)) == num_gib


def test_an_index_says_what_is_loaded(tmp_path: Path) -> None:
    fill(tmp_path, {"model-1.safetensors": 5, "model-2.safetensors": 3, "model-fp32.safetensors": 16})
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_gib(tmp_path) == 8


def test_a_single_file_is_a_checkpoint(tmp_path: Path) -> None:
    assert weights_gib(fill(tmp_path, {"model.gguf": 3, "other.gguf": 9}) / "model.gguf") == 3


@pytest.mark.parametrize(
    ("ranks", "num_gib"),
    [
        ({"tp": 2, "pp": 2}, 12),
        ({"tp": 2, "dp": 4, "moe": True}, 6),
        ({"tp": 2, "dp": 4}, 24),  # every dense replica holds all
    ],
)
def test_ranks_share_a_checkpoint_and_replicas_share_experts(
    tmp_path: Path, ranks: Mapping[str, Any], num_gib: int
) -> None:
    assert weights_gib(fill(tmp_path, {"model.safetensors": 48}), **ranks) == num_gib


def test_a_name_on_the_hub_counts_as_what_its_cache_holds(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    fill(repository / "snapshots" / "c0ffee", {"model.safetensors": 7})
    fill(repository / "snapshots" / "0ld", {"model.safetensors": 3})
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    (repository / "refs" / "v1").write_text("0ld")
    assert weights_gib("org/name", download_dir=str(tmp_path)) == 7
    assert weights_gib("org/name", download_dir=str(tmp_path), revision="v1") == 3


@pytest.mark.parametrize("model", ["org/other", "s3://bucket/model", "/no/such/folder"])
def test_what_is_not_on_this_machine_counts_as_the_allowance(tmp_path: Path, model: str) -> None:
    assert weights_gib(model, download_dir=str(tmp_path)) == 0


def test_no_estimate_is_more_than_an_engine_alone_could_be_granted(tmp_path: Path) -> None:
    """A checkpoint that is quantised while it loads may be larger than the card."""
    fill(tmp_path, {"model.safetensors": 140})
    assert expected_bytes(config(tmp_path), 72 * GIB) == 71 * GIB
    assert expected_bytes(config(tmp_path), GIB) == ALLOWANCE_BYTES
