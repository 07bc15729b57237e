"""Two to 64 engines with bursty demand on one device: a static split, first come first served, and kvcached's sharing.

    python benchmarks/simulate.py

No engine and no GPU: a seeded trace of requests, and the product's own ``sharing.targets`` and ``sharing.limits``. The
same seed gives the same figures on any machine. Writes ``build/sim/result.json`` and ``build/sim/sharing.png`` and
prints the table.

The model. A request holds its KV bytes from its admission to its end; it is admitted whole, in the order of arrival in
its engine. An engine keeps what finished requests leave (a prefix cache) until somebody needs it. What is given back
can be granted one tick later. ``static``: every engine has its weight's part of the device for good. ``first_come``:
engines give back all that is idle while anybody is short, and whoever has waited longest is served first. ``kvcached``:
who is above its target gives back what is idle, requests are preempted for another's unmet floor alone, and nobody
grows beyond its target.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcached_core.sharing import Share, limits, targets
from kvcached_core.sizes import format_bytes

GIB = 2**30
CAPACITY_BYTES = 128 * GIB
MEMBERS = (2, 4, 8, 16, 32, 64)
WEIGHTS = (1.0, 2.0, 4.0)  # in turn
TRACE_SECONDS = 600.0
TICK_SECONDS = 0.25

OFFERED_LOAD = 0.9  # of the capacity, on average over the trace
BURST_SECONDS, QUIET_SECONDS = 10.0, 40.0  # mean lengths; nothing arrives while it is quiet
HOLD_SECONDS = 10.0  # mean length of a request
REQUEST_BYTES, REQUEST_SIGMA = GIB // 8, 0.8  # median of a log-normal size
LARGEST_REQUEST_BYTES = GIB
MEAN_REQUEST_BYTES = int(REQUEST_BYTES * 1.36)  # of this log-normal, cut at the largest request

OUT = Path(__file__).resolve().parent.parent / "build" / "sim"


# --- the trace -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Request:
    arrives_seconds: float
    num_bytes: int
    hold_seconds: float


def make_trace(seed: int, num_members: int) -> list[list[Request]]:
    """Each member's requests, by arrival. Bursts come at a member's own times; heavier members get more."""
    total_weight = sum(weight_of(member) for member in range(num_members))
    traces = []
    for member in range(num_members):
        choose = random.Random(f"{seed}/{num_members}/{member}")
        held_bytes = OFFERED_LOAD * CAPACITY_BYTES * weight_of(member) / total_weight
        busy_part = BURST_SECONDS / (BURST_SECONDS + QUIET_SECONDS)
        per_second = held_bytes / MEAN_REQUEST_BYTES / HOLD_SECONDS / busy_part
        traces.append([make_request(choose, arrival) for arrival in arrivals(choose, per_second)])
    return traces


def arrivals(choose: random.Random, per_second: float) -> Iterator[float]:
    now = choose.expovariate(1 / QUIET_SECONDS)
    while now < TRACE_SECONDS:
        ends = now + choose.expovariate(1 / BURST_SECONDS)
        while (now := now + choose.expovariate(per_second)) < min(ends, TRACE_SECONDS):
            yield now
        now = ends + choose.expovariate(1 / QUIET_SECONDS)


def make_request(choose: random.Random, arrival: float) -> Request:
    num_bytes = int(REQUEST_BYTES * choose.lognormvariate(0, REQUEST_SIGMA))
    return Request(arrival, min(num_bytes, LARGEST_REQUEST_BYTES), choose.expovariate(1 / HOLD_SECONDS))


def weight_of(member: int) -> float:
    return WEIGHTS[member % len(WEIGHTS)]


# --- engines -------------------------------------------------------------------------------------------------------


@dataclass
class Engine:
    """One member: its lease, its running and its waiting requests."""

    weight: float
    coming: deque[Request]
    lease_bytes: int = 0
    in_use_bytes: int = 0
    waiting_bytes: int = 0
    waiting: deque[Request] = field(default_factory=deque)
    running: list[tuple[float, Request]] = field(default_factory=list)  # a heap, by end
    waits_seconds: list[float] = field(default_factory=list)
    preemptions: int = 0

    @property
    def demand_bytes(self) -> int:
        return self.in_use_bytes + self.waiting_bytes

    @property
    def unmet_bytes(self) -> int:
        return max(0, self.demand_bytes - self.lease_bytes)

    def advance(self, now: float) -> None:
        """Requests end and arrive."""
        while self.running and self.running[0][0] <= now:
            self.in_use_bytes -= heapq.heappop(self.running)[1].num_bytes
        while self.coming and self.coming[0].arrives_seconds <= now:
            self.waiting.append(self.coming.popleft())
            self.waiting_bytes += self.waiting[-1].num_bytes

    def admit(self, now: float) -> None:
        """Start what fits into the lease, in order."""
        while self.waiting and self.in_use_bytes + self.waiting[0].num_bytes <= self.lease_bytes:
            request = self.waiting.popleft()
            self.waiting_bytes -= request.num_bytes
            self.in_use_bytes += request.num_bytes
            self.waits_seconds.append(now - request.arrives_seconds)
            heapq.heappush(self.running, (now + request.hold_seconds, request))

    def preempt(self, limit_bytes: int) -> None:
        """Stop those that would run longest until the rest is within the limit; they wait again, first in line."""
        while self.in_use_bytes > limit_bytes:
            last = max(self.running)
            self.running.remove(last)
            heapq.heapify(self.running)
            self.waiting.appendleft(last[1])
            self.waiting_bytes += last[1].num_bytes
            self.in_use_bytes -= last[1].num_bytes
            self.preemptions += 1

    def share(self) -> Share:
        return Share(
            floor_bytes=LARGEST_REQUEST_BYTES,
            ceiling_bytes=CAPACITY_BYTES,
            weight=self.weight,
            demand_bytes=self.demand_bytes,
            lease_bytes=self.lease_bytes,
            in_use_bytes=self.in_use_bytes,
        )


# --- policies: what moves in one tick --------------------------------------------------------------------------------


def unleased(engines: Sequence[Engine]) -> int:
    return CAPACITY_BYTES - sum(engine.lease_bytes for engine in engines)


def static(engines: Sequence[Engine]) -> None:
    total_weight = sum(engine.weight for engine in engines)
    for engine in engines:
        engine.lease_bytes = int(CAPACITY_BYTES * engine.weight / total_weight)


def first_come(engines: Sequence[Engine]) -> None:
    free = unleased(engines)
    if sum(engine.unmet_bytes for engine in engines) > free:
        for engine in engines:
            engine.lease_bytes = min(engine.lease_bytes, engine.demand_bytes)
    for engine in sorted((one for one in engines if one.waiting), key=lambda one: one.waiting[0]):
        granted = min(free, engine.unmet_bytes)
        engine.lease_bytes += granted
        free -= granted


def kvcached(engines: Sequence[Engine]) -> None:
    free = unleased(engines)
    shares = [engine.share() for engine in engines]
    pressed = any(engine.unmet_bytes for engine in engines)
    for engine, target, limit in zip(
        engines, targets(shares, CAPACITY_BYTES), limits(shares, CAPACITY_BYTES), strict=True
    ):
        engine.preempt(limit)
        if pressed and engine.lease_bytes > target:
            engine.lease_bytes = max(engine.in_use_bytes, target)
        granted = max(0, min(free, engine.unmet_bytes, target - engine.lease_bytes))
        engine.lease_bytes += granted
        free -= granted


POLICIES = {"static": static, "first_come": first_come, "kvcached": kvcached}


# --- measuring -----------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """Of one run, or of several together."""

    used: float = 0.0
    usable: float = 0.0
    share_errors: list[float] = field(default_factory=list)
    waits_seconds: list[float] = field(default_factory=list)
    preemptions: int = 0

    def note(self, engines: Sequence[Engine]) -> None:
        """One tick: what is used of what could be, and, where not all fits, how far below its fair share each is."""
        demand = sum(engine.demand_bytes for engine in engines)
        self.used += sum(engine.in_use_bytes for engine in engines)
        self.usable += min(demand, CAPACITY_BYTES)
        if demand > CAPACITY_BYTES:
            for engine, fair in zip(engines, fair_shares(engines), strict=True):
                if fair:
                    self.share_errors.append(max(0.0, fair - engine.in_use_bytes) / fair)

    def add(self, other: Measured) -> None:
        self.used += other.used
        self.usable += other.usable
        self.share_errors += other.share_errors
        self.waits_seconds += other.waits_seconds
        self.preemptions += other.preemptions

    def figures(self) -> dict[str, float]:
        return {
            "utilisation": round(self.used / self.usable, 4),
            "share_error_p95": round(percentile(self.share_errors, 95), 4),
            "wait_p50_seconds": round(percentile(self.waits_seconds, 50), 3),
            "wait_p99_seconds": round(percentile(self.waits_seconds, 99), 3),
            "preemptions": self.preemptions,
        }


def fair_shares(engines: Sequence[Engine]) -> list[float]:
    """Weighted max-min of the demands, by filling: written apart from the product's, to judge it by."""
    got = [0.0] * len(engines)
    left = float(CAPACITY_BYTES)
    open_ = {place for place, engine in enumerate(engines) if engine.demand_bytes}
    while open_ and left > 1:
        level = left / sum(engines[place].weight for place in open_)
        step = min([level, *((engines[place].demand_bytes - got[place]) / engines[place].weight for place in open_)])
        for place in open_:
            got[place] += step * engines[place].weight
            left -= step * engines[place].weight
        open_ = {place for place in open_ if engines[place].demand_bytes - got[place] > 1}
    return got


