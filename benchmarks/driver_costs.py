"""What mapping and unmapping costs, through the arena and by the driver's own calls beside it, by page size.

    python benchmarks/driver_costs.py --backend cuda     (on a GPU)
    python benchmarks/driver_costs.py --backend host

Writes ``build/bench/driver_costs_<backend>.json`` and prints the same as a table. Each figure is the median of the
rounds, and all kinds of one page size are measured in turn, round by round, so that they meet the same machine.
"""

from __future__ import annotations

import argparse
import json
import mmap
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from kvcached_core.arena import Arena
from kvcached_core.backends import Backend, load_backend
from kvcached_core.backends.cuda import CudaBackend, _access, _page_properties
from kvcached_core.backends.driver import Driver, load_driver
from kvcached_core.backends.host import Libc

MIB = 1 << 20
PAGE_MIB = {"cuda": (2, 8, 16, 32, 64, 256), "host": (1, 2, 8, 32)}
ROUND_MIB = {"cuda": 4096, "host": 512}  # mapped in one round
ORDER_PAGES = 4  # pages of one order: a batch as the agent makes it
Times = dict[str, float]


@contextmanager
def timed(times: Times, what: str) -> Iterator[None]:
    started = perf_counter()
    yield
    times[what] = times.get(what, 0.0) + perf_counter() - started


def orders_of(num_pages: int) -> list[range]:
    return [range(first, min(first + ORDER_PAGES, num_pages)) for first in range(0, num_pages, ORDER_PAGES)]


class ThroughArena:
    """The path of an order: references, pages, zeroing, and back."""

    def __init__(self, backend: Backend, page_bytes: int, num_pages: int, *, guard: bool) -> None:
        self._orders = orders_of(num_pages)
        self._arena = Arena(backend, num_pages * page_bytes, page_bytes, guard=guard)
        self._arena.seal_guard()

    def round(self) -> Times:
        times: Times = {}
        with timed(times, "map"):
            for order in self._orders:
                self._arena.map([order])
        with timed(times, "unmap"):
            for order in self._orders:
                self._arena.unmap([order])
        return times

    def close(self) -> None:
        self._arena.close()


