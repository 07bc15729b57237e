"""The engine is imported once, before any test, with its own warnings left alone; ours stay errors."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.v1.core.block_pool  # noqa: F401
