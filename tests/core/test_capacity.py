"""How much may be taken: of the right device, within the ceiling, and nothing comes into being by asking.

Answers for a pool in this process, from every kind of thread, are checked by `device_correctness.check_capacity`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kvcached_core.account import Account
from kvcached_core.backends.base import DeviceMemory
from kvcached_core.backends.cuda import CudaBackend
from kvcached_core.backends.host import HostBackend
from kvcached_core.capacity import Capacity, current_device_capacity, device_capacity, driver_free, pool_capacity
from kvcached_core.errors import LedgerError, UnsupportedError
from kvcached_core.ledger import Ledger

from .fake_driver import MIB, FakeDriver, Gpu
from .recorded_nvml import NVMLError_LibraryNotFound, Recorded, RecordedNvml


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(Gpu(8 * MIB), Gpu(4 * MIB))


def nvml_of(driver: FakeDriver) -> RecordedNvml:
    """NVML lists every device of the machine and knows nothing of this process's numbers."""
    return RecordedNvml(
        *(
            Recorded(f"GPU-{gpu.uuid}", total_bytes=gpu.total_bytes, free_bytes=gpu.total_bytes - gpu.used_bytes)
            for gpu in reversed(driver.gpus)
        )
    )


@pytest.fixture(params=["main", "fresh"])
def in_thread(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    if request.param == "main":
        yield lambda question: question()
        return
    with ThreadPoolExecutor(1) as pool:
        yield lambda question: pool.submit(question).result()


def ask_here(driver: FakeDriver, runtime_dir: Path, device: int | None = None, **options: Any) -> Capacity:
    """The question of somebody without a pool, in a thread with a current device or none."""
    if device is not None:
        driver.set_device(device)
    stack = list(driver.stack)
    answer = current_device_capacity(runtime_dir=runtime_dir, driver=driver, nvml=nvml_of(driver), **options)
    assert driver.stack == stack
    return answer


def join(driver: FakeDriver, ordinal: int, runtime_dir: Path, **limits: Any) -> tuple[CudaBackend, Ledger, Account]:
    backend = CudaBackend(ordinal, driver=driver)
    ledger = Ledger.open(
        backend.device_id,
        backend.memory().total_bytes,
        runtime_dir=runtime_dir,
        driver_free=driver_free(backend.memory),
    )
    return backend, ledger, ledger.join("neighbour", engine="vllm", **limits)


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("short", [0, 1])
def test_without_a_pool_the_callers_current_device_is_meant(
    driver: FakeDriver, runtime_dir: Path, in_thread: Callable[..., Any], device: int, short: int
) -> None:
    driver.gpus[short].fill()
    answer = in_thread(lambda: ask_here(driver, runtime_dir, device))
    gpu = driver.gpus[device]
    free_bytes = 0 if device == short else gpu.total_bytes
    assert answer == Capacity(f"GPU-{gpu.uuid}", may_take_bytes=free_bytes, total_bytes=gpu.total_bytes)


def test_also_while_a_pool_of_the_same_process_is_on_another_device(
    driver: FakeDriver, runtime_dir: Path, in_thread: Callable[..., Any]
) -> None:
    _, ledger, account = join(driver, 0, runtime_dir)
    account.lease(5 * MIB)
    assert in_thread(lambda: ask_here(driver, runtime_dir, 1)).may_take_bytes == 4 * MIB
    assert in_thread(lambda: ask_here(driver, runtime_dir, 0)).may_take_bytes == 3 * MIB
    ledger.close()


def test_what_others_hold_in_the_shared_record_is_not_there_to_take(driver: FakeDriver, runtime_dir: Path) -> None:
    _, ledger, account = join(driver, 0, runtime_dir)
    account.lease(3 * MIB)
    assert ask_here(driver, runtime_dir).may_take_bytes == 5 * MIB
    account.static_lease(4 * MIB, deadline_seconds=1)
    assert ask_here(driver, runtime_dir).may_take_bytes == MIB
    ledger.close()


def test_the_devices_number_in_this_process_does_not_matter(runtime_dir: Path) -> None:
    gpus = Gpu(8 * MIB), Gpu(4 * MIB)
    neighbours = FakeDriver(*gpus)
    _, ledger, account = join(neighbours, 1, runtime_dir)
    account.lease(MIB)
    here = FakeDriver(*gpus, visible=f"GPU-{gpus[1].uuid}")
    assert ask_here(here, runtime_dir) == Capacity(f"GPU-{gpus[1].uuid}", 3 * MIB, 4 * MIB)
    ledger.close()


@pytest.mark.parametrize(
    ("ceiling_bytes", "may_take_bytes"), [(MIB, MIB), (64 * MIB, 8 * MIB), (0, 0), (None, 8 * MIB)]
)
def test_a_ceiling_holds_before_there_is_a_ledger(
    driver: FakeDriver, runtime_dir: Path, ceiling_bytes: int | None, may_take_bytes: int
) -> None:
    assert ask_here(driver, runtime_dir, ceiling_bytes=ceiling_bytes).may_take_bytes == may_take_bytes


def test_headroom_is_left_also_where_nobody_is_a_member(driver: FakeDriver, runtime_dir: Path) -> None:
    assert ask_here(driver, runtime_dir, headroom_bytes=MIB).may_take_bytes == 7 * MIB
    driver.gpus[0].fill()
    assert ask_here(driver, runtime_dir, headroom_bytes=MIB).may_take_bytes == 0


def test_a_members_ceiling_bounds_what_it_may_take(driver: FakeDriver, runtime_dir: Path) -> None:
    backend, ledger, account = join(driver, 1, runtime_dir, ceiling_bytes=3 * MIB)
    assert pool_capacity(backend, account) == Capacity(backend.device_id, 3 * MIB, 4 * MIB)
    account.lease(2 * MIB)
    assert pool_capacity(backend, account).may_take_bytes == MIB
    ledger.set_limits("neighbour", ceiling_bytes=MIB)
    assert pool_capacity(backend, account).may_take_bytes == 0
    ledger.close()


@pytest.mark.parametrize("device", [None, 0, 1])
def test_asking_creates_nothing(driver: FakeDriver, runtime_dir: Path, device: int | None) -> None:
    if device is not None:
        driver.set_device(device)
    before, contexts = driver.holdings(), list(driver.contexts_created)
    nowhere = runtime_dir / "no" / "directory"
    ask_here(driver, nowhere)
    ask_here(driver, runtime_dir, ceiling_bytes=MIB)
    assert (driver.holdings(), driver.contexts_created) == (before, contexts)
    assert list(runtime_dir.iterdir()) == []


def test_asking_leaves_the_pools_own_ledger_open(driver: FakeDriver, runtime_dir: Path) -> None:
    _, ledger, account = join(driver, 0, runtime_dir)
    files = sorted(path.name for path in runtime_dir.iterdir())
    ask_here(driver, runtime_dir, 0)
    assert account.lease(MIB) == MIB
    assert [member.name for member in ledger.snapshot().members] == ["neighbour"]
    assert sorted(path.name for path in runtime_dir.iterdir()) == files
    ledger.close()


def test_asking_leaves_no_file_open(driver: FakeDriver, runtime_dir: Path) -> None:
    _, ledger, _ = join(driver, 0, runtime_dir)
    ledger.close()
    ask_here(driver, runtime_dir)
    open_files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [path for path in open_files if path.startswith(str(runtime_dir))]


def test_a_damaged_ledger_is_an_error_and_no_number(driver: FakeDriver, runtime_dir: Path) -> None:
    _, ledger, _ = join(driver, 0, runtime_dir)
    ledger.close()
    (file,) = runtime_dir.iterdir()
    file.write_bytes(b"not a ledger")
    with pytest.raises(LedgerError):
        ask_here(driver, runtime_dir)


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (RecordedNvml(failure=NVMLError_LibraryNotFound("gone")), "no NVIDIA driver on this machine gone"),
        (RecordedNvml(Recorded("GPU-another")), "NVML does not know the device"),
    ],
)
def test_a_device_that_cannot_be_asked_without_a_context_is_refused(
    driver: FakeDriver, runtime_dir: Path, nvml: RecordedNvml, reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=rf"GPU-{driver.gpus[0].uuid} a context.*cannot be asked.*{reason}"):
        current_device_capacity(runtime_dir=runtime_dir, driver=driver, nvml=nvml)


def test_the_hosts_budget_is_the_members_alone(runtime_dir: Path) -> None:
    memory = HostBackend(8 * MIB).memory
    assert device_capacity("host", memory, runtime_dir=runtime_dir) == Capacity("host", 8 * MIB, 8 * MIB)
    ledger = Ledger.open("host", 8 * MIB, runtime_dir=runtime_dir, driver_free=driver_free(memory))
    ledger.join("neighbour", engine="vllm").lease(5 * MIB)
    assert device_capacity("host", memory, runtime_dir=runtime_dir).may_take_bytes == 3 * MIB
    assert device_capacity("host", memory, runtime_dir=runtime_dir, ceiling_bytes=MIB).may_take_bytes == MIB
    ledger.close()


def test_what_is_free_is_asked_anew_each_time() -> None:
    answers = iter([9, 7, 5])
    ask = driver_free(lambda: DeviceMemory(next(answers), 10))
    assert ask is not None
    assert [ask(), ask()] == [7, 5]