def percentile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0.0


def simulate(policy: str, traces: Sequence[Sequence[Request]]) -> Measured:
    """One policy on one trace; requests still waiting at its end have waited until then."""
    engines = [Engine(weight_of(member), deque(trace)) for member, trace in enumerate(traces)]
    measured = Measured()
    for tick in range(int(TRACE_SECONDS / TICK_SECONDS)):
        now = tick * TICK_SECONDS
        for engine in engines:
            engine.advance(now)
        POLICIES[policy](engines)
        for engine in engines:
            engine.admit(now)
        measured.note(engines)
    for engine in engines:
        measured.waits_seconds += engine.waits_seconds
        measured.waits_seconds += [TRACE_SECONDS - request.arrives_seconds for request in engine.waiting]
        measured.preemptions += engine.preemptions
    return measured


# --- results -------------------------------------------------------------------------------------------------------


def measure(seed: int, member_counts: Sequence[int] = MEMBERS) -> dict[str, Any]:
    """Every policy on the same traces. ``policies`` is over all of them, ``runs`` one by one."""
    together = {policy: Measured() for policy in POLICIES}
    runs = []
    for num_members in member_counts:
        traces = make_trace(seed, num_members)
        for policy in POLICIES:
            measured = simulate(policy, traces)
            together[policy].add(measured)
            runs.append({"members": num_members, "policy": policy, **measured.figures()})
    return {
        "seed": seed,
        "capacity_bytes": CAPACITY_BYTES,
        "trace_seconds": TRACE_SECONDS,
        "offered_load": OFFERED_LOAD,
        "policies": {policy: measured.figures() for policy, measured in together.items()},
        "runs": runs,
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{'members':>8} {'policy':<11}{'utilisation':>12}{'share error p95':>17}{'wait p50':>10}{'wait p99':>10}"]
    together = [{"members": "all", "policy": policy, **figures} for policy, figures in result["policies"].items()]
    for row in [*result["runs"], *together]:
        lines.append(
            f"{row['members']:>8} {row['policy']:<11}{row['utilisation']:>12.1%}{row['share_error_p95']:>17.1%}"
            f"{row['wait_p50_seconds']:>8.2f} s{row['wait_p99_seconds']:>8.1f} s"
        )
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {
        "utilisation": "used, of what could be",
        "share_error_p95": "below fair share, p95",
        "wait_p99_seconds": "wait for admission, p99 (s)",
    }
    figure, axes = pyplot.subplots(1, len(panels), figsize=(12, 3.6), layout="constrained")
    for axis, (figure_name, title) in zip(axes, panels.items(), strict=True):
        for policy in POLICIES:
            runs = [run for run in result["runs"] if run["policy"] == policy]
            axis.plot([run["members"] for run in runs], [run[figure_name] for run in runs], marker="o", label=policy)
        axis.set(title=title, xlabel="engines on the device", xscale="log")
        axis.set_xticks(MEMBERS, [str(count) for count in MEMBERS], minor=False)
        axis.minorticks_off()
    axes[-1].set_yscale("log")
    axes[0].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    result = measure(arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    plot(result, arguments.out / "sharing.png")
    print(
        f"{format_bytes(CAPACITY_BYTES)}, {TRACE_SECONDS:.0f} s, offered load {OFFERED_LOAD:.0%}, seed {arguments.seed}"
    )
    print(table(result))
    print(f"written: {arguments.out / 'result.json'}, {arguments.out / 'sharing.png'}")


if __name__ == "__main__":
    main()
