"""What memory that comes and goes costs the steps of a busy device, and what takes how long meanwhile.

    python -m benchmarks.busy_device --out build/bench

A step replays a CUDA graph of matrix products that read 16 GiB of weights, as decoding an 8B model does; two are in
flight. Every 16 steps another thread of the same process carries out one order of 192 MiB, which is what 96 requests of
that model take in 16 steps. Stretches with and without orders alternate. Each kind of order leaves a part out, so that
the differences say what costs: the guard, the zeros, the page size, mapping at all.

With ``host_ms``, the stepping thread also works that long in the interpreter before each step, as an engine does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from kvcached_core.arena import Arena
from kvcached_core.backends import load_backend

from tests.e2e.readings import Nvml

MIB = 1 << 20
ORDER_MIB = 192
STEPS_PER_ORDER = 16
ORDERS = 8  # of one stretch
STRETCHES = 3
IN_FLIGHT = 2
HOST_MS = (0.0, 3.0)
WEIGHTS, ROWS, COLUMNS, BATCH = 128, 4096, 16384, 96  # of 128 MiB in bfloat16


class Device:
    """Steps on the current CUDA device."""

    def __init__(self) -> None:
        options: Any = {"dtype": torch.bfloat16, "device": "cuda"}
        self._weights = [torch.randn(COLUMNS, ROWS, **options) for _ in range(WEIGHTS)]
        self._input = torch.randn(BATCH, ROWS, **options)
        self._output = torch.empty(BATCH, COLUMNS, **options)
        self._product()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._product()

    def _product(self) -> None:
        for weight in self._weights:
            torch.mm(self._input, weight.T, out=self._output)

    def steps(self, count: int, before: Callable[[int], None]) -> float:
        """Seconds that so many take, from an idle device to an idle device; ``before`` is called with each number."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        events: list[torch.cuda.Event] = []
        for number in range(count):
            before(number)
            if len(events) == IN_FLIGHT:
                events.pop(0).synchronize()
            self._graph.replay()
            events.append(torch.cuda.Event())
            events[-1].record()
        torch.cuda.synchronize()
        return time.perf_counter() - started


class Orders:
    """A thread that carries out one order at a time, when it is told to."""

    def __init__(self, order: Callable[[int], None]) -> None:
        self.seconds: list[float] = []
        self._order = order
        self._told = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def tell(self) -> None:
        self._told.release()

    def finish(self, count: int) -> None:
        """Wait until so many are done."""
        for _ in range(count):
            if not self._done.acquire(timeout=30):
                raise TimeoutError(f"an order was not carried out within 30 s, after {len(self.seconds)} others")

    def close(self) -> None:
        self._ended = True
        self._told.release()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._told.acquire()
            if self._ended:
                return
            started = time.perf_counter()
            self._order(len(self.seconds) % ORDERS)
            self.seconds.append(time.perf_counter() - started)
            self._done.release()


class Kind:
    """One kind of order over an arena of its own; ``order`` is called with 0 to ``ORDERS - 1``.

    Args:
        page_mib: Of its pages.
        zeroed: Whether new pages are zeroed, as an arena does.
        unmaps: Whether the orders unmap; else they map.
    """

    def __init__(self, page_mib: int, *, guard: bool = True, zeroed: bool = True, unmaps: bool = False) -> None:
        backend = load_backend("cuda")
        if not zeroed:
            backend.zero = lambda spans: None  # type: ignore[method-assign]
        self._backend, self._unmaps = backend, unmaps
        self._arena = Arena(backend, ORDERS * ORDER_MIB * MIB, page_mib * MIB, guard=guard)
        self._arena.seal_guard()
        self._pages = ORDER_MIB // page_mib

    def _range(self, number: int) -> range:
        return range(number * self._pages, (number + 1) * self._pages)

    def order(self, number: int) -> None:
        (self._arena.unmap if self._unmaps else self._arena.map)([self._range(number)])

    def prepare(self) -> None:
        """Map what the orders unmap."""
        if self._unmaps:
            self._arena.map(map(self._range, range(ORDERS)))

    def clean(self) -> None:
        """Unmap what the orders mapped."""
        if not self._unmaps:
            self._arena.unmap(map(self._range, range(ORDERS)))

    def close(self) -> None:
        self._arena.close()
        self._backend.close()


KINDS: dict[str, dict[str, Any]] = {
    "map": {"page_mib": 64},
    "map, no guard": {"page_mib": 64, "guard": False},
    "map, no zeros": {"page_mib": 64, "zeroed": False},
    "map, neither": {"page_mib": 64, "guard": False, "zeroed": False},
    "unmap": {"page_mib": 64, "unmaps": True},
    "unmap, no guard": {"page_mib": 64, "unmaps": True, "guard": False},
    "map, 2 MiB pages": {"page_mib": 2},
    "map, 2 MiB pages, no guard": {"page_mib": 2, "guard": False},
}


def work_in_interpreter(milliseconds: float) -> None:
    """Bytecode, with a small operation that lets go of the interpreter now and then."""
    small, until = torch.zeros(256), time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < until:
        for number in range(100):
            number * number
        small.add_(1)


def before_each(orders: Orders | None, host_ms: float) -> Callable[[int], None]:
    """What the stepping thread does before each step."""

    def before(number: int) -> None:
        if orders is not None and number % STEPS_PER_ORDER == 0:
            orders.tell()
        work_in_interpreter(host_ms)

    return before


def measure(device: Device, name: str, host_ms: float) -> dict[str, Any]:
    """One row: milliseconds that the steps lost to each order, and that an order took."""
    count = ORDERS * STEPS_PER_ORDER
    kind = Kind(**KINDS[name])
    without, with_orders = [], []
    with ExitStack() as stack:
        stack.callback(kind.close)
        orders = Orders(kind.order)
        stack.callback(orders.close)
        for _ in range(STRETCHES):
            without.append(device.steps(count, before_each(None, host_ms)))
            kind.prepare()
            with_orders.append(device.steps(count, before_each(orders, host_ms)))
            orders.finish(ORDERS)
            kind.clean()
    step_ms = 1e3 * statistics.median(without) / count
    lost = [1e3 * (more - less) / ORDERS for more, less in zip(with_orders, without, strict=True)]
    return {
        "kind": name,
        "host_ms": host_ms,
        "step_ms": step_ms,
        "lost_ms": lost,
        "lost_share": statistics.median(lost) / (STEPS_PER_ORDER * step_ms),
        "order_ms": 1e3 * statistics.median(orders.seconds),
        "longest_order_ms": 1e3 * max(orders.seconds),
    }


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows in Markdown."""
    yield f"| order of {ORDER_MIB} MiB | host ms a step | step ms | lost to an order, ms | share | order ms | longest |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        lost = f"{statistics.median(row['lost_ms']):.2f} ({min(row['lost_ms']):.2f} to {max(row['lost_ms']):.2f})"
        yield (
            f"| {row['kind']} | {row['host_ms']:g} | {row['step_ms']:.2f} | {lost} | {row['lost_share']:.2%} "
            f"| {row['order_ms']:.2f} | {row['longest_order_ms']:.2f} |"
        )


def main() -> int:
    """Measure the current device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    device, rows = Device(), []
    for host_ms in HOST_MS:
        for name in KINDS:
            rows.append(measure(device, name, host_ms))
            document = {"setup": Nvml().description(), "rows": rows}
            (out / "busy_device.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / "busy_device.md").write_text("\n".join(table(rows)) + "\n")
    print("\n".join(table(rows)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
