"""The picture: the memory of two servers over time, with the request rate under it."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from demo.course import Course
from demo.memory import Sample
from demo.workload import ENGINES, MIB

COLOURS = {"A": "#2f6db5", "B": "#e08a2c"}
INK = "#333333"
NARROW = 0.12  # a phase of a smaller part of the whole has its title in two lines


def draw(path: Path, *, budget_bytes: int, course: Course, samples: list[Sample], model: str) -> None:
    """Write the picture as a PNG."""
    start = course.spans[0].started
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK}):
        figure, (memory, rate) = plt.subplots(
            2, 1, figsize=(10, 5.6), dpi=150, sharex=True, height_ratios=(3, 1), layout="constrained"
        )
        _draw_memory(memory, samples, start, budget_bytes)
        _draw_rate(rate, course, start)
        _draw_phases((memory, rate), course, start)
        memory.set_xlim(0, samples[-1].time - start)
        figure.suptitle(f"Two vLLM servers, one memory budget ({model})", x=0.01, ha="left")
        handles = [Rectangle((0, 0), 1, 1, color=COLOURS[name], alpha=0.85) for name in ENGINES]
        labels = [f"server {name}" for name in ENGINES]
        figure.legend(handles, labels, frameon=False, loc="outside upper right", ncols=len(ENGINES))
        figure.savefig(path)
        plt.close(figure)


def _draw_memory(axes: Axes, samples: list[Sample], start: float, budget_bytes: int) -> None:
    times = [each.time - start for each in samples]
    held = [[each.resident_bytes[name] / MIB for each in samples] for name in ENGINES]
    axes.stackplot(times, *held, colors=[COLOURS[name] for name in ENGINES], alpha=0.85, linewidth=0)
    axes.axhline(budget_bytes / MIB, color=INK, linewidth=1, linestyle="--")
    label = f" budget {budget_bytes // MIB} MiB"
    axes.annotate(label, (0, budget_bytes / MIB), (0, 3), textcoords="offset points", va="bottom", fontsize=9)
    axes.set_ylim(0, budget_bytes / MIB * 1.22)
    axes.set_ylabel("KV memory, MiB")


def _draw_rate(axes: Axes, course: Course, start: float) -> None:
    """A server answers one request at a time: while one runs, the rate is one in the time it takes."""
    for name in ENGINES:
        times, rates = [0.0], [0.0]
        for answer in sorted(course.answers, key=lambda each: each.started):
            if answer.request.engine == name:
                rate = 1 / (answer.ended - answer.started)
                times += [answer.started - start, answer.ended - start]
                rates += [rate, 0.0]
        axes.fill_between(times, rates, step="post", color=COLOURS[name], alpha=0.25, linewidth=0)
        axes.step(times, rates, where="post", color=COLOURS[name], linewidth=1)
    axes.set_ylabel("requests / s")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")


def _draw_phases(both: tuple[Axes, Axes], course: Course, start: float) -> None:
    length = course.spans[-1].ended - start
    for span in course.spans:
        for axes in both:
            axes.axvline(span.started - start, color=INK, linewidth=0.5, alpha=0.4)
        narrow = span.ended - span.started < NARROW * length
        title = span.title.replace(" ", "\n") if narrow else span.title
        middle = (span.started + span.ended) / 2 - start
        both[0].annotate(title, (middle, 1), xycoords=("data", "axes fraction"), ha="center", va="top", fontsize=9)
