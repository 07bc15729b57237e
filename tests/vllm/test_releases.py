"""Claims of releases.py."""

from __future__ import annotations

import pytest
from kvcached_core.errors import UnsupportedError
from kvcached_vllm.releases import TESTED_RELEASES, judge


@pytest.mark.parametrize("version", [*TESTED_RELEASES, "0.32.0+cpu", "0.33.0.post1", "0.31.0+cu130"])
def test_a_tested_release_is_used_whatever_its_build(version: str) -> None:
    assert judge(version, allow_untested=False).tested


@pytest.mark.parametrize("version", ["0.35.0", "0.34.1", "1.0.0", "0.34.0rc1", "0.35.0.dev12+g1234"])
def test_another_release_is_refused_unless_it_may_be_tried(version: str) -> None:
    with pytest.raises(UnsupportedError, match="KVCACHED_ALLOW_UNTESTED=1"):
        judge(version, allow_untested=False)
    assert not judge(version, allow_untested=True).tested


@pytest.mark.parametrize("version", ["0.29.1", "0.26.0", "0.30.0rc2", "0.30.0.dev1"])
def test_an_older_release_is_refused_in_any_case(version: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{version} is older.*0.30.0 to 0.34.0"):
        judge(version, allow_untested=True)


def test_what_is_no_version_is_refused_with_its_text() -> None:
    with pytest.raises(UnsupportedError, match="'dev'"):
        judge("dev", allow_untested=True)
