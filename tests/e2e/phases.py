"""What a case asks its server, in order. The text depends on nothing but this file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.e2e.client import Answer, Client
from tests.models.text import document

GENERATED_TOKENS = 64
QUESTION_TOKENS = 32
FILL_TOKENS = 16
NUM_ROUNDS = 3

Prompts = list[tuple[str, str]]

SEQUENTIAL = ("gen_seq", *(f"apc_{count}" for count in range(NUM_ROUNDS)))
"""Phases that send one request at a time: the engine batches nothing, so their tokens can be compared."""
CACHED = tuple(f"apc_{count}" for count in range(NUM_ROUNDS))


def generation_prompts() -> Prompts:
    """Six short prompts, and one of 300, 900 and 1800 words."""
    lengths = (6, 8, 10, 12, 14, 16, 300, 900, 1800)
    return [(f"words{length}", document(length, f"generation {length}")) for length in lengths]


def question_prompts() -> Prompts:
    """Four questions about one document of 1300 words, which they share as their prefix."""
    shared = document(1300, "shared document")
    return [(f"question{n}", f"{shared} {document(12, f'question {n}')}") for n in range(4)]


def fill_prompts() -> Prompts:
    """Sixteen prompts of 900 words that share nothing: the cache has to grow for them."""
    return [(f"fill{n}", document(900, f"fill {n}")) for n in range(16)]


def run_phases(client: Client, reset: Callable[[], bool]) -> Iterator[tuple[str, list[Answer] | bool]]:
    """Run one pass and yield each phase's name with its answers, or whether the prefix-cache reset succeeded.

    The cache is full of the last phase's prompts when the pass is over; resetting it is left to the caller, who
    measures around it.
    """
    yield "gen_seq", [client.complete(*prompt, GENERATED_TOKENS) for prompt in generation_prompts()]
    yield "gen_conc", client.complete_all(generation_prompts(), GENERATED_TOKENS)
    yield "prefix_cache_reset", reset()
    for phase in CACHED:
        yield phase, [client.complete(*prompt, QUESTION_TOKENS) for prompt in question_prompts()]
    yield "apc_conc", client.complete_all(question_prompts(), QUESTION_TOKENS)
    yield "fill", client.complete_all(fill_prompts(), FILL_TOKENS)