class BareCuda:
    """The driver's calls on one page after the other, and nothing else.

    Args:
        release_at_once: Give the handle up as soon as it is mapped, as the backend does; otherwise after unmapping.
    """

    def __init__(self, page_bytes: int, num_pages: int, *, release_at_once: bool) -> None:
        module = load_driver()
        self._driver = module
        self._call = Driver(module, "device 0").call
        self._properties = _page_properties(module, 0)
        self._writable = _access(module, self._properties, module.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        self._page_bytes, self._num_pages = page_bytes, num_pages
        self._release_at_once = release_at_once
        self._call("cuCtxPushCurrent", self._call("cuDevicePrimaryCtxRetain", 0))
        self._address = int(self._call("cuMemAddressReserve", num_pages * page_bytes, page_bytes, 0, 0))

    def round(self) -> Times:
        driver, page_bytes, times = self._driver, self._page_bytes, Times()
        addresses = [self._address + page * page_bytes for page in range(self._num_pages)]
        handles: list[Any] = []
        with timed(times, "map"):
            for address in addresses:
                _, handle = driver.cuMemCreate(page_bytes, self._properties, 0)
                driver.cuMemMap(address, page_bytes, 0, handle, 0)
                driver.cuMemSetAccess(address, page_bytes, self._writable, 1)
                if self._release_at_once:
                    driver.cuMemRelease(handle)
                else:
                    handles.append(handle)
        with timed(times, "unmap"):
            for page, address in enumerate(addresses):
                driver.cuMemUnmap(address, page_bytes)
                if not self._release_at_once:
                    driver.cuMemRelease(handles[page])
        return times

    def close(self) -> None:
        self._call("cuMemAddressFree", self._address, self._num_pages * self._page_bytes)
        self._call("cuCtxPopCurrent")
        self._call("cuDevicePrimaryCtxRelease", 0)


class BareHost:
    """The kernel's calls on one page after the other, and nothing else."""

    def __init__(self, page_bytes: int, num_pages: int) -> None:
        self._libc = Libc()
        self._page_bytes, self._num_pages = page_bytes, num_pages
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
        self._address = self._libc.mmap(num_pages * page_bytes, 0, flags)

    def round(self) -> Times:
        libc, page_bytes, times = self._libc, self._page_bytes, Times()
        addresses = [self._address + page * page_bytes for page in range(self._num_pages)]
        with timed(times, "map"):
            for address in addresses:
                libc.mprotect(address, page_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
                libc.madvise(address, page_bytes, 23)  # MADV_POPULATE_WRITE
        with timed(times, "unmap"):
            for address in addresses:
                libc.mprotect(address, page_bytes, 0)
                libc.madvise(address, page_bytes, mmap.MADV_DONTNEED)
        return times

    def close(self) -> None:
        self._libc.munmap(self._address, self._num_pages * self._page_bytes)


def kinds(backend: Backend, page_bytes: int, num_pages: int) -> dict[str, Callable[[], Any]]:
    """The ways to map, by name."""
    through = {
        "arena": lambda: ThroughArena(backend, page_bytes, num_pages, guard=True),
        "arena, strict": lambda: ThroughArena(backend, page_bytes, num_pages, guard=False),
    }
    if isinstance(backend, CudaBackend):
        return {
            "driver": lambda: BareCuda(page_bytes, num_pages, release_at_once=False),
            "driver, released when mapped": lambda: BareCuda(page_bytes, num_pages, release_at_once=True),
            **through,
        }
    return {"kernel, 4 KiB pages": lambda: BareHost(page_bytes, num_pages), "arena": through["arena"]}


def measure(backend: Backend, page_bytes: int, total_bytes: int, rounds: int) -> list[dict[str, Any]]:
    num_pages = total_bytes // page_bytes
    made = {name: make() for name, make in kinds(backend, page_bytes, num_pages).items()}
    times: dict[str, list[Times]] = {name: [] for name in made}
    for _ in range(rounds + 1):  # the first warms up
        for name, kind in made.items():
            times[name].append(kind.round())
    for kind in made.values():
        kind.close()
    return [
        {
            "page_mib": page_bytes / MIB,
            "kind": name,
            "pages": num_pages,
            **{
                f"{what}_us_per_{unit}": 1e6 * median(each[what] for each in rounds_of[1:]) / count
                for what in ("map", "unmap")
                for unit, count in (("mib", total_bytes / MIB), ("page", num_pages))
            },
        }
        for name, rounds_of in times.items()
    ]


def table(rows: Iterable[dict[str, Any]]) -> str:
    lines = ["| page | through | map, us per page | unmap | map, us per MiB | unmap |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {row['page_mib']:g} MiB | {row['kind']} | {row['map_us_per_page']:.1f} | {row['unmap_us_per_page']:.1f}"
        f" | {row['map_us_per_mib']:.2f} | {row['unmap_us_per_mib']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def device_name(backend: Backend) -> str:
    if not isinstance(backend, CudaBackend):
        return platform.machine()
    import torch

    return str(torch.cuda.get_device_name(backend.device))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--backend", choices=sorted(PAGE_MIB), default="cuda")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--out", type=Path, default=Path("build/bench"))
    given = arguments.parse_args()
    backend = load_backend(given.backend)
    total_bytes = ROUND_MIB[given.backend] * MIB
    rows = [
        row
        for page_mib in PAGE_MIB[given.backend]
        for row in measure(backend, page_mib * MIB, total_bytes, given.rounds)
    ]
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"driver_costs_{given.backend}.json"
    result = {"backend": given.backend, "device": device_name(backend), "rounds": given.rounds, "rows": rows}
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['device']}: {ROUND_MIB[given.backend]} MiB a round, orders of {ORDER_PAGES} pages, zeroed\n")
    print(table(rows))
    print(f"\nwritten to {path}")
    backend.close()


if __name__ == "__main__":
    main()
