"""An engine's own benchmark program, run again and again in one process.

    python -m benchmarks.serving_client vllm < jobs

Importing an engine takes 25 s on the machine of the results, a load 8 s. Each job is a line of JSON: the program's
command line, and the file for what it prints; ``done`` is printed after each. The first that fails ends the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path


def _vllm() -> Callable[[], object]:
    from vllm.entrypoints.cli.main import main

    return main


def _sglang() -> Callable[[], object]:
    from sglang.bench_serving import cli_main

    return cli_main


PROGRAMS = {"vllm": _vllm, "sglang": _sglang}


def main() -> None:
    """Take jobs from standard input until it ends."""
    # What an engine prints while it is imported, and logs later to the standard output of that time, is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    program = PROGRAMS[sys.argv[1]]()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        sys.argv = job["argv"]
        with (
            Path(job["log"]).open("w") as log,
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
        ):
            program()
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    main()
