"""``kvcached doctor``: whether kvcached works here, and what to do where it doesn't. Works without a GPU or an engine.

Each check has a name, which is also the heading of what to do about it in docs/operations.md. A check looks and never
changes anything: no ledger is made, no CUDA context, no engine is imported.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from importlib import import_module
from pathlib import Path

from rich.text import Text

from kvcached_core import __version__
from kvcached_core.cli.ledgers import Ledgers, Snapshots
from kvcached_core.cli.output import ExitCode, Json, console, document
from kvcached_core.cli.servers import servers
from kvcached_core.cli.status import short_id
from kvcached_core.config import ENABLE, PREFIX, Settings, default_runtime_dir, variable_of
from kvcached_core.devices import (
    HOST_PID_NAMESPACE,
    Device,
    Inventory,
    Unavailable,
    command_of,
    inventory,
    outsiders,
    without_virtual_memory,
)
from kvcached_core.errors import ConfigError, UnsupportedError
from kvcached_core.installation import ENGINES, PLUGIN_NAME, VLLM, Engine, upstream_package
from kvcached_core.ledger_statistics import LedgerStatistics
from kvcached_core.sizes import format_bytes

SPARE_BYTES = 1 << 20
"""What the runtime directory's file system should have left; a ledger takes 0.13 MiB."""

UNNOTICED_BYTES = 1 << 30
"""Outsiders that hold less than this (a desktop, a monitor) fit into the default headroom."""

STARTING_SECONDS = 120.0
"""An engine becomes a member before it loads its weights, but after a minute or so of imports."""

SHELL_FIX = f"export {ENABLE}=1 where the engine is started"

_MISSPELT = re.compile(
    r"(?:(?:VLLM|SGLANG)_)?(?:(?:ENABLED?|USE)_?KV_?CACHED?|KV_?CACHED?_?(?:ENABLED?|ON|ACTIVE))", re.IGNORECASE
)


class Status(str, Enum):
    """What a finding means: nothing to do, something to know, or something to do."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the answer."""

    check: str
    status: Status
    message: str
    fix: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found, in the order of the checks."""

    version: str
    python: str
    findings: tuple[Finding, ...]

    @property
    def num_problems(self) -> int:
        return sum(finding.status is Status.PROBLEM for finding in self.findings)


@dataclass(frozen=True)
class Surroundings:
    """What the checks look at; tests put recorded answers here.

    Attributes:
        search_path: Of Python packages; ``sys.path`` when None.
        ask_devices: What NVML says.
        ask_virtual_memory: The devices without virtual memory management.
    """

    environ: Mapping[str, str]
    engines: tuple[Engine, ...] = ENGINES
    search_path: Sequence[str] | None = None
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    ask_devices: Callable[[], Inventory] = inventory
    ask_virtual_memory: Callable[[], tuple[str, ...]] = without_virtual_memory

    @cached_property
    def inventory(self) -> Inventory:
        return self.ask_devices()

    @cached_property
    def in_container(self) -> bool:
        """Whether this process has a PID namespace of its own, as in any container that doesn't share the host's."""
        return os.readlink(self.proc / "self/ns/pid") != HOST_PID_NAMESPACE

    @cached_property
    def runtime_dir(self) -> Path:
        """The directory of the ledgers, also where another setting is wrong."""
        variable = variable_of("runtime_dir")
        try:
            return Settings.load({variable: self.environ.get(variable, "")}).runtime_dir
        except ConfigError:
            return default_runtime_dir()

    @cached_property
    def snapshots(self) -> Snapshots:
        with Ledgers(self.runtime_dir) as ledgers:
            return ledgers.snapshots()


def doctor(as_json: Json = False) -> None:
    """Say whether kvcached works here, and what to do where it doesn't."""
    diagnosis = examine(Surroundings(os.environ))
    if as_json:
        content = {
            "version": diagnosis.version,
            "python": diagnosis.python,
            "num_problems": diagnosis.num_problems,
            "findings": [vars(finding) for finding in diagnosis.findings],
        }
        print(document("doctor", content))
    else:
        out = console()
        for line in lines(diagnosis):
            out.print(line, soft_wrap=True)
    if diagnosis.num_problems:
        raise SystemExit(int(ExitCode.PROBLEM_FOUND))


def examine(here: Surroundings) -> Diagnosis:
    """Run every check."""
    findings = tuple(finding for check in CHECKS for finding in check(here))
    return Diagnosis(__version__, sys.executable, findings)


