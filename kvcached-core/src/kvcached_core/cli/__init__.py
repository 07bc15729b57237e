"""The ``kvcached`` command: what the ledgers of a machine say, and what an operator may change.

Exit codes: 0 good, 1 a problem was found, 2 usage or settings, 3 could not run. Every command has ``--json``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from kvcached_core import __version__
from kvcached_core.cli import config, demo, doctor, limit, status, top, trim
from kvcached_core.cli.output import ExitCode, fail
from kvcached_core.errors import ConfigError, KvcachedError

app = typer.Typer(
    name="kvcached",
    help="Elastic KV caches: who holds how much of each device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (doctor.doctor, status.status, top.top, limit.limit, trim.trim, config.config, demo.demo):
    app.command()(command)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"kvcached {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Elastic KV caches: who holds how much of each device."""


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end the process with its exit code.

    Args:
        words: The command line without the program; this process's own when None.
    """
    given = list(sys.argv[1:] if words is None else words)
    as_json = "--json" in given
    try:
        app(given)
    except ConfigError as error:
        fail(str(error), ExitCode.USAGE, as_json=as_json)
    except KvcachedError as error:
        fail(str(error), ExitCode.COULD_NOT_RUN, as_json=as_json)
    sys.exit(int(ExitCode.GOOD))
