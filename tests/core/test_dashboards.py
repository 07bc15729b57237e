"""The Grafana dashboard and the alerting rules: well formed, and about metrics that exist."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvcached_core.metrics import DEVICE_FAMILIES, MEMBER_FAMILIES, READABLE, Family, labels_of

FOLDER = files("kvcached_core") / "dashboards"
FAMILIES = {family.name: family for family in (*DEVICE_FAMILIES, *MEMBER_FAMILIES, READABLE)}
RUNBOOK = Path(__file__).parents[2] / "docs" / "operations.md"


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text())
    return content


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    assert set(group) == {"name", "rules"}
    found: list[dict[str, Any]] = group["rules"]
    return found


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def named(expression: str) -> set[str]:
    return set(re.findall(r"\bkvcached_\w+", expression))


def test_the_dashboard_is_about_metrics_that_exist(dashboard: dict[str, Any]) -> None:
    for expression in expressions(dashboard):
        assert named(expression), expression
        assert named(expression) <= FAMILIES.keys(), expression
    for variable in dashboard["templating"]["list"]:
        assert named(json.dumps(variable["query"])) <= FAMILIES.keys()


def test_the_dashboard_shows_every_metric_of_a_member(dashboard: dict[str, Any]) -> None:
    shown = set().union(*map(named, expressions(dashboard)))
    left_out = {"kvcached_demand_bytes", "kvcached_target_bytes", "kvcached_static_used_bytes"}
    assert {family.name for family in MEMBER_FAMILIES} - shown == left_out


def test_the_dashboard_can_be_imported(dashboard: dict[str, Any]) -> None:
    assert dashboard["id"] is None
    assert dashboard["uid"] == "kvcached"
    panels = dashboard["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids))
    for panel in panels:
        assert panel["type"] in {"row", "stat", "timeseries"}
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_no_two_panels_overlap(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_selector_uses_labels_that_its_metric_has(dashboard: dict[str, Any]) -> None:
    for expression in expressions(dashboard):
        for name, selector in re.findall(r"\b(kvcached_\w+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)=~", selector)) <= set(labels_of(FAMILIES[name])), expression


def test_counters_are_only_read_as_rates(dashboard: dict[str, Any], rules: list[dict[str, Any]]) -> None:
    for expression in (*expressions(dashboard), *(rule["expr"] for rule in rules)):
        for name in named(expression):
            if FAMILIES[name].counter:
                assert re.search(rf"(rate|increase)\({name}\b", expression), expression


def test_alerts_have_the_form_that_prometheus_reads(rules: list[dict[str, Any]]) -> None:
    assert len({rule["alert"] for rule in rules}) == len(rules) == 8
    for rule in rules:
        assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert re.fullmatch(r"Kvcached[A-Za-z]+", rule["alert"])
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_alerts_are_about_metrics_that_exist_and_labels_that_they_keep(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        metrics = named(rule["expr"])
        assert metrics, rule["alert"]
        assert metrics <= FAMILIES.keys(), rule["alert"]
        kept = set(re.split(r",\s*", ",".join(re.findall(r"by \(([^)]*)\)", rule["expr"]))))
        shown = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        assert shown <= kept, rule["alert"]


def test_the_runbook_says_what_to_do_about_every_alert(rules: list[dict[str, Any]]) -> None:
    headings = set(re.findall(r"^### (Kvcached\w+)", RUNBOOK.read_text(), re.MULTILINE))
    assert headings == {rule["alert"] for rule in rules}


def test_every_figure_that_is_a_size_is_in_bytes() -> None:
    def is_size(family: Family) -> bool:
        return family.figure.endswith(("_bytes", "_bytes_total"))

    assert all("_bytes" in family.name for family in (*DEVICE_FAMILIES, *MEMBER_FAMILIES) if is_size(family))
