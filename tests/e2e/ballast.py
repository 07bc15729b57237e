"""A process that takes a device's memory away, as anything outside kvcached would."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.e2e.readings import Nvml

_PROGRAM = """
import sys, torch
free, _ = torch.cuda.mem_get_info(0)
held = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda:0")
print(held.numel(), flush=True)
sys.stdin.read()
"""


@contextmanager
def ballast(nvml: Nvml, free_bytes: int, python: str) -> Iterator[None]:
    """Leave ``free_bytes`` of the device free while inside, by one plain allocation of another process.

    Without a GPU nothing is done: there the budget of the host backend is the limit.
    """
    if not nvml.num_gpus:
        yield
        return
    command = [python, "-c", _PROGRAM, str(free_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        held = process.stdout.readline().strip()
        if not held:
            raise RuntimeError(f"the process that takes the rest of the device ended with code {process.wait()}")
        print(f"ballast: {int(held) / 2**30:.1f} GiB", flush=True)
        yield
        process.stdin.close()
