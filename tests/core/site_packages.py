"""Folders like those of an environment's packages, with distributions that consist of metadata."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

VLLM_GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")


class SitePackages:
    """One such folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, version: str, *, entry_points: str = "", module: str = "", source: str = "") -> None:
        """Install a distribution, with a module if one is named."""
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)
        if module:
            (info / "top_level.txt").write_text(module + "\n")
            self.add_module(module, source)

    def add_module(self, module: str, source: str = "") -> None:
        """Put a package there, without metadata."""
        (self.path / module).mkdir()
        (self.path / module / "__init__.py").write_text(source)

    def add_vllm(self, version: str = "0.32.0", *, distribution: str = "vllm") -> None:
        """An engine that ends the process that imports it: nothing may."""
        self.add(distribution, version, module="vllm", source="raise SystemExit('vllm was imported')\n")

    def add_vllm_plugin(self, *groups: str) -> None:
        """The metadata of kvcached-vllm, with an entry point in each of the groups."""
        lines = "".join(f"[{group}]\nkvcached = kvcached_vllm.plugin:main\n\n" for group in groups)
        self.add("kvcached-vllm", "0.1.0", entry_points=lines)

    def add_releases(self, tested: str) -> None:
        """The plugin's package with its table of releases, as the real one judges."""
        self.add_module("kvcached_vllm")
        (self.path / "kvcached_vllm" / "releases.py").write_text(
            "from kvcached_core.errors import UnsupportedError\n"
            "def judge(version, *, allow_untested):\n"
            f"    if version != {tested!r} and not allow_untested:\n"
            f"        raise UnsupportedError(f'vLLM {{version}} is not tested; {tested} is')\n"
        )


@contextmanager
def only(site: SitePackages) -> Iterator[None]:
    """Within it this folder is all that can be found, beside what is imported already; no engine and no plugin is."""
    kept = {name: module for name, module in sys.modules.items() if not name.startswith(("kvcached_vllm", "vllm"))}
    importlib.invalidate_caches()
    with mock.patch.object(sys, "path", [str(site.path)]), mock.patch.dict(sys.modules, kept, clear=True):
        yield
