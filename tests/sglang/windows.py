"""SGLang's attention for CPUs, made to read sliding-window pools by their own ids.

0.5.23 writes keys and values there by the pool's own ids, and reads them by those of full attention, which ends even a
native engine. For both engines of a comparison alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def read_windows_by_their_own_ids() -> None:
    """In this process, from now on."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        original = getattr(TorchNativeAttnBackend, name)
        setattr(TorchNativeAttnBackend, name, functools.partialmethod(_translated, original))


def _translated(
    backend: Any,
    original: Callable[..., None],
    query: torch.Tensor,
    output: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> None:
    window = named.get("sliding_window_size")
    if backend.use_sliding_window_kv_pool and window is not None and window > -1:
        rows = req_to_token[req_pool_indices][:, : int(seq_lens.max())]
        req_to_token = backend.token_to_kv_pool.translate_loc_from_full_to_swa(rows.long())
        req_pool_indices = torch.arange(len(rows))
    original(backend, query, output, keys, values, req_to_token, req_pool_indices, seq_lens, *rest, **named)
