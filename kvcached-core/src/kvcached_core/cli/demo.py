"""``kvcached demo``: two real engines on one host-memory budget, without a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from kvcached_core.cli.output import ExitCode, Json, answer, fail

COMMAND = ("nox", "-s", "demo")
REPOSITORY_FILE = "noxfile.py"

EXPLANATION = """\
The demo runs two vLLM CPU engines on one host-memory budget: each gets memory while it works and returns it when idle.
It needs a checkout of kvcached, nox (pip install nox) and no GPU; the first run downloads the engine.

  {place}
  {command}
"""


def demo(
    run: Annotated[bool, typer.Option("--run", help="Run it now, from this checkout.")] = False,
    as_json: Json = False,
) -> None:
    """Say how to run the demo, or run it."""
    checkout = find_checkout(Path.cwd())
    if run:
        raise SystemExit(_run(checkout, as_json=as_json))
    place = f"cd {checkout}" if checkout else "cd <checkout of kvcached>"
    text = EXPLANATION.format(place=place, command=" ".join(COMMAND))
    answer("demo", {"command": list(COMMAND), "checkout": checkout}, text, as_json=as_json)


def find_checkout(start: Path) -> Path | None:
    """The checkout of kvcached that a folder is in."""
    for folder in (start, *start.parents):
        if (folder / REPOSITORY_FILE).is_file() and (folder / "kvcached-core").is_dir():
            return folder
    return None


def _run(checkout: Path | None, *, as_json: bool) -> int:
    if checkout is None:
        fail("this is no checkout of kvcached: change into one first", ExitCode.COULD_NOT_RUN, as_json=as_json)
    if shutil.which(COMMAND[0]) is None:
        fail("nox is not installed: pip install nox", ExitCode.COULD_NOT_RUN, as_json=as_json)
    return subprocess.run(COMMAND, cwd=checkout, check=False).returncode
