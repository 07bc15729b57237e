"""Runs the phases against two started servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from demo.engine import Answer, Engine
from demo.workload import Phase


@dataclass(frozen=True)
class Span:
    """When a phase ran (``time.monotonic``)."""

    title: str
    started: float
    ended: float


@dataclass
class Course:
    """What happened: phases, and answers in the order in which they came."""

    spans: list[Span] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def tokens(self) -> dict[str, list[int]]:
        """Output token ids by request id."""
        return {answer.request.id: list(answer.token_ids) for answer in self.answers}


def run_phases(
    engines: Mapping[str, Engine],
    phases: list[Phase],
    *,
    announce: Callable[[Phase], None],
    progress: Callable[[Answer], None],
) -> Course:
    """Ask everything of every phase; servers work side by side, each on one request at a time."""
    course = Course()
    lock = threading.Lock()
    stopping = threading.Event()

    def load(engine: Engine, phase: Phase) -> None:
        for request in phase.of(engine.name):
            if stopping.is_set():
                return
            answer = engine.answer(request)
            with lock:
                course.answers.append(answer)
                progress(answer)

    with ThreadPoolExecutor(len(engines)) as pool:
        try:
            for phase in phases:
                announce(phase)
                started = time.monotonic()
                if phase.drops_caches:
                    for engine in engines.values():
                        engine.reset_prefix_cache()
                for loading in [pool.submit(load, engine, phase) for engine in engines.values()]:
                    loading.result()
                time.sleep(max(0.0, started + phase.seconds - time.monotonic()))
                course.spans.append(Span(phase.title, started, time.monotonic()))
        finally:
            stopping.set()  # leaving the pool waits for the requests under way, not for the rest of the phase
    return course
