"""Claims of refusals.py that need no process of their own. What a refusal leads to is in ``test_plugin.py``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvcached_core import devices
from kvcached_core.errors import UnsupportedError
from kvcached_vllm import refusals
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

WORKERS = ("stock.Worker", "elastic.Worker")

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 512}
BERT = {"architectures": ["BertModel"], "model_type": "bert", "max_position_embeddings": 512}
MAMBA = {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2}


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., VllmConfig]:
    """vLLM's own configuration of a model without weights."""

    def make(description: dict[str, Any] = LLAMA, **flags: Any) -> VllmConfig:
        (tmp_path / "config.json").write_text(json.dumps({**SIZES, **description}))
        arguments = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, dtype="float32", **flags)
        config = arguments.create_engine_config()
        config.parallel_config.worker_cls = "auto"
        config.scheduler_config.scheduler_cls = None
        return config

    return make


def refused(config: VllmConfig) -> str:
    with pytest.raises(UnsupportedError) as refusal:
        refusals.check(config, *WORKERS)
    return str(refusal.value)


def test_models_with_a_kv_cache_or_a_state_are_taken(configured: Callable[..., VllmConfig]) -> None:
    refusals.check(configured(LLAMA), *WORKERS)
    refusals.check(configured(MAMBA), *WORKERS)


def test_an_encoder_has_no_kv_cache(configured: Callable[..., VllmConfig]) -> None:
    assert "has no KV cache: there is nothing to make elastic" in refused(configured(BERT))
    half = configured(LLAMA)  # the half of a multimodal model that turns images into embeddings
    half.model_config.multimodal_config = SimpleNamespace(mm_encoder_only=True)
    assert "has no KV cache" in refused(half)


def test_a_size_to_offload_is_a_connector(configured: Callable[..., VllmConfig]) -> None:
    """vLLM turns it into one after it has asked the platform."""
    config = configured()
    config.cache_config.kv_offloading_size = 4.0
    assert config.kv_transfer_config is None
    assert "Offloading 4 GiB of KV to the host is a KV connector" in refused(config)
    assert "leave --kv-offloading-size out" in refused(config)


def test_ray_is_refused_where_it_must_use_other_hosts(
    monkeypatch: pytest.MonkeyPatch, configured: Callable[..., VllmConfig]
) -> None:
    gpus = tuple(devices.Device(f"GPU-{number}", "", 0, 0) for number in range(2))
    monkeypatch.setattr(devices, "inventory", lambda: devices.Inventory(gpus))
    config = configured()
    config.parallel_config.distributed_executor_backend = "ray"
    config.parallel_config.world_size = 2
    refusals.check(config, *WORKERS)
    config.parallel_config.world_size = 3
    assert "Ray has 3 ranks to place and this host has 2 GPUs" in refused(config)
