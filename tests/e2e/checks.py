"""What must hold for a case, decided from the records of its two runs alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tests.e2e.phases import CACHED, SEQUENTIAL

IDLE_FOOTPRINT_BYTES = 64 << 20
"""What an engine with nothing to keep may hold for KV."""

DRIVER_SHARE = 0.8
"""Of what the ledger says came back, the driver must show at least this: the engine allocates beside its cache."""

INTERRUPTED = (0, 130, -2)  # a normal exit, the shell's code for SIGINT, death by it
CRASHED = (-4, -6, -7, -8, -11)  # SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV


class Outcome(Enum):
    PASS = "pass"
    FAIL = "FAIL"
    SKIP = "skip"


@dataclass(frozen=True)
class Check:
    """One finding: of the native server, of the elastic one, or of the two side by side."""

    name: str
    of: str
    outcome: Outcome
    detail: str = ""


Record = dict[str, Any]


def check_case(native: Record | None, elastic: Record | None) -> list[Check]:
    """Every check of one case, in the order in which things happen. A run that is not there yields none."""
    found = [check for record in (native, elastic) if record for check in _check_run(record, native)]
    if native and elastic and native.get("passes") and elastic.get("passes"):
        found += _compare(native, elastic)
    return found


def _check_run(record: Record, native: Record | None) -> Iterator[Check]:
    mode = record["mode"]

    def check(name: str, holds: bool, detail: str = "") -> Check:
        return Check(name, mode, Outcome.PASS if holds else Outcome.FAIL, detail)

    ready = "ready_seconds" in record
    yield check("server_ready", ready, f"{record['ready_seconds']:.0f} s" if ready else record["ready_error"])
    if ready:
        for phase, answers in record["passes"][0].items():
            errors = [f"{answer['prompt']}: {answer['error']}" for answer in answers if answer["error"]]
            yield check(f"{phase}_ok", not errors, "; ".join(errors[:3]))
        yield check("prefix_cache_reset", all(record["resets"]), f"{record['resets']}")
        yield check("server_alive_after_load", record["alive_after_load"])
    yield _check_exit(record, native)
    yield check("no_error_signatures", not record["error_signatures"], "; ".join(record["error_signatures"][:2]))
    yield from _check_presence(record)
    left = record["left_on_device"]
    if left is None:
        yield Check("no_gpu_process_left", mode, Outcome.SKIP, "no GPU")
    else:
        yield check("no_gpu_process_left", not left, ", ".join(map(str, left)))
    if mode == "elastic":
        if ready:
            yield _check_memory(record["readings"])
        members = record["members_after_exit"]
        yield check("ledger_empty_after_exit", not members, ", ".join(members))


def _check_exit(record: Record, native: Record | None) -> Check:
    """The server ended in time, leaving nothing, with a code that means an interrupt or that the native one has too."""
    ended = record["exit"]
    usual = INTERRUPTED if native is None else (*INTERRUPTED, native["exit"]["code"])
    clean = not ended["left"] and ended["code"] is not None and ended["code"] in usual
    left = f", killed: {', '.join(ended['left'])}" if ended["left"] else ""
    detail = f"code {ended['code']} after {ended['seconds']:.1f} s{left}"
    return Check("clean_exit_on_signal", record["mode"], Outcome.PASS if clean else Outcome.FAIL, detail)


def _check_presence(record: Record) -> Iterator[Check]:
    """The start-up line and the ledger agree that kvcached is on, or that it is not there at all."""
    line = record["active_line"]
    members = record["readings"]["ready"]["members"] if "readings" in record else []
    named = [member for member in members if member["name"] == record["case"]]
    if record["mode"] == "native":
        yield Check("kvcached_inactive", "native", Outcome.FAIL if line or named else Outcome.PASS, line)
    else:
        detail = line or "no start-up line"
        yield Check("kvcached_active", "elastic", Outcome.PASS if line and named else Outcome.FAIL, detail)


def _check_memory(readings: Record) -> Check:
    """After the reset the KV memory is back: in the ledger, and in the driver where there is one."""
    ready, full, after = (readings[moment]["resident_bytes"] for moment in ("ready", "full", "after_reset"))
    returned = full - after
    detail = f"{ready >> 20} MiB when ready, {full >> 20} full, {after >> 20} after the reset"
    holds = full > ready and after <= max(ready, IDLE_FOOTPRINT_BYTES)
    driver_full, driver_after = (readings[moment]["driver_bytes"] for moment in ("full", "after_reset"))
    if driver_full is not None:
        detail += f"; in the driver {driver_full >> 20}, then {driver_after >> 20}"
        holds = holds and driver_full - driver_after >= DRIVER_SHARE * returned
    return Check("memory_returns_after_reset", "elastic", Outcome.PASS if holds else Outcome.FAIL, detail)


def _compare(native: Record, elastic: Record) -> Iterator[Check]:
    for phase in SEQUENTIAL:
        yield _compare_tokens(phase, native, elastic)
    for phase in CACHED:
        counts = [[answer["cached_tokens"] for answer in record["passes"][0][phase]] for record in (native, elastic)]
        outcome = Outcome.PASS if counts[0] == counts[1] else Outcome.FAIL
        yield Check(f"{phase}_cached_tokens_equal", "both", outcome, f"native {counts[0]}, elastic {counts[1]}")


def _compare_tokens(phase: str, native: Record, elastic: Record) -> Check:
    """Every prompt on which the native engine repeats itself has the same tokens from the elastic one."""
    first, second = ([answer["tokens"] for answer in one_pass[phase]] for one_pass in native["passes"][:2])
    ours = [answer["tokens"] for answer in elastic["passes"][0][phase]]
    names = [answer["prompt"] for answer in native["passes"][0][phase]]
    repeated = [place for place, tokens in enumerate(first) if tokens and tokens == second[place]]
    different = [place for place in repeated if ours[place] != first[place]]
    detail = f"{len(repeated) - len(different)} equal, {len(repeated)} repeated by native, {len(first)} prompts"
    if different:
        firsts = (f"{names[place]} from token {_first_difference(first[place], ours[place])}" for place in different)
        detail += "; " + ", ".join(firsts)
    if not repeated:
        return Check(f"{phase}_tokens_equal", "both", Outcome.SKIP, detail)
    return Check(f"{phase}_tokens_equal", "both", Outcome.FAIL if different else Outcome.PASS, detail)


def _first_difference(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))
