"""The matrix's report: Markdown from the records, and nothing that is not in them."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.cases import Case
from tests.e2e.checks import Check, Outcome, check_case
from tests.e2e.run import MODES

Records = Mapping[tuple[str, str], dict[str, Any]]
Findings = dict[str, list[Check]]


def read_records(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Every finished run in a folder, by case and mode."""
    records = (json.loads(path.read_text()) for path in sorted(folder.glob("*.json")))
    return {(record["case"], record["mode"]): record for record in records}


def write_report(out: Path, cases: Sequence[Case], records: Records, setup: Mapping[str, Any]) -> Findings:
    """Write ``report.md`` and ``report.json`` into ``out``.

    Returns:
        The checks of every case that has a run, by name.
    """
    findings = {
        case.name: check_case(*(records.get((case.name, mode)) for mode in MODES))
        for case in cases
        if any((case.name, mode) in records for mode in MODES)
    }
    engines = dict.fromkeys(f"{record['engine']} {record['release']}" for record in records.values())
    setup = {**setup, "engines": ", ".join(engines)}
    document = {
        "setup": setup,
        "cases": {
            name: [{"name": c.name, "of": c.of, "outcome": c.outcome.value, "detail": c.detail} for c in checks]
            for name, checks in findings.items()
        },
        "runs": [records[key] for key in sorted(records) if key[0] in findings],
    }
    (out / "report.json").write_text(json.dumps(document))
    (out / "report.md").write_text("\n".join(_markdown(cases, findings, records, setup)) + "\n")
    return findings


def summary(checks: Iterable[Check]) -> str:
    """``"212 passed, 3 failed, 9 skipped"``."""
    counts = Counter(check.outcome for check in checks)
    return f"{counts[Outcome.PASS]} passed, {counts[Outcome.FAIL]} failed, {counts[Outcome.SKIP]} skipped"


def _markdown(cases: Sequence[Case], findings: Findings, records: Records, setup: Mapping[str, Any]) -> Iterable[str]:
    checks = [check for found in findings.values() for check in found]
    yield "# Correctness matrix"
    yield ""
    yield f"{len(findings)} cases, {summary(checks)}. A case is a native and an elastic server with the same flags."
    yield ""
    failures = [(name, check) for name, found in findings.items() for check in found if check.outcome is Outcome.FAIL]
    if failures:
        yield from ("## Failures", "")
        yield from (f"- `{name}` ({check.of}) **{check.name}**: {check.detail}" for name, check in failures)
        yield ""
    yield from ("## Set-up", "")
    yield from (f"- {name}: {value}" for name, value in setup.items())
    yield from ("", "## Cases", "")
    yield from _table(
        ("case", "engine", "layout", "ready native / elastic", "checks", "KV resident: ready, full, after reset"),
        (_case_row(name, found, records) for name, found in findings.items()),
    )
    not_run = [(case, case.why_not(int(setup["GPUs"]))) for case in cases if case.name not in findings]
    if not_run:
        yield from (
            "",
            "Not run: " + "; ".join(f"`{case.name}` ({why or 'not selected'})" for case, why in not_run) + ".",
        )
    yield from ("", "## Checks", "")
    yield from _table(("check", "of", "pass", "fail", "skip"), _check_rows(checks))
    yield from ("", "## Commands", "")
    for name in findings:
        yield from (_command(records[name, mode]) for mode in MODES if (name, mode) in records)


def _case_row(name: str, checks: Sequence[Check], records: Records) -> tuple[str, ...]:
    native, elastic = (records.get((name, mode), {}) for mode in MODES)
    any_record = native or elastic
    failed = sum(check.outcome is Outcome.FAIL for check in checks)
    readings = elastic.get("readings")
    memory = "-"
    if readings:
        moments = (readings[moment]["resident_bytes"] for moment in ("ready", "full", "after_reset"))
        memory = ", ".join(f"{moment / 2**20:.0f} MiB" for moment in moments)
    return (
        f"`{name}`",
        f"{any_record['engine']} {any_record['release']}",
        elastic.get("layout") or native.get("layout") or "-",
        " / ".join(f"{run['ready_seconds']:.0f} s" if "ready_seconds" in run else "-" for run in (native, elastic)),
        f"**{failed} failed**" if failed else "pass",
        memory,
    )


def _check_rows(checks: Sequence[Check]) -> Iterable[tuple[str, ...]]:
    counts = Counter((check.name, check.of, check.outcome) for check in checks)
    for name, of in dict.fromkeys((check.name, check.of) for check in checks):
        yield (
            name,
            of,
            *(str(counts[name, of, outcome] or "") for outcome in (Outcome.PASS, Outcome.FAIL, Outcome.SKIP)),
        )


def _command(record: Mapping[str, Any]) -> str:
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in record["variables"].items())
    return f"- `{record['case']}` {record['mode']}: `{variables} {shlex.join(record['command'])}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" * len(head)
    yield from ("| " + " | ".join(row) + " |" for row in rows)