def lines(diagnosis: Diagnosis) -> Iterator[Text]:
    """One line for each finding, its fix included, and a last one that counts."""
    styles = {Status.OK: "green", Status.NOTE: "yellow", Status.PROBLEM: "bold red"}
    for finding in diagnosis.findings:
        line = Text.assemble(
            (f"{finding.status.value:<8}", styles[finding.status]), (f" {finding.check:<13}", "bold"), finding.message
        )
        if finding.fix:
            line.append(f" -> {finding.fix}", style="cyan")
        yield line
    count = diagnosis.num_problems
    yield Text(f"{count} problem{'s' * (count != 1)} found" if count else "no problem found", style="bold")


# --- this environment -------------------------------------------------------------------------------------------------


def check_python(here: Surroundings) -> Iterator[Finding]:
    """Which Python was looked at: engines in another one are not seen."""
    release = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", Status.OK, f"kvcached {__version__} in {sys.executable} (Python {release})")


def check_settings(here: Surroundings) -> Iterator[Finding]:
    """Unknown names and values out of their form."""
    try:
        Settings.load(here.environ)
    except ConfigError as error:
        ignored = tuple(_misspelt(here.environ))
        for line in str(error).splitlines():
            if not line.startswith(ignored or ("\0",)):
                yield Finding("settings", Status.PROBLEM, line)
        return
    given = sum(name.startswith(PREFIX) for name in here.environ)
    yield Finding("settings", Status.OK, f"{given} {PREFIX}* setting{'s' * (given != 1)}, all known")


def check_switch(here: Surroundings) -> Iterator[Finding]:
    """Whether an engine started from this environment would use kvcached."""
    for name in _misspelt(here.environ):
        yield Finding("switch", Status.PROBLEM, f"{name} turns nothing on", f"set {ENABLE}=1 instead")
    try:
        enabled = Settings.load({ENABLE: here.environ.get(ENABLE, "")}).enabled
    except ConfigError:  # what check_settings says
        return
    if enabled:
        yield Finding("switch", Status.OK, f"{ENABLE} is on in this environment")
    else:
        yield Finding("switch", Status.NOTE, f"inactive: {ENABLE} is not set here, so engines run natively", SHELL_FIX)


def _misspelt(environ: Mapping[str, str]) -> Iterator[str]:
    return (name for name in sorted(environ) if name != ENABLE and _MISSPELT.fullmatch(name))


def check_upstream(here: Surroundings) -> Iterator[Finding]:
    """The other package patches the engines that our plugins extend."""
    found = upstream_package(here.search_path)
    if found is not None:
        message = f"{found} is installed: it patches engines and cannot run beside kvcached-vllm or kvcached-sglang"
        yield Finding("upstream", Status.PROBLEM, message, "pip uninstall kvcached")


def check_plugins(here: Surroundings) -> Iterator[Finding]:
    """Whether each engine in this environment will load our plugin."""
    versions = {engine: engine.version() for engine in here.engines}
    if not any(versions.values()):
        message = "neither vLLM nor SGLang is in this Python environment"
        yield Finding("plugin", Status.NOTE, message, "run python -m kvcached_core.cli doctor with the engine's python")
    some_plugin = any(engine.plugin_version() for engine in here.engines if versions[engine])
    for engine, version in versions.items():
        if version is not None:
            yield from _check_plugin(here, engine, version, some_plugin)


def _check_plugin(here: Surroundings, engine: Engine, version: str, some_plugin: bool) -> Iterator[Finding]:
    plugin = engine.plugin_distribution
    if engine.plugin_version() is None:
        if engine.plugin_importable():
            message = f"{engine.plugin_module} can be imported and has no metadata, so {engine.title} cannot find it"
            yield Finding("plugin", Status.PROBLEM, message, f"pip install {plugin} (with -e for a checkout), anew")
        else:
            status = Status.NOTE if some_plugin else Status.PROBLEM
            message = f"inactive: {engine.title} {version} is in this environment and {plugin} is not"
            yield Finding("plugin", status, message, f"pip install {plugin}")
        return
    missing = engine.missing_groups()
    if missing:
        message = f"{plugin} is installed without its entry point in {', '.join(missing)}"
        yield Finding("plugin", Status.PROBLEM, message, f"pip install --force-reinstall {plugin}")
        return
    yield Finding("plugin", Status.OK, f"{engine.title} {version} finds {plugin} {engine.plugin_version()}")
    yield from _check_list(here, engine)
    yield from _check_release(here, engine, version)


