"""The SGLang releases that kvcached has been tested with, as data, and what to do with any other.

A tested release is used in silence. A newer one is refused unless ``KVCACHED_ALLOW_UNTESTED=1``, and then only if
every hook of ``hooks.py`` still fits. An older one is refused in any case.
"""

from __future__ import annotations

from kvcached_core.errors import UnsupportedError
from packaging.version import InvalidVersion, Version

TESTED_RELEASES = ("0.5.20", "0.5.21", "0.5.22", "0.5.23")
"""Oldest first. Every one has passed tests/contract and tests/sglang/test_releases.py; 0.5.23 all of tests/sglang."""


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
