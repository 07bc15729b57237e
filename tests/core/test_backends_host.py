"""The host backend: real faults, real memory, errors that say what to do."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kvcached_core.arena import Arena
from kvcached_core.backends.base import DeviceMemory
from kvcached_core.backends.host import HostBackend, Libc
from kvcached_core.errors import DeviceMemoryError, DriverError

MIB = 1 << 20
PAGE_BYTES = 64 << 10


class FailingLibc(Libc):
    """Fails the calls that a test names, with an errno."""

    def __init__(self) -> None:
        super().__init__()
        self.refuse: Callable[[str, int], int] = lambda call, detail: 0

    def _check(self, call: str, detail: int) -> None:
        number = self.refuse(call, detail)
        if number:
            raise OSError(number, os.strerror(number))

    def mmap(self, size_bytes: int, protection: int, flags: int) -> int:
        self._check("mmap", protection)
        return super().mmap(size_bytes, protection, flags)

    def mprotect(self, address: int, size_bytes: int, protection: int) -> None:
        self._check("mprotect", protection)
        super().mprotect(address, size_bytes, protection)

    def madvise(self, address: int, size_bytes: int, advice: int) -> None:
        self._check("madvise", advice)
        super().madvise(address, size_bytes, advice)


def resident_bytes() -> int:
    """Memory of this process that is really there."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_inaccessible_mappings() -> int:
    return Path("/proc/self/maps").read_text().count(" ---p ")


def run_child(body: str) -> subprocess.CompletedProcess[str]:
    """A process with an arena of 16 pages, of which 4 to 7 are mapped, that runs ``body``."""
    program = f"""
import ctypes
from kvcached_core.arena import Arena
from kvcached_core.backends.host import HostBackend
arena = Arena(HostBackend({MIB}), 16 * {PAGE_BYTES}, {PAGE_BYTES})
arena.map([range(4, 8)])
def touch(page):
    ctypes.c_uint8.from_address(arena.address + page * {PAGE_BYTES}).value = 1
{body}
print("survived")
arena.close()
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


def test_a_mapped_page_may_be_touched() -> None:
    child = run_child("touch(4); touch(7)")
    assert (child.returncode, child.stdout) == (0, "survived\n"), child.stderr


@pytest.mark.parametrize(
    "body",
    [
        "touch(3)",
        "touch(8)",
        "arena.unmap([range(5, 6)]); touch(5)",
        "address = arena.address; arena.close(); touch(4)",
    ],
    ids=["before", "behind", "unmapped", "closed"],
)
def test_touching_what_is_not_mapped_kills_the_process(body: str) -> None:
    child = run_child(body)
    assert child.returncode == -signal.SIGSEGV
    assert "survived" not in child.stdout


def test_a_forked_child_has_no_part_of_the_arena() -> None:
    child = run_child("""
import os
child = os.fork()
if child == 0:
    touch(4)
    os._exit(0)