def _check_list(here: Surroundings, engine: Engine) -> Iterator[Finding]:
    if engine.excluded_by_list(here.environ):
        listed = here.environ[engine.list_variable]
        blanks = "" if engine.list_strips else ", without blanks"
        message = f"inactive: {engine.list_variable}={listed!r} leaves out {PLUGIN_NAME}"
        fix = f"add {PLUGIN_NAME} to {engine.list_variable}{blanks}, or unset it"
        yield Finding("plugin-list", Status.PROBLEM, message, fix)
    # vLLM 0.32 and later take the CPU platform without asking any plugin. Source: vllm/platforms/__init__.py.
    if engine is VLLM and here.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        message = "inactive: VLLM_TARGET_DEVICE=cpu makes vLLM skip platform plugins"
        yield Finding("plugin-list", Status.PROBLEM, message, "unset VLLM_TARGET_DEVICE")


def _check_release(here: Surroundings, engine: Engine, version: str) -> Iterator[Finding]:
    try:
        releases = import_module(f"{engine.plugin_module}.releases")
    except ImportError as error:
        message = f"{engine.plugin_module} cannot be imported: {error}"
        yield Finding("release", Status.PROBLEM, message, f"pip install --force-reinstall {engine.plugin_distribution}")
        return
    try:
        releases.judge(version, allow_untested=False)
    except UnsupportedError as error:
        yield _untested(here, releases.judge, version, str(error))
        return
    yield Finding("release", Status.OK, f"{engine.title} {version} is a tested release")


def _untested(here: Surroundings, judge: Callable[..., object], version: str, refusal: str) -> Finding:
    variable = variable_of("allow_untested")
    try:
        if Settings.load({variable: here.environ.get(variable, "")}).allow_untested:
            judge(version, allow_untested=True)
            return Finding("release", Status.NOTE, f"untested release, tried because of {variable}: {refusal}")
    except (ConfigError, UnsupportedError) as error:
        return Finding("release", Status.PROBLEM, f"inactive: {error}")
    return Finding("release", Status.PROBLEM, f"inactive: {refusal}")


# --- ledgers ----------------------------------------------------------------------------------------------------------


def check_runtime_dir(here: Surroundings) -> Iterator[Finding]:
    """Whether ledgers can be made and found there."""
    path = here.runtime_dir
    variable = variable_of("runtime_dir")
    if path.exists() and not path.is_dir():
        yield Finding("runtime-dir", Status.PROBLEM, f"{path} is not a directory", f"set {variable} to a directory")
        return
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if not os.access(existing, os.W_OK | os.X_OK, effective_ids=True):
        message = f"user {os.geteuid()} cannot write to {existing}"
        yield Finding("runtime-dir", Status.PROBLEM, message, f"set {variable} to a directory of this user")
        return
    file_system = os.statvfs(existing)
    free_bytes = file_system.f_bavail * file_system.f_frsize
    if free_bytes < SPARE_BYTES:
        message = f"{existing} is full: {format_bytes(free_bytes)} left, a ledger needs 0.13 MiB"
        fix = f"free some of it (containers: a larger --shm-size), or set {variable} to another file system"
        yield Finding("runtime-dir", Status.PROBLEM, message, fix)
        return
    known = f"{path}, {format_bytes(free_bytes)} free" if path.exists() else f"{path}, made by the first engine"
    yield Finding("runtime-dir", Status.OK, known)


def check_ledgers(here: Surroundings) -> Iterator[Finding]:
    """Damaged files, and members that do not run."""
    for each in here.snapshots.unreadable:
        yield Finding("ledger", Status.PROBLEM, f"{short_id(each.device_id)}: {each.reason}")
    for device in here.snapshots.devices:
        members = ", ".join(f"{member.name} ({member.engine}, {member.state})" for member in device.members)
        message = (
            f"{short_id(device.device_id)}: active members: {members}" if members else f"{device.device_id}: empty"
        )
        yield Finding("ledger", Status.OK, message)
        for member in device.members:
            if member.state == "stopped":
                message = f"{member.name} (process {member.pid}) is silent for {member.heartbeat_age_seconds:.0f} s"
                fix = f"kill -CONT {member.pid} if it was stopped, or end it: its memory stays leased until then"
                yield Finding("member", Status.PROBLEM, message, fix)


