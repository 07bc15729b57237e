"""What the demo found: figures, checks, and their file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from demo.course import Course, Span
from demo.memory import Sample
from demo.reference import Reference
from demo.workload import ENGINES, Scale


@dataclass(frozen=True)
class EngineFigures:
    """One server's memory, in bytes, and its work.

    Attributes:
        peak_resident_bytes: The most it held.
        resident_bytes_after_trim: What it held at the end, its prefix cache dropped and nothing running.
    """

    peak_resident_bytes: int
    resident_bytes_after_trim: int
    requests: int
    output_tokens: int


@dataclass(frozen=True)
class Result:
    """The demo's outcome.

    Attributes:
        b_reused_bytes: What B held at its peak, while A was idle, beyond all that was not A's at A's peak.
        seconds_to_first_return: From B's first request to the first sample in which A held less.
        reference: ``this run`` or ``kept`` from an earlier one with the same ``reference_key``.
        differing: Requests whose tokens are not the native engine's.
    """

    tokens_equal: bool
    budget_bytes: int
    engines: dict[str, EngineFigures]
    a_bytes_kept_beside_b: int
    b_reused_bytes: int
    seconds_to_first_return: float | None
    peak_total_bytes: int
    reference: str
    reference_key: str
    differing: list[str]
    checks: dict[str, bool]

    @property
    def good(self) -> bool:
        return all(self.checks.values())

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def conclude(scale: Scale, course: Course, samples: list[Sample], native: Reference) -> Result:
    """Work out the figures and the checks."""
    differing = native.differing(course.tokens())
    figures = {name: _figures(name, course, samples) for name in ENGINES}
    span = {each.title: each for each in course.spans}
    a_peak = max(each.resident_bytes["A"] for each in _during(samples, span["A loaded"]))
    beside = _during(samples, span["B loaded"])
    b_peak = max(each.resident_bytes["B"] for each in beside)
    a_kept = min(each.resident_bytes["A"] for each in beside)
    reused = max(0, b_peak - (scale.budget_bytes - a_peak))
    contended = _during(samples, _both_loaded(course, span["both"]))
    peak_total = max(each.total_bytes for each in samples)
    checks = {
        "every token is the native engine's": not differing,
        "the budget was never exceeded": peak_total <= scale.budget_bytes,
        "A filled most of the budget": a_peak >= 0.75 * scale.budget_bytes,
        "B used memory that A had held": reused >= 0.25 * scale.budget_bytes,
        "A shared with B while both were loaded": _both_held(contended, scale.budget_bytes),
        "both returned their memory": samples[-1].total_bytes <= 0.1 * scale.budget_bytes,
    }
    return Result(
        tokens_equal=not differing,
        budget_bytes=scale.budget_bytes,
        engines=figures,
        a_bytes_kept_beside_b=a_kept,
        b_reused_bytes=reused,
        seconds_to_first_return=_seconds_to_first_return(beside, span["B loaded"].started),
        peak_total_bytes=peak_total,
        reference="kept" if native.kept else "this run",
        reference_key=native.key,
        differing=differing,
        checks=checks,
    )


def _figures(name: str, course: Course, samples: list[Sample]) -> EngineFigures:
    answers = [answer for answer in course.answers if answer.request.engine == name]
    return EngineFigures(
        peak_resident_bytes=max(each.resident_bytes[name] for each in samples),
        resident_bytes_after_trim=samples[-1].resident_bytes[name],
        requests=len(answers),
        output_tokens=sum(len(answer.token_ids) for answer in answers),
    )


def _during(samples: list[Sample], span: Span) -> list[Sample]:
    return [each for each in samples if span.started <= each.time <= span.ended]


def _both_loaded(course: Course, span: Span) -> Span:
    """The part of a span until one of the servers has answered everything: then its cache is the other's to take."""
    inside = (answer for answer in course.answers if span.started <= answer.ended <= span.ended)
    ends = {answer.request.engine: answer.ended for answer in inside}
    return replace(span, ended=min(ends.values(), default=span.ended))


def _both_held(samples: list[Sample], budget_bytes: int) -> bool:
    """At some moment each of the servers held a quarter of the budget at least."""
    return any(min(sample.resident_bytes.values()) >= 0.25 * budget_bytes for sample in samples)


def _seconds_to_first_return(samples: list[Sample], started: float) -> float | None:
    before = samples[0].resident_bytes["A"]
    return next((round(each.time - started, 3) for each in samples if each.resident_bytes["A"] < before), None)
