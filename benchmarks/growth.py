"""Growth and trim through the whole path, from an order to its acknowledgement, beside the driver's own calls.

    python -m benchmarks.growth --backend cuda --out build/bench
    python -m benchmarks.growth --backend host --out build/bench

An order passes the channel, takes a lease in a real ledger, creates, maps and zeroes its pages, and is acknowledged; a
retirement waits for its fence, unmaps, and gives the lease back. The cache is a block-major one of an 8B shape. Goals
on one H200: at most 1.5 us to grow and 1.6 us to trim a MiB (the driver alone, in 32 MiB pages: 1.1 and 1.2).
"""

from __future__ import annotations

import argparse
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from kvcached_core.arena import Arena
from kvcached_core.backends import Backend, load_backend
from kvcached_core.geometry import Geometry, Stripe
from kvcached_core.ledger import Ledger
from kvcached_core.orders import Ack, BlockRanges, Link, LocalLink, Map, OrderServer, Retire, SocketLink
from kvcached_core.rank import Rank

from benchmarks.driver_costs import BareCuda, BareHost
from benchmarks.serving import write
from tests.e2e.readings import Nvml

MIB = 1 << 20
BLOCK_BYTES = 2 * MIB  # 16 tokens of 32 layers, 8 KV heads of 128, keys and values in bfloat16
ARENA_BYTES = {"cuda": 16 << 30, "host": 1 << 30}
ORDER_MIB = {"cuda": (32, 256, 1024, 4096), "host": (32, 128)}
GOAL_US = {"grow": 1.5, "trim": 1.6}
ANSWER_DEADLINE_SECONDS = 10.0


