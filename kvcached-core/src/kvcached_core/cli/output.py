"""How every command answers: text for people, one JSON document for programs, an exit code for both.

A JSON document has a ``schema`` of the form ``kvcached.COMMAND/1``. Within a number fields are only added; bytes are
whole numbers and times are seconds. The fields are listed in docs/operations.md.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console, RenderableType

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

WIDTH_WITHOUT_TERMINAL = 160
"""Columns of text that goes into a file or a pipe; 80, rich's default there, would cut the tables."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Device = Annotated[
    str | None, typer.Option("--device", metavar="UUID", help="This device alone: its UUID or the beginning of it.")
]


class ExitCode(IntEnum):
    """What a command's exit code says."""

    GOOD = 0
    PROBLEM_FOUND = 1
    USAGE = 2
    COULD_NOT_RUN = 3


def console(*, stderr: bool = False) -> Console:
    """Where text goes. Colours only on a terminal, and no line is cut where there is none."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else WIDTH_WITHOUT_TERMINAL
    return Console(file=stream, width=width, highlight=False)


def document(command: str, answer: DataclassInstance | dict[str, Any]) -> str:
    """The JSON document of a command's answer."""
    fields = answer if isinstance(answer, dict) else dataclasses.asdict(answer)
    return json.dumps({"schema": f"kvcached.{command}/1", **fields}, indent=2, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a JSON document has no form for {value!r}")


def answer(command: str, content: DataclassInstance | dict[str, Any], text: RenderableType, *, as_json: bool) -> None:
    """Print a command's answer in the form that was asked for."""
    if as_json:
        print(document(command, content))
    else:
        console().print(text)


def fail(message: str, code: ExitCode, *, as_json: bool) -> NoReturn:
    """Say why there is no answer, on stderr (as JSON: on stdout), and end the command."""
    if as_json:
        print(document("error", {"error": message, "exit_code": int(code)}))
    else:
        console(stderr=True).print(f"[bold red]kvcached:[/] {_escaped(message)}", soft_wrap=True)
    raise SystemExit(int(code))


def _escaped(message: str) -> str:
    return message.replace("[", r"\[")
