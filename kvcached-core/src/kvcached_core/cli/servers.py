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
        command: Without the interpreter and the program's folder.
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
    served: tuple[str, str] | None
    started_seconds: float


def servers(proc: Path = Path("/proc")) -> list[Server]:
    """Every engine server that /proc shows. A server that a server started (a forked child) is not one of its own."""
    processes = {process.pid: process for process in _processes(proc)}
    uptime_seconds = float((proc / "uptime").read_text().split()[0])
    found = []
    for process in processes.values():
        parent = processes.get(process.parent)
        if process.served is None or (parent is not None and parent.served is not None):
            continue
        engine, command = process.served
        inner_pids = frozenset(each.inner_pid for each in _family(process, processes.values()))
        age_seconds = uptime_seconds - process.started_seconds
        environ = _environ(proc / str(process.pid) / "environ")
        found.append(Server(process.pid, engine, command, environ, age_seconds, inner_pids))
    return sorted(found, key=lambda server: server.pid)


def served_by(words: list[str]) -> tuple[str, str] | None:
    """The engine whose server a command line starts, and that command without the interpreter and its path.

    ``vllm serve …`` and ``sglang serve …``, or one of their modules by ``-m``.
    """
    for at, (word, following) in enumerate(pairwise(words)):
        program = Path(word).name
        if program in _PROGRAMS and following == "serve":
            return _PROGRAMS[program], " ".join((program, *words[at + 1 :]))
        if word == "-m" and following in _MODULES:
            return _MODULES[following], " ".join(words[at + 1 :])
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
        served=served_by(words),
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