class Channel:
    """A decider's end: sends one order and waits for its answer."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._poll = select.poll()
        self._poll.register(link.fileno(), select.POLLIN)
        self._seq = 0

    def seconds(self, order: Callable[[int], Map | Retire]) -> float:
        """From sending an order to its acknowledgement.

        Raises:
            RuntimeError: It was refused, or not answered in time.
        """
        self._seq += 1
        started = time.perf_counter()
        self._link.send(order(self._seq))
        while (elapsed := time.perf_counter() - started) < ANSWER_DEADLINE_SECONDS:
            for message in self._link.receive():
                if isinstance(message, Ack) and message.seq == self._seq:
                    elapsed = time.perf_counter() - started
                    if message.error:
                        raise RuntimeError(f"order refused: {message.error}")
                    return elapsed
            self._poll.poll(1)
        raise RuntimeError(f"order {self._seq} unanswered after {ANSWER_DEADLINE_SECONDS:.0f} s")


def measure(channel: Channel, geometry: Geometry, order_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Grow by whole orders until a quarter of the arena is resident, then retire them; us per MiB of each order."""
    extents = max(1, order_bytes // geometry.extent_bytes)
    blocks = extents * geometry.blocks_per_extent
    orders: list[BlockRanges] = [
        ((first, first + blocks),) for first in range(0, max(blocks, geometry.num_blocks // 4) - blocks + 1, blocks)
    ]
    mib = blocks * BLOCK_BYTES / MIB
    found: dict[str, list[float]] = {"grow": [], "trim": []}
    for round_number in range(rounds + 1):  # the first warms up
        for what, make in (("grow", Map), ("trim", Retire)):
            for ranges in orders:
                step = {"after_step": 0} if make is Retire else {}
                seconds = channel.seconds(lambda seq, r=ranges, m=make, s=step: m(seq, r, **s))
                if round_number:
                    found[what].append(1e6 * seconds / mib)
    return found


@contextmanager
def channels(backend: Backend, geometry: Geometry, scratch: Path) -> Iterator[dict[str, Channel]]:
    """The rank in this process, and one behind a socket, each with an arena and an account of its own."""
    total_bytes = backend.memory().total_bytes
    driver_free = None if backend.device_id == "host" else lambda: backend.memory().free_bytes
    with ExitStack() as stack:
        opened = Ledger.open(backend.device_id, total_bytes, runtime_dir=scratch, driver_free=driver_free)
        ledger = stack.enter_context(closing(opened))
        ranks = []
        for index in range(2):
            arena = Arena(backend, geometry.size_bytes, geometry.page_bytes)
            account = ledger.join(f"growth-{index}", engine="benchmark", ceiling_bytes=geometry.size_bytes)
            ranks.append(stack.enter_context(closing(Rank(arena, geometry, account, backend, index=index))))
            arena.seal_guard()
        server = OrderServer(scratch / "rank", ranks[1])
        server.start()
        stack.enter_context(closing(server))
        links = {"in process": LocalLink(ranks[0]), "over a socket": SocketLink(scratch / "rank", 1)}
        for link in links.values():
            stack.enter_context(closing(link))
        yield {name: Channel(link) for name, link in links.items()}


def driver_alone(kind: str, page_bytes: int, rounds: int) -> dict[str, list[float]]:
    """The bare calls on pages of the same size, without ledger, channel or zeroing; us per MiB."""
    num_pages = (1 << 30) // page_bytes
    bare: Any
    if kind == "cuda":
        bare = BareCuda(page_bytes, num_pages, release_at_once=False)
    else:
        bare = BareHost(page_bytes, num_pages)
    with closing(bare):
        times = [bare.round() for _ in range(rounds + 1)][1:]
    mib = num_pages * page_bytes / MIB
    return {what: [1e6 * each[name] / mib for each in times] for what, name in (("grow", "map"), ("trim", "unmap"))}


def _rows(results: dict[str, Any], kind: str) -> Iterator[str]:
    yield "| path | order MiB | grow us/MiB: median, p99 | trim us/MiB: median, p99 | goal |"
    yield "| --- | --- | --- | --- | --- |"
    for path, by_size in results["orders"].items():
        for size, found in by_size.items():
            medians = {what: statistics.median(values) for what, values in found.items()}
            met = all(medians[what] <= goal for what, goal in GOAL_US.items())
            verdict = "-" if kind != "cuda" else "met" if met else "missed"
            cells = [f"{medians[what]:.2f}, {_p99(found[what]):.2f}" for what in ("grow", "trim")]
            yield f"| {path} | {size} | {cells[0]} | {cells[1]} | {verdict} |"
    for size, found in results["driver"].items():
        cells = [f"{statistics.median(found[what]):.2f}, {_p99(found[what]):.2f}" for what in ("grow", "trim")]
        yield f"| the driver alone, {size} MiB pages | - | {cells[0]} | {cells[1]} | - |"


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def main() -> int:
    """Measure one backend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=sorted(ARENA_BYTES), default="cuda")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    kind: str = arguments.backend
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    backend = load_backend(kind, budget_bytes=4 << 30 if kind == "host" else None)
    num_blocks = ARENA_BYTES[kind] // BLOCK_BYTES
    geometry = Geometry.choose(
        [Stripe(0, BLOCK_BYTES, BLOCK_BYTES)],
        num_blocks,
        ARENA_BYTES[kind],
        granularity_bytes=backend.granularity_bytes,
    )
    results: dict[str, Any] = {"orders": {}, "driver": {}}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        with channels(backend, geometry, Path(scratch)) as paths:
            for path, channel in paths.items():
                results["orders"][path] = {
                    size: measure(channel, geometry, size * MIB, arguments.rounds) for size in ORDER_MIB[kind]
                }
        for page_mib in dict.fromkeys((2, geometry.page_bytes // MIB)):
            results["driver"][page_mib] = driver_alone(kind, page_mib * MIB, arguments.rounds)
    backend.close()
    setup = {**Nvml().description(), "backend": kind, "page_bytes": geometry.page_bytes}
    document = {"setup": setup, "extent_bytes": geometry.extent_bytes, **results}
    write(out, f"growth_{kind}", document, _rows(results, kind))
    return 0


if __name__ == "__main__":
    sys.exit(main())
