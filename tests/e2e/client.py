"""The OpenAI API of one server, as far as the matrix uses it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

MODEL = "model"
"""The name under which every server of the suite serves its model."""


@dataclass(frozen=True)
class Answer:
    """One completion.

    Attributes:
        prompt: Which prompt, by name.
        tokens: Ids of the output tokens.
        cached_tokens: Prompt tokens that the server says it took from its prefix cache.
        error: Empty, or what went wrong; then the rest is empty.
    """

    prompt: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Client:
    """Sends requests to ``127.0.0.1:port``; every failure is a value, so that one lost request does not end a run."""

    def __init__(self, port: int, *, timeout_seconds: float = 300) -> None:
        self._port = port
        self._timeout_seconds = timeout_seconds

    def complete(self, name: str, prompt: str, max_tokens: int) -> Answer:
        """One greedy completion of exactly ``max_tokens`` tokens (the end-of-text token is ignored)."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        started = time.monotonic()
        try:
            status, answer = self.post("/v1/completions", body)
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            return Answer(name, seconds=time.monotonic() - started, error=f"{type(error).__name__}: {error}")
        if status != 200:
            return Answer(name, seconds=time.monotonic() - started, error=f"HTTP {status}: {answer}")
        return _read_answer(name, answer, max_tokens, time.monotonic() - started)

    def complete_all(self, prompts: Sequence[tuple[str, str]], max_tokens: int) -> list[Answer]:
        """All at once, one connection each; answers in the order of the prompts."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.complete(*prompt, max_tokens), prompts))

    def post(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """POST and return status and decoded body (text where it is no JSON)."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._timeout_seconds)
        try:
            connection.request("POST", path, json.dumps(body or {}), {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        is_json = (response.headers.get("Content-Type") or "").startswith("application/json")
        return response.status, json.loads(data) if is_json else data.decode(errors="replace")


def _read_answer(name: str, answer: Any, max_tokens: int, seconds: float) -> Answer:
    choice, usage = answer["choices"][0], answer["usage"]
    tokens = tuple(choice["token_ids"])
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        prompt=name,
        tokens=tokens,
        text=choice["text"],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=details.get("cached_tokens") or 0,
        seconds=seconds,
        error="" if len(tokens) == max_tokens else f"{len(tokens)} tokens instead of {max_tokens}",
    )
