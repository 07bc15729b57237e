"""Where vLLM's KV cache comes from: the arena, through PyTorch's own way of answering calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from kvcached_core.errors import UnsupportedError
from torch.overrides import TorchFunctionMode


class KVAllocation(TorchFunctionMode):
    """While entered, answers the one call that allocates the KV cache; passes everything else through.

    vLLM allocates one backing buffer for the whole model, with ``torch.zeros(size, dtype=torch.int8, device=…)``
    (``allocate_kv_cache`` in ``v1/worker/utils.py``, 0.30.0 to 0.34.0, for both model runners and the CPU).
    """

    def __init__(self, size_bytes: int, make_tensor: Callable[[], torch.Tensor]) -> None:
        """Answer with ``make_tensor()``: int8, of ``size_bytes`` elements; not filled."""
        super().__init__()
        self._size_bytes = size_bytes
        self._make_tensor = make_tensor
        self._num_answered = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and args == (self._size_bytes,) and kwargs.get("dtype") is torch.int8:
            self._num_answered += 1
            return self._make_tensor()
        return func(*args, **kwargs)

    def check(self) -> None:
        """Make sure that the call came, once.

        Raises:
            UnsupportedError: vLLM allocated its KV cache in another way, so it would not be elastic.
        """
        if self._num_answered != 1:
            raise UnsupportedError(
                f"vLLM asked for its KV cache of {self._size_bytes} bytes {self._num_answered} times, not once: this "
                "release allocates it in a way that kvcached does not know."
            )
