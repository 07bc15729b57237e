"""A stock engine and an elastic one of the same model and flags, told to do the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcached_core.ledger import Ledger

from tests.sglang.engine import KIB, MIB, Engine, Result, members, together, until

NAME = "gqa"
BUDGET = 64 * MIB
TOKEN = 4 * KIB
CAPACITY = int(BUDGET * 0.9) // TOKEN
EXTENT = 8 * 32 * KIB  # a page of each of four layers' K and V


@dataclass
class Engines:
    """The stock engine, the elastic one, and the ledger that the latter is in."""

    native: Engine
    elastic: Engine
    ledger: Ledger

    def check_equal(self, requests: list[list[int]], max_tokens: int) -> list[Result]:
        native, elastic = together([self.native, self.elastic], requests, max_tokens)
        assert all(len(each.tokens) == max_tokens for each in native)
        assert [each.message for each in elastic if each.message] == []
        assert [each.tokens for each in elastic] == [each.tokens for each in native]
        return elastic

    def flush(self) -> None:
        """No cached prefix in either."""
        for engine in (self.native, self.elastic):
            assert engine.do("flush_cache")


class Pair(Engines):
    """Engines of one rank each."""

    @property
    def resident_bytes(self) -> int:
        return members(self.ledger, NAME)[0].resident_bytes

    def limit(self, ceiling_bytes: int) -> None:
        self.ledger.set_limits(NAME, ceiling_bytes=ceiling_bytes)

    def unlimit(self) -> None:
        self.limit(BUDGET)

    def reset(self) -> None:
        """No limit, no cached prefix; the elastic engine has followed."""
        self.unlimit()
        self.flush()
        until(lambda: self.resident_bytes <= MIB, "memory back after the cache was flushed")


def settings(runtime_dir: Path, name: str = NAME, **more: str) -> dict[str, str]:
    return {
        "KVCACHED_STRICT": "1",
        "KVCACHED_NAME": name,
        "KVCACHED_HOST_BUDGET": str(BUDGET),
        "KVCACHED_PAGE_SIZE": str(32 * KIB),
        "KVCACHED_RUNTIME_DIR": str(runtime_dir),
        **more,
    }


@contextmanager
def started(
    model: Path,
    logs: Path,
    environment: Mapping[str, str],
    *,
    ranks: Sequence[Mapping[str, str]] = (),
    **flags: Any,
) -> Iterator[tuple[Engine, Engine, Ledger]]:
    """The stock engine, with the capacity that the elastic one has, that one, and the ledger that it is in.

    At the end the elastic one leaves nothing there.
    """
    elastic = Engine(model, logs / "elastic.log", environment, ranks=ranks, **flags)
    try:
        elastic.wait_ready()
        flags = {"max_total_tokens": elastic.do("capacity")} | flags
        # Asleep between its tests, so that it takes no core from the other one.
        native = Engine(model, logs / "native.log", None, sleep_on_idle=True, **flags)
        try:
            native.wait_ready()
            ledger = Ledger.open("host", None, runtime_dir=Path(environment["KVCACHED_RUNTIME_DIR"]))
            yield native, elastic, ledger
            elastic.stop()
            until(lambda: ledger.snapshot().members == (), "the ledger empty after the engine ended")
            ledger.close()
        finally:
            native.kill()
    finally:
        elastic.kill()
