"""What a person sees while it runs and at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvcached_core.sizes import format_bytes
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from demo.engine import Answer
from demo.memory import Sample
from demo.result import Result
from demo.workload import ENGINES, Phase

BAR_CELLS = 40
STYLES = {"A": "blue", "B": "yellow"}


class View:
    """Progress lines, and in a terminal one bar of memory per server under them."""

    def __init__(self, console: Console, budget_bytes: int) -> None:
        self.console = console
        self._budget_bytes = budget_bytes
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._resident_bytes = dict.fromkeys(ENGINES, 0)
        self._wanted = dict.fromkeys(ENGINES, 0)
        self._answered = dict.fromkeys(ENGINES, 0)

    def say(self, words: str) -> None:
        """One line of progress, with the time since the start."""
        self.console.print(f"[dim]{time.monotonic() - self._started:6.1f} s[/]  {words}", soft_wrap=True)

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show the bars while the body runs, where there is a terminal."""
        if not self.console.is_terminal:
            yield
            return
        with Live(get_renderable=self._bars, console=self.console, refresh_per_second=10, transient=True):
            yield

    def announce(self, phase: Phase) -> None:
        with self._lock:
            self._wanted = {name: len(phase.of(name)) for name in ENGINES}
            self._answered = dict.fromkeys(ENGINES, 0)
            held = ", ".join(f"{name} {format_bytes(self._resident_bytes[name])}" for name in ENGINES)
        self.say(f"[bold]{phase.title}[/]  (memory now: {held})")

    def answered(self, answer: Answer) -> None:
        with self._lock:
            self._answered[answer.request.engine] += 1

    def sampled(self, sample: Sample) -> None:
        with self._lock:
            self._resident_bytes = sample.resident_bytes

    def _bars(self) -> Text:
        with self._lock:
            return Text("\n").join(self._bar(name) for name in ENGINES)

    def _bar(self, name: str) -> Text:
        held = self._resident_bytes[name]
        full = min(BAR_CELLS, round(BAR_CELLS * held / self._budget_bytes))
        wanted = self._wanted[name]
        doing = f"request {min(self._answered[name] + 1, wanted)} of {wanted}" if wanted else "idle"
        return Text.assemble(
            (f"{name} ", "bold"),
            ("█" * full, STYLES[name]),
            ("░" * (BAR_CELLS - full), "dim"),
            f" {format_bytes(held):>10}  {doing}",
        )

    def conclude(self, result: Result) -> None:
        """The table of figures and the checks."""
        table = Table(box=None, header_style="bold", pad_edge=False)
        for heading in ("SERVER", "REQUESTS", "OUTPUT TOKENS", "PEAK KV MEMORY", "AFTER TRIM"):
            table.add_column(heading, justify="left" if heading == "SERVER" else "right")
        for name, figures in result.engines.items():
            peak, trimmed = format_bytes(figures.peak_resident_bytes), format_bytes(figures.resident_bytes_after_trim)
            table.add_row(name, str(figures.requests), str(figures.output_tokens), peak, trimmed)
        self.console.print()
        self.console.print(table)
        self.console.print(
            f"\nBudget {format_bytes(result.budget_bytes)}, at most {format_bytes(result.peak_total_bytes)} used. "
            f"B reused {format_bytes(result.b_reused_bytes)} that A had filled{_promptness(result)}."
        )
        for claim, holds in result.checks.items():
            self.console.print("[green]yes[/]" if holds else "[bold red]NO [/]", claim)
        if result.differing:
            self.console.print(f"different from native: {', '.join(result.differing)}")


def _promptness(result: Result) -> str:
    if result.seconds_to_first_return is None:
        return ""
    return f"; A gave the first of it back {result.seconds_to_first_return:.2f} s after B's first request"