status = os.waitpid(child, 0)[1]
assert os.WIFSIGNALED(status), status
touch(4)
""")
    assert (child.returncode, child.stdout) == (0, "survived\n"), child.stderr


def test_memory_is_there_when_mapped_and_gone_when_unmapped() -> None:
    backend = HostBackend(64 * MIB)
    arena = Arena(backend, 1 << 40, MIB)
    before = resident_bytes()
    arena.map([range(1000, 1032)])
    assert 31 * MIB < resident_bytes() - before < 40 * MIB
    arena.unmap([range(1000, 1032)])
    assert resident_bytes() - before < 8 * MIB
    arena.close()


def test_without_a_budget_the_total_is_the_machines_memory() -> None:
    meminfo = Path("/proc/meminfo").read_text()
    machine_bytes = int(meminfo.split("MemTotal:")[1].split()[0]) << 10
    assert HostBackend().memory().total_bytes == machine_bytes


def test_the_budget_is_the_total_and_what_is_free_is_the_ledgers_to_say() -> None:
    assert HostBackend(3 * MIB).memory() == DeviceMemory(free_bytes=None, total_bytes=3 * MIB)


@pytest.mark.parametrize("alignment_bytes", [4096, 64 << 10, 2 * MIB])
def test_addresses_are_aligned(alignment_bytes: int) -> None:
    backend = HostBackend(MIB)
    before = num_inaccessible_mappings()
    addresses = [backend.reserve(3 * alignment_bytes, alignment_bytes) for _ in range(8)]
    assert [address % alignment_bytes for address in addresses] == [0] * 8
    for address in addresses:
        backend.release(address, 3 * alignment_bytes)
    assert num_inaccessible_mappings() == before


@pytest.mark.parametrize(("page_bytes", "huge"), [(PAGE_BYTES, False), (6 * MIB, True)])
def test_huge_pages_are_asked_for_where_a_page_holds_whole_ones(page_bytes: int, huge: bool) -> None:
    size = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
    if not size.exists() or int(size.read_text()) != 2 * MIB:
        pytest.skip("this kernel has no transparent huge pages of 2 MiB")
    arena = Arena(HostBackend(MIB), 4 * page_bytes, page_bytes)
    mapping = Path("/proc/self/smaps").read_text().partition(f"{arena.address:x}-")[2]
    flags = mapping.partition("VmFlags:")[2].partition("\n")[0].split()
    assert ("hg" in flags, "dc" in flags) == (huge, True)
    arena.close()


def test_a_kernel_without_populate_gets_its_pages_by_writing() -> None:
    libc = FailingLibc()
    libc.refuse = lambda call, advice: errno.EINVAL if (call, advice) == ("madvise", 23) else 0
    arena = Arena(HostBackend(64 * MIB, libc=libc), 64 * MIB, MIB)
    before = resident_bytes()
    arena.map([range(16)])
    assert resident_bytes() - before > 15 * MIB
    assert ctypes.string_at(arena.address, MIB) == bytes(MIB)
    arena.close()


def test_too_many_mappings_says_which_limit_to_raise() -> None:
    libc = FailingLibc()
    arena = Arena(HostBackend(MIB, libc=libc), 16 * PAGE_BYTES, PAGE_BYTES)
    limit = Path("/proc/sys/vm/max_map_count").read_text().strip()
    libc.refuse = lambda call, protection: errno.ENOMEM if call == "mprotect" else 0
    with pytest.raises(
        DeviceMemoryError, match=rf"mprotect.*ENOMEM.*vm\.max_map_count \({limit}\).*sysctl.*KVCACHED_PAGE_SIZE"
    ):
        arena.map([range(2)])
    libc.refuse = lambda call, detail: 0
    assert arena.map([range(2)]) == 2
    arena.close()


def test_the_kernels_limit_of_mappings_is_met_and_undone() -> None:
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 200_000:
        pytest.skip(f"vm.max_map_count is {limit}: too many pages to reach it")
    backend = HostBackend()
    arena = Arena(backend, 2 * limit * 4096, 4096)
    with pytest.raises(DeviceMemoryError, match=r"vm\.max_map_count"):
        arena.map([range(0, arena.num_pages, 2)])
    assert arena.num_resident_pages == 0
    assert arena.map([range(64)]) == 64
    arena.close()


def test_no_room_for_the_addresses_is_an_error_with_the_size() -> None:
    with pytest.raises(DeviceMemoryError, match=r"mmap of 256\.00 TiB failed on the host: ENOMEM"):
        Arena(HostBackend(MIB), 1 << 48, 1 << 30)


@pytest.mark.parametrize("call", ["mmap", "madvise"])
def test_an_arena_that_cannot_be_reserved_leaves_no_addresses(call: str) -> None:
    libc = FailingLibc()
    libc.refuse = lambda name, detail: errno.EPERM if name == call else 0
    before = num_inaccessible_mappings()
    with pytest.raises(DriverError, match="EPERM") as caught:
        Arena(HostBackend(MIB, libc=libc), 16 * MIB, MIB)
    assert (caught.value.result, caught.value.device_id) == ("EPERM", "host")
    assert num_inaccessible_mappings() == before


def test_a_page_whose_memory_cannot_be_given_back_stays_mapped() -> None:
    libc = FailingLibc()
    backend = HostBackend(MIB, libc=libc)
    arena = Arena(backend, 4 * PAGE_BYTES, PAGE_BYTES)
    arena.map([range(1)])
    libc.refuse = lambda call, advice: errno.EINVAL if (call, advice) == ("madvise", 4) else 0
    with pytest.raises(DriverError, match="unmapping"):
        arena.unmap([range(1)])
    ctypes.c_uint8.from_address(arena.address).value = 1
    assert arena.num_resident_pages == 1
    libc.refuse = lambda call, detail: 0
    arena.close()


def test_a_tensor_covers_the_range_and_shares_its_memory() -> None:
    torch = pytest.importorskip("torch")
    backend = HostBackend(MIB)
    arena = Arena(backend, 4 * PAGE_BYTES, PAGE_BYTES)
    arena.map([range(1, 2)])
    whole, part = arena.tensor(), arena.tensor(PAGE_BYTES, PAGE_BYTES)
    part.fill_(3)
    assert (whole.shape, whole.dtype, whole.device) == ((4 * PAGE_BYTES,), torch.int8, backend.device)
    assert int(whole[2 * PAGE_BYTES - 1]) == 3
    assert whole.data_ptr() == arena.address
    arena.close()
