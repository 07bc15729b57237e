"""Unpack the Python sources of engine releases, for tests that check what the plugins rely on.

    python fetch.py CACHE_FOLDER vllm-0.33.0 sglang-0.5.23 ...

leaves CACHE_FOLDER/vllm-0.33.0/vllm/... and so on. A release that is there already is not fetched again. Only sources
and metadata are kept: vLLM's wheels are 300 to 500 MB each, nearly all of it compiled code.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# The engines' wheels hold the same sources for every Python and platform; one is named so that the same file is taken
# wherever this runs.
PYTHON_VERSION = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_34_x86_64", "manylinux_2_35_x86_64")
KEPT = (".py", "/METADATA", "/entry_points.txt")


def fetch(cache: Path, release: str) -> None:
    """Leave the sources of one release, such as ``vllm-0.33.0``, complete in the cache."""
    if (cache / release).is_dir():
        return
    print(f"fetching the sources of {release}", flush=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        wheel = _download(release, Path(scratch))
        unpacked = Path(scratch, "sources")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked, [name for name in archive.namelist() if name.endswith(KEPT)])
        unpacked.rename(cache / release)


def _download(release: str, folder: Path) -> Path:
    name, version = release.split("-")
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    subprocess.run(
        [*command, "--python-version", PYTHON_VERSION, *platforms, "-d", folder, f"{name}=={version}"], check=True
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


if __name__ == "__main__":
    cache = Path(sys.argv[1])
    cache.mkdir(parents=True, exist_ok=True)
    for release in sys.argv[2:]:
        fetch(cache, release)
