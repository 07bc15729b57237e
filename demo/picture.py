"""The picture: the memory of two servers over time, with the request rate under it."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from demo.course import Course
from demo.memory import Sample
from demo.workload import ENGINES, MIB

COLOURS = {"A": "#2f6db5", "B": "#e08a2c"}
INK = "#333333"
RATE_WINDOW_SECONDS = 3.0


def draw(path: Path, *, budget_bytes: int, course: Course, samples: list[Sample], model: str) -> None:
    """Write the picture as a PNG."""
    start = course.spans[0].started
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK}):
        figure, (memory, rate) = plt.subplots(
            2, 1, figsize=(10, 5.6), dpi=150, sharex=True, height_ratios=(3, 1), layout="constrained"
        )
        _draw_memory(memory, samples, start, budget_bytes)
        _draw_rate(rate, course, start, samples[-1].time - start)
        for axes in (memory, rate):
            _draw_phases(axes, course, start, titled=axes is memory)
        memory.set_xlim(0, samples[-1].time - start)
        figure.suptitle(f"Two vLLM servers on one {budget_bytes // MIB} MiB budget ({model})", x=0.01, ha="left")
        figure.savefig(path)
        plt.close(figure)


def _draw_memory(axes: plt.Axes, samples: list[Sample], start: float, budget_bytes: int) -> None:
    times = [each.time - start for each in samples]
    held = [[each.resident_bytes[name] / MIB for each in samples] for name in ENGINES]
    axes.stackplot(times, *held, colors=[COLOURS[name] for name in ENGINES], alpha=0.85, linewidth=0, step="post")
    axes.axhline(budget_bytes / MIB, color=INK, linewidth=1, linestyle="--")
    axes.annotate("budget", (1, budget_bytes / MIB), (0, 3), xycoords=("axes fraction", "data"),
                  textcoords="offset points", ha="right", va="bottom", fontsize=9)  # fmt: skip
    axes.set_ylim(0, budget_bytes / MIB * 1.18)
    axes.set_ylabel("KV memory, MiB")
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in ENGINES]
    axes.legend(handles, [f"server {name}" for name in ENGINES], frameon=False, loc="lower left", ncols=2)


def _draw_rate(axes: plt.Axes, course: Course, start: float, length: float) -> None:
    """Requests begun per second, over a moving window."""
    times = np.arange(0, length, 0.1)
    for name in ENGINES:
        begun = np.array([each.started - start for each in course.answers if each.request.engine == name])
        recent = (begun <= times[:, None]) & (begun > times[:, None] - RATE_WINDOW_SECONDS)
        rates = recent.sum(axis=1) / RATE_WINDOW_SECONDS
        axes.fill_between(times, rates, color=COLOURS[name], alpha=0.25, linewidth=0)
        axes.plot(times, rates, color=COLOURS[name], linewidth=1.5)
    axes.set_ylabel("requests / s")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")


def _draw_phases(axes: plt.Axes, course: Course, start: float, *, titled: bool) -> None:
    for span in course.spans:
        axes.axvline(span.started - start, color=INK, linewidth=0.5, alpha=0.4)
        if titled:
            middle = (span.started + span.ended) / 2 - start
            axes.annotate(span.title, (middle, 1), xycoords=("data", "axes fraction"), ha="center", va="top")
    axes.axvline(course.spans[-1].ended - start, color=INK, linewidth=0.5, alpha=0.4)
