"""How a backend is found: the two built in, and those of packages that are installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kvcached_core.arena import Arena
from kvcached_core.backends import DeviceMemory, load_backend
from kvcached_core.errors import ConfigError, UnsupportedError

PLUGIN = """
from kvcached_core.backends import hookimpl
from kvcached_core.backends.host import HostBackend

class NearHost(HostBackend):
    def __init__(self, ordinal, budget_bytes):
        super().__init__(budget_bytes)
        self.device_id = f"near-{ordinal}"

@hookimpl
def kvcached_make_backend(kind, ordinal, budget_bytes):
    return NearHost(ordinal, budget_bytes) if kind == "near" else None
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Install a package with a backend plugin, as pip would."""
    module = tmp_path.name

    def install(source: str) -> None:
        (tmp_path / f"{module}.py").write_text(source)
        metadata = tmp_path / f"{module}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[kvcached.backends]\n{module} = {module}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_the_host_backend_is_built_in() -> None:
    backend = load_backend("host", budget_bytes=1 << 30)
    assert (backend.device_id, backend.memory()) == ("host", DeviceMemory(free_bytes=None, total_bytes=1 << 30))


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no backend 'hsot'\. Built in: host, cuda.*kvcached\.backends"):
        load_backend("hsot")


def test_an_installed_package_brings_its_own_backend(install: Callable[[str], None]) -> None:
    install(PLUGIN)
    backend = load_backend("near", ordinal=3, budget_bytes=1 << 20)
    assert backend.device_id == "near-3"
    arena = Arena(backend, 1 << 16, 1 << 12)
    assert arena.map([range(2)]) == 2
    arena.close()
    assert load_backend("host").device_id == "host"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import a_module_that_is_not_there", "a_module_that_is_not_there"),
        (PLUGIN.replace("(kind, ordinal, budget_bytes):", "(kind, colour):"), "colour"),
        (PLUGIN.replace("def kvcached_make_backend", "def kvcached_make_backends"), "kvcached_make_backends"),
    ],
    ids=["import", "arguments", "name"],
)
def test_a_package_that_cannot_be_used_is_named_with_the_reason(
    install: Callable[[str], None], source: str, reason: str
) -> None:
    install(source)
    with pytest.raises(UnsupportedError, match=rf"(?s)kvcached\.backends.*{reason}"):
        load_backend("host")
