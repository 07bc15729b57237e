"""The file itself: how it comes to be, what is refused, and what words and locks can be relied on."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvcached_core.errors import LedgerError
from kvcached_core.ledger_file import SLOTS, Figures, LedgerFile, LedgerGone, device_ids, ledger_path

from tests.core.member_program import ROOT, MemberProcess, serve

TOTAL = 2**30
NOBODY = 65534


@contextmanager
def opened(runtime_dir: Path, device_id: str = "host", total_bytes: int | None = TOTAL) -> Iterator[LedgerFile]:
    file = LedgerFile.open(ledger_path(runtime_dir, device_id), device_id, total_bytes)
    try:
        yield file
    finally:
        file.close()


def python(script: str, *arguments: object, prefix: tuple[str, ...] = ()) -> str:
    """Run a script in a process of its own; its output. Fails with its errors."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def needs(*command: str) -> None:
    """Skip where this machine does not let us have a namespace of our own."""
    if shutil.which(command[0]) is None or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip(f"needs to be allowed: {' '.join(command)}")


# --- how it comes to be ------------------------------------------------------------------------------------------


def test_a_new_ledger_is_whole_and_this_users_alone(runtime_dir: Path) -> None:
    directory = runtime_dir / "made"
    with opened(directory):
        [path] = directory.iterdir()
        status = path.stat()
        assert path.name == "host.ledger"
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_blocks * 512 >= status.st_size  # allocated, so that a full disk cannot kill a writer later


@pytest.mark.parametrize("device_id", ["host", "GPU-3f1c0a7e-1111", "MIG-GPU-3f1c0a7e/1/0", "../evil", "a b%20ü"])
def test_any_device_id_names_one_file_in_the_directory(runtime_dir: Path, device_id: str) -> None:
    with opened(runtime_dir, device_id):
        assert device_ids(runtime_dir) == [device_id]
        assert len(list(runtime_dir.iterdir())) == 1


@pytest.mark.parametrize("device_id", ["", "x" * 256])
def test_a_device_id_that_does_not_fit_is_refused(runtime_dir: Path, device_id: str) -> None:
    with pytest.raises(LedgerError, match="no device id"):
        ledger_path(runtime_dir, device_id)


def test_processes_that_start_together_share_one_file(runtime_dir: Path) -> None:
    processes = [MemberProcess(serve, runtime_dir, TOTAL) for _ in range(8)]
    try:
        for process in processes:
            process.tell("join", name="m")
        assert {process.answer() for process in processes} == {"m", *(f"m-{number}" for number in range(2, 9))}
    finally:
        for process in processes:
            process.end()


def test_nobody_has_used_the_device(runtime_dir: Path) -> None:
    with pytest.raises(LedgerError, match="no engine has used the device"), opened(runtime_dir, total_bytes=None):
        pass
    assert list(runtime_dir.iterdir()) == []
    assert device_ids(runtime_dir / "missing") == []


# --- what is refused ---------------------------------------------------------------------------------------------


def overwrite(at: int, raw: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(raw)

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: os.truncate(path, 0), "truncated: 0 bytes"),
    "short": (lambda path: os.truncate(path, 4096), "truncated: 4096 of"),
    "longer": (lambda path: os.truncate(path, path.stat().st_size + 8), "truncated"),
    "foreign": (lambda path: path.write_bytes(b"GIF89a" + bytes(8192)), "not a ledger: it begins with b'GIF89a"),
    "zeros": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "not a ledger"),
    "older": (overwrite(8, struct.pack("=Q", 0)), "format 0, and this kvcached reads format 1"),
    "newer": (overwrite(8, struct.pack("=Q", 2)), "format 2"),
    "another device": (overwrite(64, b"GPU-9"), "ledger of device 'GPU-9"),
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    "a link": (
        lambda path: (path.rename(path.with_suffix(".x")), path.symlink_to(path.with_suffix(".x"))),
        "cannot be",
    ),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "not a regular file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("total_bytes", [TOTAL, None])
def test_a_damaged_file_is_refused_in_words_and_left_alone(
    runtime_dir: Path, damage: str, total_bytes: int | None
) -> None:
    with opened(runtime_dir):
        pass
    path = ledger_path(runtime_dir, "host")
    apply, words = DAMAGES[damage]
    apply(path)
    before = path.lstat()
    with pytest.raises(LedgerError) as refusal, opened(runtime_dir, total_bytes=total_bytes):
        pass
    assert words in str(refusal.value)
    assert str(path) in str(refusal.value)
    assert path.lstat().st_mtime_ns == before.st_mtime_ns
    assert path.lstat().st_size == before.st_size


def test_a_runtime_dir_that_is_a_file_is_refused(runtime_dir: Path) -> None:
    (runtime_dir / "file").touch()
    for directory in (runtime_dir / "file", runtime_dir / "file" / "below"):
        with pytest.raises(LedgerError, match="KVCACHED_RUNTIME_DIR"), opened(directory):
            pass


