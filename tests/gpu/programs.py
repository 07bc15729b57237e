"""What the GPU tests run in processes of their own: ``python -m tests.gpu.programs NAME ARGUMENT ...``.

A stray access costs a process its context, and which contexts a process has is part of what is tested.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvcached_core.arena import Arena
from kvcached_core.backends.cuda import CudaBackend, current_device_id
from kvcached_core.backends.driver import load_driver
from kvcached_core.capacity import current_device_capacity
from kvcached_core.errors import DeviceMemoryError

from tests import device_correctness

MIB = 1 << 20
PAGE_BYTES = 2 * MIB
SECOND_OF_CYCLES = 2_000_000_000  # an H200 runs at up to 1.98 GHz


# --- device-correctness ---


def hoard(ordinal: str) -> None:
    """Take all memory of a device, say so, and keep it until the standard input is closed."""
    backend = CudaBackend(int(ordinal))
    arenas = [Arena(backend, backend.memory().total_bytes, size * MIB, guard=False) for size in (1024, 64, 2)]
    for arena in arenas:
        with suppress(DeviceMemoryError):
            for page in range(arena.num_pages):
                arena.map([range(page, page + 1)])
    print("full", flush=True)
    sys.stdin.read()
    for arena in arenas:
        arena.close()


class Hoarders:
    """Processes that fill devices."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[str]] = {}

    def fill(self, ordinal: int) -> None:
        command = [sys.executable, "-m", "tests.gpu.programs", "hoard", str(ordinal)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._processes[ordinal] = process
        assert process.stdout is not None
        assert process.stdout.readline() == "full\n"

    def drain(self, ordinal: int) -> None:
        self._processes.pop(ordinal).communicate(timeout=60)


def check_device(ordinal: str, callers_device: str) -> None:
    """Every claim of `device_correctness`, from every kind of thread."""
    hoarders = Hoarders()
    machine = device_correctness.Machine(load_driver(), hoarders.fill, hoarders.drain, 32 * MIB)
    device = None if callers_device == "none" else int(callers_device)
    for thread in device_correctness.THREADS:
        for claim in device_correctness.CLAIMS:
            with device_correctness.caller(machine, int(ordinal), device, thread) as caller:
                claim(caller)
            print(f"{claim.__name__} from the {thread} thread", flush=True)


def name_devices() -> None:
    """The UUID of the current device, asked first, and of each device; and which have a context because of that."""
    driver: Any = load_driver()
    count = driver.cuDeviceGetCount()[1]
    print(current_device_id())
    print("contexts", sum(driver.cuDevicePrimaryCtxGetState(device)[2] for device in range(count)))
    for ordinal in range(count):
        print(CudaBackend(ordinal).device_id)


def ask_capacity(runtime_dir: str) -> None:
    """What may be taken of the current device before anything exists, and what exists afterwards."""
    driver: Any = load_driver()
    whole = current_device_capacity(runtime_dir=Path(runtime_dir))
    limited = current_device_capacity(runtime_dir=Path(runtime_dir), ceiling_bytes=5 * MIB)
    print(whole.device_id, whole.may_take_bytes > whole.total_bytes / 2, limited.may_take_bytes // MIB)
    count = driver.cuDeviceGetCount()[1]
    print("contexts", sum(driver.cuDevicePrimaryCtxGetState(device)[2] for device in range(count)))


# --- stray accesses ---


def stray(access: str, guard: str) -> None:
    """Read or write an unmapped page, before or after the seal."""
    import torch

    arena = Arena(CudaBackend(), 4 * PAGE_BYTES, PAGE_BYTES, guard=guard != "none")
    arena.map([range(1)])
    if guard == "sealed":
        arena.tensor(3 * PAGE_BYTES, PAGE_BYTES).fill_(7)  # warm-up, say
        torch.cuda.synchronize()
        arena.seal_guard()
    page = arena.tensor(2 * PAGE_BYTES, PAGE_BYTES)
    if access == "write":
        page.fill_(1)
        torch.cuda.synchronize()
        print("written")
    else:
        print("read", int(page.to(torch.int64).abs().sum()))
    arena.tensor(0, PAGE_BYTES).fill_(2)
    torch.cuda.synchronize()
    print("mapped page", int(arena.tensor(0, 1)))
    arena.close()


# --- order ---


def unmap_behind_kernel(wait: str) -> None:
    """Unmap a page that a queued kernel will still write to; with or without waiting for a fence."""
    import torch

    arena = Arena(CudaBackend(), 4 * PAGE_BYTES, PAGE_BYTES, guard=False)
    backend = arena._backend
    arena.map([range(4)])
    page = arena.tensor(PAGE_BYTES, PAGE_BYTES)
    page.fill_(1)  # loads the kernel, which would otherwise wait for the device
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SECOND_OF_CYCLES)
        page.fill_(2)
    fence = backend.fence([stream.cuda_stream])
    print("done at once", fence.done())
    while wait == "fence" and not fence.done():
        pass
    arena.unmap([range(1, 2)])
    print("unmapped while the stream was", "idle" if stream.query() else "busy", flush=True)
    torch.cuda.synchronize()
    print("survived")
    arena.close()


# --- graph capture ---


def work_during_capture(work: str) -> None:
    """Capture a graph in mode GLOBAL while another thread works; then replay it."""
    import torch

    backend = CudaBackend()
    arena = Arena(backend, 8 * PAGE_BYTES, PAGE_BYTES)
    side = torch.cuda.Stream()
    driver = load_driver()
    fence = backend.fence([side.cuda_stream])
    values = torch.ones(1 << 20, device="cuda")

    def use_backend() -> None:
        assert fence.done()
        backend.fence([side.cuda_stream]).done()
        backend.memory()
        arena.map([range(8)])
        arena.unmap([range(8)])

    def query_bare() -> None:
        """What the backend must not do."""
        driver.cuCtxPushCurrent(backend._context)
        print("query", driver.cuEventQuery(fence._events[0])[0].name)

    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as elsewhere, torch.cuda.graph(graph, capture_error_mode="global"):
        doubled = values * 2
        elsewhere.submit(query_bare if work == "bare query" else use_backend).result()
    graph.replay()
    torch.cuda.synchronize()
    print("replayed", float(doubled.sum()) == 2 * (1 << 20))
    arena.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
