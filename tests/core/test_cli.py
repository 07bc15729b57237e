"""The command as a whole: exit codes, JSON everywhere, help."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from kvcached_core import __version__

from tests.core.command import kvcached, kvcached_here, surroundings
from tests.core.follower import Follower

COMMANDS = {
    "doctor": (),
    "status": (),
    "top": ("--interval", "0.1"),
    "limit": ("qwen3-0.6b", "--weight", "1"),
    "trim": ("qwen3-0.6b",),
    "config": (),
    "demo": (),
}


def test_every_command_answers_in_json(runtime_dir: Path) -> None:
    with Follower(runtime_dir):
        for command, words in COMMANDS.items():
            done = kvcached(command, *words, "--json", runtime_dir=runtime_dir)
            assert done.code == 0, f"{command}: {done.out}{done.err}"
            assert done.document["schema"] == f"kvcached.{command}/1"
            assert done.err == ""


def test_help_names_every_command(runtime_dir: Path) -> None:
    done = kvcached_here("--help", runtime_dir=runtime_dir)
    assert done.code == 0
    assert all(f" {command} " in done.out for command in COMMANDS)


def test_the_version(runtime_dir: Path) -> None:
    assert kvcached("--version", runtime_dir=runtime_dir).out == f"kvcached {__version__}\n"


@pytest.mark.parametrize("words", [("nonsense",), ("status", "--nonsense"), ("limit",), ("top", "--interval", "0")])
def test_wrong_usage_ends_with_2(runtime_dir: Path, words: tuple[str, ...]) -> None:
    assert kvcached_here(*words, runtime_dir=runtime_dir).code == 2


@pytest.mark.parametrize("command", ["status", "top", "config", "trim"])
def test_an_unknown_setting_ends_with_2_and_the_nearest_known_one(runtime_dir: Path, command: str) -> None:
    environ = {"KVCACHED_CELING": "6GiB"}
    done = kvcached_here(command, *COMMANDS[command], runtime_dir=runtime_dir, environ=environ)
    assert done.code == 2
    assert "KVCACHED_CELING is not a setting. Did you mean KVCACHED_CEILING?" in done.err
    answer = kvcached_here(command, *COMMANDS[command], "--json", runtime_dir=runtime_dir, environ=environ)
    assert (answer.code, answer.document["exit_code"]) == (2, 2)


def test_only_the_live_view_needs_textual_and_nothing_needs_torch_or_cuda(runtime_dir: Path) -> None:
    program = """
        import sys
        sys.modules.update(dict.fromkeys(("textual", "pynvml", "torch", "cuda", "cuda.bindings")))  # None: ImportError
        from kvcached_core.cli import main
        for words in (["doctor"], ["status"], ["top", "--once", "--interval", "0.1"], ["config"], ["demo"]):
            try:
                main(words)
            except SystemExit as end:
                assert end.code == 0, words
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=surroundings(runtime_dir),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_field_of_every_document_is_in_the_runbook(runtime_dir: Path) -> None:
    runbook = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    with Follower(runtime_dir):
        for command, words in COMMANDS.items():
            done = kvcached_here(command, *words, "--json", runtime_dir=runtime_dir)
            fields = _fields(done.document)
            missing = {name for name in fields if f"`{name}`" not in runbook and f"`{name}[]`" not in runbook}
            assert not missing, command


def _fields(content: object) -> set[str]:
    if isinstance(content, list):
        return set().union(*map(_fields, content))
    if isinstance(content, dict):
        inner = (value for name, value in content.items() if name != "device_names")  # its keys are UUIDs
        return set(content) | set().union(*map(_fields, inner))
    return set()