OPEN = """
    import os, sys
    from pathlib import Path
    from kvcached_core.errors import LedgerError
    from kvcached_core.ledger_file import LedgerFile, ledger_path
    if sys.argv[2:]:
        os.setgroups([])
        os.setgid(int(sys.argv[2]))
        os.setuid(int(sys.argv[2]))
    try:
        LedgerFile.open(ledger_path(Path(sys.argv[1]), "host"), "host", 2**30)
        print("opened")
    except LedgerError as error:
        print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
def test_two_users_do_not_share_a_ledger(runtime_dir: Path) -> None:
    with opened(runtime_dir):
        runtime_dir.chmod(0o700)
        assert "Permission denied" in python(OPEN, runtime_dir, NOBODY)
        runtime_dir.chmod(0o777)
        assert "Permission denied" in python(OPEN, runtime_dir, NOBODY)
        ledger_path(runtime_dir, "host").chmod(0o666)
        assert "belongs to user 0, and this is user 65534" in python(OPEN, runtime_dir, NOBODY)
    theirs = runtime_dir / "theirs"
    theirs.mkdir(0o777)
    os.chown(theirs, NOBODY, NOBODY)
    with pytest.raises(LedgerError, match="belongs to user 65534, and this is user 0"), opened(theirs):
        pass
    assert list(theirs.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_a_volume_that_root_made_for_all_is_used(runtime_dir: Path) -> None:
    runtime_dir.chmod(0o777)  # as Kubernetes makes an emptyDir
    assert python(OPEN, runtime_dir, NOBODY) == "opened\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_a_directory_that_cannot_be_written_is_refused(runtime_dir: Path) -> None:
    runtime_dir.chmod(0o755)
    refusal = python(OPEN, runtime_dir, NOBODY)
    assert "Permission denied" in refusal
    assert "KVCACHED_RUNTIME_DIR" in refusal
    assert list(runtime_dir.iterdir()) == []


def test_a_full_file_system_is_refused_and_nothing_is_left_on_it(runtime_dir: Path) -> None:
    unshared = ("unshare", "--map-root-user", "--mount")
    needs(*unshared, "--")
    script = OPEN + "    print(list(Path(sys.argv[1]).iterdir()))\n"
    mounted = (*unshared, "sh", "-c", f'mount -t tmpfs -o size=64k tmpfs {runtime_dir} && exec "$@"', "sh")
    refusal, left = python(script, runtime_dir, prefix=mounted).splitlines()
    assert "no space for" in refusal
    assert left == "[]"


# --- words -------------------------------------------------------------------------------------------------------

TOGGLE = """
    import sys
    from pathlib import Path
    from kvcached_core.ledger_file import Figures, LedgerFile, ledger_path
    file = LedgerFile.open(ledger_path(Path(sys.argv[1]), "host"), "host", None)
    slot = file.claim(Figures())
    print(slot, flush=True)
    while True:
        file.store_quietly(slot, demand_bytes=2**64 - 1)
        file.store_quietly(slot, demand_bytes=0)
"""


def test_a_word_is_never_read_half_written(runtime_dir: Path) -> None:
    with opened(runtime_dir) as file:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", textwrap.dedent(TOGGLE), str(runtime_dir)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as writer:
            assert writer.stdout is not None
            slot = int(writer.stdout.readline())
            file.occupy(slot)  # only to have it read
            rows: dict[int, object] = {}
            seen = set()
            for _ in range(20_000):
                file._read_row(slot, rows)  # type: ignore[arg-type]
                seen.add(rows[slot].figures.demand_bytes)  # type: ignore[attr-defined]
            writer.kill()
    assert seen == {0, 2**64 - 1}


def test_all_slots_can_be_taken_and_no_more(runtime_dir: Path) -> None:
    with opened(runtime_dir) as file:
        slots = {file.claim(Figures()) for _ in range(SLOTS)}
        assert slots == set(range(SLOTS))
        with pytest.raises(LedgerError, match=f"all {SLOTS} slots"):
            file.claim(Figures())
        file.free(17)
        assert file.claim(Figures()) == 17


def test_a_reading_is_taken_again_when_something_changed_while_the_driver_was_asked(runtime_dir: Path) -> None:
    with opened(runtime_dir) as file:
        slot = file.claim(Figures(lease_bytes=10))
        file.occupy(slot)
        answers = iter((100, 90))

        def driver_free() -> int:
            free = next(answers)
            if free == 100:
                file.store(slot, created_bytes=10)  # as another member would: its pages were made after the 100
            return free

        [row], measured = file.read(driver_free)
        assert (row.figures.created_bytes, measured) == (10, 90)


def test_a_file_that_never_stands_still_is_given_up_on(runtime_dir: Path) -> None:
    with opened(runtime_dir) as file:
        slot = file.claim(Figures())
        file.occupy(slot)
        counter = iter(range(1_000_000))

        def restless() -> int:
            file.store(slot, demand_bytes=next(counter))
            return 0

        with pytest.raises(LedgerError, match="changed at each of"):
            file.read(restless)


# --- locks -------------------------------------------------------------------------------------------------------

FORK = """
    import gc, os, sys
    from pathlib import Path
    from kvcached_core.errors import LedgerError
    from kvcached_core.ledger import Ledger
    directory = Path(sys.argv[1])
    ledger = Ledger.open("host", 2**30, runtime_dir=directory)
    account = ledger.join("parent", engine="test")
    account.lease(2**20)
    before = ledger.generation
    child = os.fork()
    if child == 0:
        for attempt in (
            lambda: account.lease(1),
            lambda: account.give_back(1),
            lambda: account.report(demand_bytes=9, unmet_bytes=9, free_bytes=0, cached_bytes=0, busy=True),
            lambda: account.leave(),
            lambda: ledger.snapshot(),
            lambda: ledger.join("child", engine="test"),
        ):
            try:
                attempt()
                os._exit(1)
            except LedgerError as error:
                assert f"was opened by process {os.getppid()}, of which this is a fork" in str(error), error
        ledger.close()
        own = Ledger.open("host", 2**30, runtime_dir=directory)
        assert own is not ledger
        mine = own.join("child", engine="test")
        assert {member.name for member in own.snapshot().members} == {"parent", "child"}
        assert mine.lease(2**30) == 2**30 - 2**20
        del ledger, account
        gc.collect()
        grandchild = os.fork()
        if grandchild == 0:  # a third process: it sees locks as the kernel has them
            seen = Ledger.open("host", None, runtime_dir=directory).snapshot().members
            os._exit({member.name for member in seen} != {"parent", "child"})
        assert os.waitpid(grandchild, 0)[1] == 0
        other = Ledger.open("host", 2**30, runtime_dir=directory)
        assert other is own
        other.close()
        own.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    [member] = ledger.snapshot().members
    assert (member.name, member.lease_bytes, member.demand_bytes) == ("parent", 2**20, 0)
    assert Ledger.open("host", 2**30, runtime_dir=directory) is ledger
    print("alive", flush=True)
    sys.stdin.read()