def check_servers(here: Surroundings) -> Iterator[Finding]:
    """Whether the engines that run here are active."""
    names = {member.pid: member.name for device in here.snapshots.devices for member in device.members}
    for server in servers(here.proc):
        what = f"{server.engine} server {server.pid} ({server.command[:80]})"
        members = sorted({names[pid] for pid in server.inner_pids & names.keys()})
        if members:
            yield Finding("server", Status.OK, f"{what} is active: member {', '.join(members)}")
        elif server.environ is None:
            yield Finding("server", Status.NOTE, f"{what} is no member; its environment is not this user's to read")
        elif not _enabled(server.environ):
            yield Finding("server", Status.NOTE, f"{what} is inactive: {ENABLE} is not set for it", SHELL_FIX)
        elif server.age_seconds < STARTING_SECONDS:
            yield Finding("server", Status.NOTE, f"{what} is starting: {ENABLE} is set, and it is no member yet")
        else:
            yield _inactive(here, what, server.environ)


def _inactive(here: Surroundings, what: str, environ: Mapping[str, str]) -> Finding:
    variable = variable_of("runtime_dir")
    theirs = Path(environ.get(variable) or default_runtime_dir())
    if theirs != here.runtime_dir:
        fix = f"{variable}={theirs} kvcached doctor"
        return Finding("server", Status.NOTE, f"{what} has its ledger in another directory", fix)
    message = f"{what} is inactive: {ENABLE} is set for it, and it is a member of no ledger in {here.runtime_dir}"
    fix = f"read the line with 'kvcached' in its log; {variable_of('strict')}=1 makes it exit with the reason"
    return Finding("server", Status.PROBLEM, message, fix)


def _enabled(environ: Mapping[str, str]) -> bool:
    try:
        return Settings.load({ENABLE: environ.get(ENABLE, "")}).enabled
    except ConfigError:
        return False


def check_isolation(here: Surroundings) -> Iterator[Finding]:
    """Ledgers that others cannot see: of a container's own /dev/shm, and of other users."""
    variable = variable_of("runtime_dir")
    if here.in_container and _own_shm(here):
        message = f"{here.runtime_dir} is private to this container: engines in others cannot see its members"
        yield Finding("isolation", Status.NOTE, message, f"mount one directory in all of them and set {variable} to it")
    mine = default_runtime_dir()
    for path in sorted(mine.parent.glob("kvcached-*")):
        owner = path.name.removeprefix("kvcached-")
        if owner.isdecimal() and path != mine and path != here.runtime_dir:
            message = f"user {owner} has ledgers of their own in {path}; their members and yours do not see each other"
            yield Finding(
                "isolation", Status.NOTE, message, f"run engines that share a device as one user, one {variable}"
            )


def _own_shm(here: Surroundings) -> bool:
    """Whether the directory is on the /dev/shm that Docker, containerd and Podman give to each container.

    They name its source "shm"; a volume mounted there has another. Source: proc_pid_mountinfo(5), their defaults.
    """
    for line in (here.proc / "self/mountinfo").read_text().splitlines():
        mounted, _, file_system = line.partition(" - ")
        if mounted.split()[4] == "/dev/shm":
            return file_system.split()[1] == "shm" and here.runtime_dir.is_relative_to("/dev/shm")
    return False


# --- devices ----------------------------------------------------------------------------------------------------------


def check_driver(here: Surroundings) -> Iterator[Finding]:
    """Whether there are devices, and whether they can be asked."""
    found = here.inventory
    install = "pip install 'kvcached-core[cuda]'"
    if found.unavailable is Unavailable.NO_PACKAGE:
        present = _driver_files(here)
        status = Status.PROBLEM if present else Status.NOTE
        there = "there is an NVIDIA driver, and" if present else "GPUs, if any, were not looked at:"
        yield Finding("driver", status, f"{there} {found.unavailable.value}", install)
    elif found.unavailable is Unavailable.NO_DRIVER:
        message = "no NVIDIA driver here: only the host backend works"
        yield Finding(
            "driver", Status.NOTE, message, "start a container with its GPUs (--gpus all)" * here.in_container
        )
    elif found.unavailable is Unavailable.FAILED:
        message = f"the NVIDIA driver does not answer: {found.detail}"
        yield Finding("driver", Status.PROBLEM, message, "see what nvidia-smi says")
    else:
        for device in found.devices:
            message = f"{short_id(device.device_id)} {device.name}, {_free(device)}, driver {found.driver_version}"
            yield Finding("driver", Status.OK, message)


