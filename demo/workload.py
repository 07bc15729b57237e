"""What the two servers are asked, and when.

Every server answers one request at a time, and no two prompts share a block, so each forward pass has the same shape
in every run: in bfloat16 a native engine differs from itself as soon as its batches differ. Nothing is lost by it:
what fills the memory is the prefix cache, which keeps every prompt until somebody else needs the room.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
SOURCE = Path(__file__).resolve().parent.parent / "LICENSE"
ENGINES = ("A", "B")


@dataclass(frozen=True)
class Request:
    """One greedy completion."""

    engine: str
    number: int
    prompt: str
    output_tokens: int

    @property
    def id(self) -> str:
        return f"{self.engine}{self.number}"


@dataclass(frozen=True)
class Phase:
    """A part of the demo.

    Attributes:
        requests: What the servers are asked, each one request after another.
        seconds: How long the phase lasts at least.
        drops_caches: It begins with both servers dropping their prefix caches.
    """

    title: str
    requests: tuple[Request, ...] = ()
    seconds: float = 0.0
    drops_caches: bool = False

    def of(self, engine: str) -> list[Request]:
        return [request for request in self.requests if request.engine == engine]


@dataclass(frozen=True)
class Scale:
    """How much is asked of which model.

    Attributes:
        model: Its name as people know it.
        budget_bytes: What both servers share. One phase's requests of one server would fill it alone.
        alone: Requests in a phase of one server.
        both: Requests per server in the phase of both.
    """

    model: str
    budget_bytes: int
    prompt_words: int
    output_tokens: int
    alone: int
    both: int


# SmolLM2-135M keeps 22.5 KiB of KV per token, a prompt here has about 1,100 tokens: 25 MiB. The tiny model keeps 2 KiB.
FULL = Scale("SmolLM2-135M-Instruct", 320 * MIB, prompt_words=800, output_tokens=24, alone=16, both=12)
QUICK = Scale("a tiny random Llama", 24 * MIB, prompt_words=300, output_tokens=8, alone=16, both=16)


def phases(scale: Scale) -> list[Phase]:
    """The demo's course. All prompts in it are different."""
    loads = {engine: _Load(engine, scale) for engine in ENGINES}
    return [
        Phase("A loaded", loads["A"].take(scale.alone)),
        Phase("A idle", seconds=4.0),
        Phase("B loaded", loads["B"].take(scale.alone)),
        Phase("both", loads["A"].take(scale.both) + loads["B"].take(scale.both)),
        Phase("caches dropped", seconds=6.0, drops_caches=True),
    ]


class _Load:
    """The endless stream of one server's requests."""

    def __init__(self, engine: str, scale: Scale) -> None:
        self._engine = engine
        self._scale = scale
        self._taken = 0

    def take(self, count: int) -> tuple[Request, ...]:
        first, self._taken = self._taken + 1, self._taken + count
        return tuple(self._request(number) for number in range(first, self._taken + 1))

    def _request(self, number: int) -> Request:
        # The name comes first: prompts that differ in their first block share nothing in a prefix cache.
        document = _document(f"{self._engine}{number}", self._scale.prompt_words)
        prompt = f"Document {self._engine}{number}. {document}\nThe document above is about"
        return Request(self._engine, number, prompt, self._scale.output_tokens)


def _document(seed: str, num_words: int) -> str:
    """Sentences of a well-known text in an order of the seed's own."""
    sentences = [" ".join(each.split()) for each in re.split(r"(?<=[.;:])\s+", SOURCE.read_text())]
    random.Random(seed).shuffle(sentences)
    return " ".join(" ".join(sentences).split()[:num_words])
