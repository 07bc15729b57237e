"""The SGLang releases that kvcached has been tested with, as data, and what to do with any other.

A tested release is used in silence. A newer one is refused unless ``KVCACHED_ALLOW_UNTESTED=1``, and then only if
every hook of ``hooks.py`` still fits. An older one is refused in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcached_core.errors import UnsupportedError
from packaging.version import InvalidVersion, Version

TESTED_RELEASES = ("0.5.20", "0.5.21", "0.5.22", "0.5.23")
"""Oldest first. Every one has passed tests/contract and tests/sglang/test_releases.py; 0.5.23 all of tests/sglang."""


@dataclass(frozen=True)
class StridedBackends:
    """Attention backends whose kernels find a token's row by the view's stride, whatever lies between rows.

    Attributes:
        mla: For models with multi-head latent attention.
        mha: For all others, sliding-window models among them.
        unequal: For those of the latter whose K and V rows differ in width.
    """

    mla: frozenset[str]
    mha: frozenset[str]
    unequal: frozenset[str]


_MLA = frozenset({"triton", "fa3", "trtllm_mla", "flashinfer", "cutedsl_mla", "flashmla"})
_MHA = frozenset({"triton", "fa3", "fa4", "flashinfer", "trtllm_mha"})

STRIDED_BACKENDS: Mapping[str, StridedBackends] = {
    "0.5.22": StridedBackends(_MLA | {"tokenspeed_mla"}, _MHA, frozenset()),
    "0.5.23": StridedBackends(_MLA, _MHA, frozenset({"triton", "fa3", "fa4"})),
}
"""Releases that can have a token-major KV cache, with what SGLang itself allows ``--enable-unified-memory`` to have.

0.5.20 and 0.5.21 keep the rows of a page's layer contiguous and renumber pages instead, so that their kernels never
read a view whose rows are apart. Source: ``handle_page_major_kv_layout`` in ``arg_groups/kv_cache_hook.py``.
"""


def strided_backends(version: str) -> StridedBackends | None:
    """What a release has for token-major KV caches; None where it has nothing, or has not been looked at."""
    return STRIDED_BACKENDS.get(Version(version).base_version)


def judge(version: str, *, allow_untested: bool) -> bool:
    """Decide whether the plugin works with this release of SGLang.

    Post-releases and local builds count as their release.

    Args:
        version: ``sglang.__version__``.
        allow_untested: ``KVCACHED_ALLOW_UNTESTED``.

    Returns:
        Whether the release is in the table.

    Raises:
        UnsupportedError: With the version found and the ones that work.
    """
    tested = f"{TESTED_RELEASES[0]} to {TESTED_RELEASES[-1]}"
    try:
        found = Version(version)
    except InvalidVersion as error:
        raise UnsupportedError(
            f"SGLang reports version {version!r}, which is none; kvcached needs {tested}."
        ) from error
    if found.base_version in TESTED_RELEASES and not found.is_prerelease:
        return True
    if found < Version(TESTED_RELEASES[0]):
        raise UnsupportedError(
            f"SGLang {version} is older than kvcached supports; it needs {tested}. Install a newer SGLang."
        )
    if not allow_untested:
        raise UnsupportedError(
            f"SGLang {version} has not been tested with this kvcached, which knows {tested}. "
            "Set KVCACHED_ALLOW_UNTESTED=1 to try, or install a newer kvcached-sglang."
        )
    return False
