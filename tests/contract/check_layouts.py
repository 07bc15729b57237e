"""A release's own KV cache tensors, in every layout that it has, against the geometry.

Run with the release's sources first on PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
import vllm
from kvcached_vllm.layout import bound_tensors, check_tensors, kv_cache_geometry
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float16)
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float16, sliding_window=64)
MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=72, dtype=torch.bfloat16)
MODELS = {"full attention": [(FULL, 3)], "MLA": [(MLA, 3)], "hybrid": [(FULL, 2), (WINDOW, 2), (WINDOW, 1)]}
NUM_BLOCKS = 10


def check(model: str, layout: KVCacheLayout) -> int:
    """Compare; the number of stripes."""
    groups = [
        KVCacheGroupSpec([f"group{index}.layer{layer}" for layer in range(num_layers)], spec)
        for index, (spec, num_layers) in enumerate(MODELS[model])
    ]
    cache_config = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        num_gpu_blocks_override=NUM_BLOCKS,
        prefix_cache_retention_interval=None,
    )
    vllm_config = SimpleNamespace(cache_config=cache_config, attention_config=SimpleNamespace(hisparse_config=None))
    config = get_kv_cache_config_from_groups(vllm_config, groups, 1 << 30)
    views = allocate_kv_cache(config, torch.device("cpu"), layout)
    layers = {name: SimpleNamespace(kv_cache=view) for name, view in views.items()}
    tensors = bound_tensors(config, layers)
    assert len(tensors) == sum(num_layers for _, num_layers in MODELS[model])
    geometry = kv_cache_geometry(config, granularity_bytes=4096)
    check_tensors(geometry, next(iter(views.values())).untyped_storage().data_ptr(), tensors)
    return len(geometry.stripes)


if __name__ == "__main__":
    stripes = {(model, layout.name): check(model, layout) for model in MODELS for layout in KVCacheLayout}
    assert all(number == 1 for (_, layout), number in stripes.items() if layout.startswith("B")), stripes
    assert stripes["full attention", "LBNHC"] == 3, stripes
    assert stripes["hybrid", "LBNHC"] == 2, stripes
    print(f"{len(stripes)} layouts with {Path(vllm.__file__).parents[1].name}")
