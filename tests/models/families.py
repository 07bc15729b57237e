"""Models of the architectures that decide how a KV cache is laid out, with random weights made the same everywhere.

Each family keeps the shape of a released model where the KV cache sees it (layers, KV heads, head sizes, latent
ranks, windows, state sizes) and shrinks the rest (vocabulary, MLP, experts), so that a model is made in seconds and
its cache is as large as the real one's.

    python -m tests.models.families gqa swa --out DIR            # DIR/gqa, DIR/swa
    python -m tests.models.families --layers 4 mla --out DIR     # shallower, for a CPU
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.models.text import VOCABULARY_SIZE, save_tokenizer

if TYPE_CHECKING:
    import torch

CONTEXT_TOKENS = 32768
_SHARED = {
    "vocab_size": VOCABULARY_SIZE,
    "max_position_embeddings": CONTEXT_TOKENS,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class Family:
    """One architecture: whose shape it has, and its ``config.json`` for a number of layers."""

    shape_of: str
    num_layers: int
    config: Callable[[int], dict[str, Any]]


def _gqa(num_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": num_layers,
        "hidden_size": 896,
        "intermediate_size": 2432,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    }


def _mla(num_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": num_layers,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "moe_intermediate_size": 256,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }


def _swa(num_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": num_layers,
        "layer_types": ["sliding_attention" if layer % 6 else "full_attention" for layer in range(1, num_layers + 1)],
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _linear(num_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": num_layers,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention" if layer % 4 else "full_attention" for layer in range(1, num_layers + 1)],
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "hidden_act": "silu",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        "partial_rotary_factor": 0.25,
    }


def _window(num_layers: int) -> dict[str, Any]:
    """A model whose sliding-window layers get a pool of their own from SGLang, which Gemma 3's do not."""
    return {
        "architectures": ["MellumForCausalLM"],
        "model_type": "mellum",
        "num_hidden_layers": num_layers,
        "layer_types": ["sliding_attention" if layer % 3 else "full_attention" for layer in range(1, num_layers + 1)],
        "mlp_layer_types": ["dense"] * num_layers,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "sliding_window": 256,
        "num_experts": 4,  # none is used
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }


def _llama_8b(num_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": num_layers,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }


MATRIX_FAMILIES = {
    "gqa": Family("Qwen2.5-0.5B", 24, _gqa),
    "mla": Family("DeepSeek-V2-Lite", 27, _mla),
    "swa": Family("Gemma-3-270M", 18, _swa),
    "linear": Family("Qwen3.5-0.8B", 24, _linear),
}
FAMILIES = MATRIX_FAMILIES | {"window": Family("Mellum, dense", 6, _window)}
"""With those that only tests on a CPU need."""

SPEED_SHAPE = Family("Llama-3.1-8B", 32, _llama_8b)


def make_model(family: str, directory: Path, *, num_layers: int | None = None) -> None:
    """Write a complete model: configuration, tokenizer and seeded bfloat16 weights. Nothing if it is there already."""
    if (directory / "model.safetensors").exists():
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = FAMILIES[family]
    config = _write_config(shape, directory, num_layers or shape.num_layers)
    torch.manual_seed(0)  # for what a model initialises itself: decay rates, convolutions
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    _initialise(model)
    model.save_pretrained(directory)
    # What the engines read is the configuration written above, not this transformers release's rendering of it.
    _write_config(shape, directory, num_layers or shape.num_layers)


def make_shape(directory: Path) -> None:
    """Write configuration and tokenizer of the 8B speed shape; the engines invent its weights (dummy format)."""
    _write_config(SPEED_SHAPE, directory, SPEED_SHAPE.num_layers)


def _write_config(shape: Family, directory: Path, num_layers: int) -> dict[str, Any]:
    config = _SHARED | shape.config(num_layers)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_tokenizer(directory, max_length=CONTEXT_TOKENS)
    return config


def _initialise(model: torch.nn.Module) -> None:
    """Give every matrix weights under which greedy output is varied and depends on the whole context.

    A matrix maps unit-variance inputs to unit-variance outputs times a gain; with the usual 0.02 the residual stream
    would be the last token's embedding alone, the output one token for ever, and a lost KV block would go unseen.
    Embeddings start small for the same reason (Gemma multiplies its own by the root of the hidden size). Queries and
    keys, or where a model normalises them their norms, get 2: attention then looks at a few tokens of many, neither at
    all alike nor at one. Linear attention forgets over 10 to 200 tokens, not within the next.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    embeddings_are_scaled = model.config.model_type == "gemma3_text"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(0.005, 0.1, generator=generator).log_()
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(1.0)  # both families scale by one plus the weight
            elif parameter.dim() == 2:
                parameter.normal_(
                    0.0, _deviation(name, parameter.shape[-1], embeddings_are_scaled), generator=generator
                )
            elif "experts" in name:
                parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[-1]), generator=generator)


def _deviation(name: str, fan_in: int, embeddings_are_scaled: bool) -> float:
    if "embed_tokens" in name:
        return 0.5 / math.sqrt(fan_in) if embeddings_are_scaled else 0.5
    gain = 2.0 if any(part in name for part in ("q_proj", "k_proj", "kv_a_proj")) else 1.0
    return gain / math.sqrt(fan_in)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="+", choices=[*FAMILIES, "8b"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int)
    arguments = parser.parse_args()
    for family in arguments.families:
        started = time.monotonic()
        directory = arguments.out / family
        if family == "8b":
            make_shape(directory)
        else:
            make_model(family, directory, num_layers=arguments.layers)
        print(f"{family}: {directory} in {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
