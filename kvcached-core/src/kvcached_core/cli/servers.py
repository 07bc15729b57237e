"""The engine servers that run on this machine, as far as /proc shows them, and which of them are members."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_MODULES = {
    "vllm.entrypoints.openai.api_server": "vLLM",
    "vllm.entrypoints.cli.main": "vLLM",
    "sglang.launch_server": "SGLang",
    "sglang.cli.main": "SGLang",
}
_PROGRAMS = {"vllm": "vLLM", "sglang": "SGLang"}


@dataclass(frozen=True)
class Server:
    """One server: the process that was started from a command line, without those that it started.

    Attributes:
        environ: Of its start; None where this user may not read it.
        age_seconds: Since its start.
        inner_pids: Of itself and of all processes below it, each as its own PID namespace numbers it.
    """

    pid: int
    engine: str
    command: str
    environ: Mapping[str, str] | None
    age_seconds: float
    inner_pids: frozenset[int]


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    inner_pid: int
    engine: str | None
    command: str
    started_seconds: float


def servers(proc: Path = Path("/proc")) -> list[Server]:
    """Every engine server that /proc shows. A server that a server started (a forked child) is not one of its own."""
    processes = {process.pid: process for process in _processes(proc)}
    uptime_seconds = float((proc / "uptime").read_text().split()[0])
    found = []
    for process in processes.values():
        parent = processes.get(process.parent)
        if process.engine is None or (parent is not None and parent.engine is not None):
            continue
        inner_pids = frozenset(each.inner_pid for each in _family(process, processes.values()))
        age_seconds = uptime_seconds - process.started_seconds
        environ = _environ(proc / str(process.pid) / "environ")
        found.append(Server(process.pid, process.engine, process.command, environ, age_seconds, inner_pids))
    return sorted(found, key=lambda server: server.pid)


def engine_of(words: list[str]) -> str | None:
    """The engine whose server a command line starts: ``vllm serve``, ``sglang serve``, or their modules by ``-m``."""
    for word, following in pairwise(words):
        program = _PROGRAMS.get(Path(word).name)
        if program is not None and following == "serve":
            return program
        if word == "-m" and following in _MODULES:
            return _MODULES[following]
    return None


def _processes(proc: Path) -> Iterator[_Process]:
    for folder in proc.iterdir():
        if folder.name.isdecimal():
            try:
                yield _process(folder)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it has ended meanwhile, or is hidden from this user


def _process(folder: Path) -> _Process:
    words = [word.decode(errors="replace") for word in (folder / "cmdline").read_bytes().split(b"\0") if word]
    # Source: proc_pid_stat(5). The command in parentheses may contain anything, blanks and parentheses too.
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    pids = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("NSpid:"))
    return _Process(
        pid=int(folder.name),
        parent=int(fields[1]),
        inner_pid=int(pids.split()[-1]),
        engine=engine_of(words),
        command=" ".join(words),
        started_seconds=int(fields[19]) / os.sysconf("SC_CLK_TCK"),
    )


def _family(root: _Process, processes: Iterable[_Process]) -> list[_Process]:
    family, young = [root], [root]
    children: dict[int, list[_Process]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    while young:
        young = [child for parent in young for child in children.get(parent.pid, ())]
        family += young
    return family


def _environ(path: Path) -> dict[str, str] | None:
    try:
        entries = path.read_bytes().split(b"\0")
    except (PermissionError, FileNotFoundError, ProcessLookupError):
        return None
    pairs = (entry.decode(errors="replace").partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}
