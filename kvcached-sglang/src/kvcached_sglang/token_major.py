"""Whether this server's KV cache lies layer after layer or token after token, and why it cannot be the latter.

Only SGLang's kernels decide that: those that find a row by the view's stride work on both, those that take rows to be
contiguous would write into other layers. What is allowed is what SGLang allows its own token-major pools.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from kvcached_sglang.placement import LAYER_MAJOR, ROW_ALIGN_BYTES, TOKEN_MAJOR
from kvcached_sglang.releases import STRIDED_BACKENDS, strided_backends

log = logging.getLogger(__name__)

AUTO_LAYOUT = LAYER_MAJOR
"""What ``KVCACHED_LAYOUT=auto`` means where the server can have either. Token-major's speed has not been measured."""

CONTIGUOUS_MODELS = {"MuseSpark": "its fused store takes KV rows to be contiguous, but under --enable-unified-memory"}
"""Models whose own code writes KV beside the attention backend, by how their architectures' names begin."""


def choose_layout(asked: str, configurator: Any, version: str) -> tuple[str, list[str]]:
    """The layout of this server's KV cache.

    Args:
        asked: ``KVCACHED_LAYOUT``.
        configurator: SGLang's ``KVCacheConfigurator``.
        version: Of SGLang.

    Returns:
        Its name, and why it cannot be had; no reason where it can. What was asked for is never replaced: only ``auto``
        means whichever can be had.
    """
    layout = AUTO_LAYOUT if asked == "auto" else asked
    if layout == LAYER_MAJOR:
        return LAYER_MAJOR, []
    reasons = list(_reasons(configurator, version))
    if reasons and asked == "auto":
        log.info("the KV cache is %s, not %s: %s", LAYER_MAJOR, TOKEN_MAJOR, "; ".join(reasons))
        return LAYER_MAJOR, []
    return TOKEN_MAJOR, [f"KVCACHED_LAYOUT={TOKEN_MAJOR}: {reason}" for reason in reasons]


def _reasons(configurator: Any, version: str) -> Iterator[str]:
    """Why a server cannot have a token-major KV cache."""
    strided = strided_backends(version)
    if strided is None:
        yield f"the kernels of SGLang {version} are not known to read one; those of {', '.join(STRIDED_BACKENDS)} are"
        return
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import attention_backends, get_spec
    from sglang.srt.utils import is_cpu

    model = configurator.model_config
    if configurator.use_mla_backend:
        allowed = strided.mla
    else:
        allowed = strided.unequal if model.has_asymmetric_kv else strided.mha
    allowed |= {"torch_native"}  # it indexes tensors, as Python does
    for backend in sorted(set(attention_backends()) - allowed - {None}):
        yield f"attention backend {backend} is not known to read one; of this model's, {', '.join(sorted(allowed))} are"
    if get_spec().speculative_algorithm is not None:
        yield "speculative decoding copies KV in pieces of contiguous tensors"
    if envs.SGLANG_USE_HND_KVCACHE.get():
        yield "SGLANG_USE_HND_KVCACHE keeps the heads of a page together, not the rows of a token"
    if is_cpu():
        yield "SGLANG_USE_CPU_ENGINE: its kernels are not known to write one"
    for name, reason in CONTIGUOUS_MODELS.items():
        if any(architecture.startswith(name) for architecture in model.hf_config.architectures or ()):
            yield f"{name}: {reason}"
    for what, num_elements in _widths(configurator):
        num_bytes = num_elements * configurator.kv_cache_dtype.itemsize
        if num_bytes % ROW_ALIGN_BYTES:
            yield f"{what} of {num_bytes} bytes is no multiple of {ROW_ALIGN_BYTES}, which kernels write at once"


def _widths(configurator: Any) -> Iterator[tuple[str, int]]:
    """What a token's rows are made of, in elements. Where each part is aligned, so is every row."""
    model = configurator.model_config
    if configurator.use_mla_backend:
        yield "a latent row", model.kv_lora_rank + model.qk_rope_head_dim
        return
    widths = {model.head_dim, model.v_head_dim}
    if configurator.is_hybrid_swa:
        widths |= {model.swa_head_dim, model.swa_v_head_dim}
    for width in sorted(widths):
        yield "a head's row", width
