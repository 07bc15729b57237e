"""What this engine takes of its device beside the KV cache: weights, activations, graphs.

They are admission too. Otherwise this engine would die while it loads because a neighbour's cache took the rest, or
in a long prefill because a neighbour's cache took what its activations need. What is held is the engine's own
estimate: the weights, and the part of the device that ``--mem-fraction-static`` leaves out for activations and
graphs.

A host budget is for KV caches alone: there is nothing to hold of it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from kvcached_core.sizes import format_bytes

from kvcached_sglang.member import LOADING_DEADLINE_SECONDS, Member

log = logging.getLogger(__name__)

MAX_SLACK_BYTES = 8 << 30
"""Activations and graphs never come near a half of a large card, which ``--mem-fraction-static 0.5`` leaves out to
make the KV cache small: two such servers would lock each other out."""
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


class StaticLease:
    """One rank's static lease.

    Args:
        member: Of the device's ledger.
        used_bytes: What this process holds of the device beside KV; None where that is not accounted.
        fraction: ``--mem-fraction-static``.
    """

    def __init__(self, member: Member, used_bytes: Callable[[], int] | None, fraction: float) -> None:
        self._member = member
        self._used_bytes = used_bytes
        self._slack_bytes = min(int(member.limits.total_bytes * (1 - fraction)), MAX_SLACK_BYTES)

    def take(self, coming_bytes: int = 0) -> None:
        """Hold what is used now, so much more that is about to be allocated, and what running takes; wait for room.

        Raises:
            LedgerError: There is none, within `LOADING_DEADLINE_SECONDS`; with the figures.
        """
        if self._used_bytes is None:
            return
        account, used = self._member.account, self._used_bytes()
        wanted = used + coming_bytes + self._slack_bytes
        device = self._member.backend.device_id
        log.info("asking for %s of %s for weights, activations and graphs", format_bytes(wanted), device)
        account.static_used(used)  # first: what is loaded need not be free a second time
        account.static_lease(wanted, deadline_seconds=LOADING_DEADLINE_SECONDS)
        self._member.static_bytes = wanted


def checkpoint_bytes(server_args: Any) -> int:
    """Bytes of the checkpoint's files that one rank loads; 0 where they are not on this machine."""
    if server_args.load_format == "dummy":
        return 0
    path = _checkpoint(server_args)
    if path is None:
        return 0
    for pattern in WEIGHT_FILES:  # a repository may have the same weights in several formats; one is loaded
        if files := [path] if path.is_file() else list(path.glob(pattern)):
            return sum(file.stat().st_size for file in files) // int(server_args.tp_size)
    return 0


def _checkpoint(server_args: Any) -> Path | None:
    """The model's folder or file; of a repository on Hugging Face, what has been downloaded of it."""
    path = Path(os.path.expanduser(server_args.model_path))
    if path.exists():
        return path
    try:
        folder = huggingface_hub.snapshot_download(
            server_args.model_path,
            revision=server_args.revision,
            cache_dir=server_args.download_dir,
            local_files_only=True,
        )
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    return Path(folder)
