"""The ``kvcached`` command: in a process of its own as an operator runs it, or (ten times faster) in this one."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from kvcached_core.cli import main


@dataclass(frozen=True)
class Done:
    """What a run of the command came to."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document that it printed, and nothing else."""
        answer: dict[str, Any] = json.loads(self.out)
        return answer


def kvcached(*words: str, runtime_dir: Path, environ: Mapping[str, str] | None = None) -> Done:
    """Run it with this runtime directory and no other setting of the caller's."""
    done = subprocess.run(
        [sys.executable, "-m", "kvcached_core.cli", *words],
        env=surroundings(runtime_dir) | dict(environ or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def kvcached_here(*words: str, runtime_dir: Path, environ: Mapping[str, str] | None = None) -> Done:
    """The same in this process."""
    out, err = io.StringIO(), io.StringIO()
    variables = surroundings(runtime_dir) | dict(environ or {})
    code: object = None
    with mock.patch.dict(os.environ, variables, clear=True), redirect_stdout(out), redirect_stderr(err):
        try:
            main(words)
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int)
    return Done(code, out.getvalue(), err.getvalue())


def surroundings(runtime_dir: Path) -> dict[str, str]:
    """The caller's environment without what a shell or a terminal may have set."""
    dropped = ("KVCACHED_", "ENABLE_KVCACHED", "COLUMNS", "FORCE_COLOR", "NO_COLOR", "VLLM_", "SGLANG_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | {"KVCACHED_RUNTIME_DIR": str(runtime_dir)}