"""


def test_a_fork_owns_nothing_writes_nothing_and_drops_no_lock(runtime_dir: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(FORK), str(runtime_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "alive\n"
        with opened(runtime_dir) as file:
            [row] = file.read()[0]  # seen from a third process, after its child has come and gone
            assert (row.figures.pid, row.figures.lease_bytes) == (parent.pid, 2**20)
            parent.kill()
            parent.wait()
            assert file.read()[0] == []


INSIDE = """
    import sys
    from pathlib import Path
    from kvcached_core.ledger import Ledger
    ledger = Ledger.open("host", 2**30, runtime_dir=Path(sys.argv[1]))
    account = ledger.join("inside", engine="test")
    print(account.lease(2**29), sorted(member.name for member in ledger.snapshot().members), flush=True)
    sys.stdin.read()
"""


def test_members_in_two_pid_namespaces_see_each_other(runtime_dir: Path) -> None:
    unshared = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child")
    needs(*unshared, "--")
    outside = MemberProcess(serve, runtime_dir, TOTAL)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [*unshared, sys.executable, "-c", textwrap.dedent(INSIDE), str(runtime_dir)]
    try:
        assert outside.do("join", name="outside") == "outside"
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as inside:
            assert inside.stdout is not None
            assert inside.stdout.readline() == f"{2**29} ['inside', 'outside']\n"
            assert outside.do("lease", num_bytes=2**30) == 2**29
            inside.kill()  # and with it, in a moment, its namespace
        ends = time.monotonic() + 10
        while (granted := outside.do("lease", num_bytes=2**30)) == 0 and time.monotonic() < ends:
            pass
        assert granted == 2**29
    finally:
        outside.end()


# --- lost while in use -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lose", "words"),
    [
        (lambda path: path.unlink(), "deleted"),
        (lambda path: shutil.rmtree(path.parent), "deleted"),
        (lambda path: os.truncate(path, 0), "truncated to 0 of"),
    ],
)
def test_a_lost_file_is_noticed_before_its_mapping_is_touched(
    runtime_dir: Path, lose: Callable[[Path], object], words: str
) -> None:
    with opened(runtime_dir / "made") as file:
        file.check()
        lose(file.path)
        with pytest.raises(LedgerGone, match=words):
            file.check()


@pytest.mark.parametrize(
    ("lose", "words"),
    [
        (lambda path: path.parent.rename(path.parent.with_name("moved")), "cannot be reached"),
        (lambda path: path.rename(path.with_name("moved")) and path.touch(), "replaced"),
    ],
)
def test_a_file_that_others_would_not_find_is_noticed(
    runtime_dir: Path, lose: Callable[[Path], object], words: str
) -> None:
    with opened(runtime_dir / "made") as file:
        file.check_path()
        lose(file.path)
        with pytest.raises(LedgerGone, match=words):
            file.check_path()


def test_a_closed_file_is_not_touched(runtime_dir: Path) -> None:
    with opened(runtime_dir) as file:
        pass
    file.close()
    with pytest.raises(LedgerError, match="is closed"):
        file.check()
