"""The README says what is so: settings, releases, commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from kvcached_core.cli import app
from kvcached_core.config import Settings, variable_of
from kvcached_core.sizes import parse_size
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "docs" / "results" / "README.md").read_text()
LINES = [line for block in re.findall(r"^```\n(.*?)^```", README, re.M | re.S) for line in block.splitlines()]
COMMANDS = sorted({line for line in LINES if line.startswith("kvcached ")})


def _table(heading: str) -> list[list[str]]:
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_every_setting_in_the_table_exists():
    known = {variable_of(field) for field in Settings.model_fields}
    named = {name for row in _table("Settings") for name in re.findall(r"`([A-Z_]+)`", row[0]) if name[0] != "_"}
    assert "ENABLE_KVCACHED" in named
    assert named <= known
    assert {variable_of("cache_floor"), variable_of("cache_ceiling")} <= known


def test_the_table_of_releases_is_the_plugins_own():
    from kvcached_sglang.releases import TESTED_RELEASES as SGLANG
    from kvcached_vllm.releases import TESTED_RELEASES as VLLM

    rows = {row[0]: tuple(row[1].split(", ")) for row in _table("What it works with")}
    assert (rows["vLLM"], rows["SGLang"]) == (VLLM, SGLANG)


def test_commands_were_found():
    assert [command.split()[1] for command in COMMANDS] == ["doctor", "limit", "limit", "status", "top"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_understood(command: str):
    words = shlex.split(command)[1:]
    done = CliRunner().invoke(app, [*words, "--help"])
    assert done.exit_code == 0, done.output
    for word in words[1:]:
        if word.startswith("--"):
            assert word in done.output
            parse_size(words[words.index(word) + 1])


@pytest.mark.parametrize("path", re.findall(r"^\| `([\w/.-]+)`", RESULTS, re.M))
def test_every_result_in_the_table_is_there(path: str):
    assert (ROOT / "docs" / "results" / path).exists()


@pytest.mark.parametrize("name", re.findall(r"nox -s speed -- (\w+)", RESULTS))
def test_every_measurement_exists(name: str):
    assert (ROOT / "benchmarks" / f"{name}.py").exists()
    assert f'    "{name}": (' in (ROOT / "noxfile.py").read_text()


@pytest.mark.parametrize("session", sorted({*re.findall(r"nox -s (\w+)", README + RESULTS)}))
def test_every_nox_session_exists(session: str):
    assert f"def {session}(session: nox.Session)" in (ROOT / "noxfile.py").read_text()


@pytest.mark.parametrize("target", re.findall(r"\]\((?!http)([^)#]+)", README))
def test_every_link_leads_to_a_file(target: str):
    assert (ROOT / target).exists()