def _driver_files(here: Surroundings) -> bool:
    return (here.dev / "nvidiactl").exists()


def _free(device: Device) -> str:
    if device.free_bytes is None or device.total_bytes is None:
        return "memory shared with the host"
    return f"{format_bytes(device.free_bytes)} of {format_bytes(device.total_bytes)} free"


def check_virtual_memory(here: Surroundings) -> Iterator[Finding]:
    """Pages cannot come and go on a vGPU or with a driver that lacks virtual memory management."""
    if not here.inventory.devices and not _driver_files(here):
        return
    try:
        lacking = here.ask_virtual_memory()
    except UnsupportedError as error:
        yield Finding("vmm", Status.PROBLEM, str(error))
        return
    for device in lacking:
        message = f"{device} has no virtual memory management (a vGPU, or its driver lacks it)"
        yield Finding("vmm", Status.PROBLEM, message, "run engines natively on it")
    if not lacking:
        yield Finding("vmm", Status.OK, "every visible device has virtual memory management")


def check_sharing_modes(here: Surroundings) -> Iterator[Finding]:
    """MIG and MPS work; both change what sharing means."""
    for device in here.inventory.devices:
        if device.parent_id is not None:
            message = f"{short_id(device.device_id)} is a MIG instance of {short_id(device.parent_id)}"
            fix = "nothing to do: it has its own ledger, and memory moves between engines on the same instance only"
            yield Finding("mig", Status.NOTE, message, fix)
        if device.mps:
            message = f"an MPS server runs on {short_id(device.device_id)}: a fault in one client ends all of them"
            yield Finding("mps", Status.NOTE, message, f"keep {variable_of('guard')}=1, or stop MPS")


def check_outsiders(here: Surroundings) -> Iterator[Finding]:
    """Processes on a device that its ledger does not know."""
    ledgers = {device.device_id: device for device in here.snapshots.devices}
    for device in here.inventory.devices:
        yield from _check_outsiders(here, device, ledgers.get(device.device_id))


def _check_outsiders(here: Surroundings, device: Device, ledger: LedgerStatistics | None) -> Iterator[Finding]:
    members = ledger.members if ledger is not None else ()
    found = outsiders(device.processes, (member.pid for member in members), here.proc)
    where = short_id(device.device_id)
    share = f"mount one {variable_of('runtime_dir')} for all engines of the device"
    if not found.comparable:
        hidden = _unexplained_bytes(device, ledger)
        if found.count or hidden > 2 * UNNOTICED_BYTES:
            message = (
                f"{where}: {len(device.processes)} processes by NVML, {len(members)} in this ledger, "
                f"{format_bytes(hidden)} held by nobody in it. In a container pids cannot be compared"
            )
            yield Finding("outsiders", Status.PROBLEM, message, f"{share}; kvcached doctor on the host names them")
        return
    for process in found.processes:
        used = "an unknown amount" if process.used_bytes is None else format_bytes(process.used_bytes)
        small = process.used_bytes is not None and process.used_bytes < UNNOTICED_BYTES
        command = command_of(process.pid, here.proc)
        message = f"{where}: process {process.pid} ({command[:60] or 'gone or hidden'}) holds {used} outside the ledger"
        fix = f"stop it, or raise {variable_of('headroom')}; if it is an engine with kvcached, {share}"
        yield Finding("outsiders", Status.NOTE if small else Status.PROBLEM, message, fix)


def _unexplained_bytes(device: Device, ledger: LedgerStatistics | None) -> int:
    if device.total_bytes is None or device.free_bytes is None:
        return 0
    members = ledger.members if ledger is not None else ()
    known = sum(member.resident_bytes + member.static_used_bytes for member in members)
    return max(0, device.total_bytes - device.free_bytes - known)


CHECKS: tuple[Callable[[Surroundings], Iterable[Finding]], ...] = (
    check_python,
    check_settings,
    check_switch,
    check_upstream,
    check_plugins,
    check_runtime_dir,
    check_ledgers,
    check_servers,
    check_isolation,
    check_driver,
    check_virtual_memory,
    check_sharing_modes,
    check_outsiders,
)
