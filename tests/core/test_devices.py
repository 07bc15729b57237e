"""What the machine's devices are and who uses them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvcached_core.devices import (
    HOST_PID_NAMESPACE,
    DeviceProcess,
    Unavailable,
    command_of,
    inventory,
    outsiders,
    without_virtual_memory,
)
from kvcached_core.errors import UnsupportedError

from tests.core import recorded_nvml as nvml
from tests.core.fake_driver import FakeDriver, Gpu
from tests.core.recorded_nvml import GIB, Recorded, RecordedNvml

GPU_ID = "GPU-3f1c0a7e-1111-2222-3333-444455556666"
MIG_ID = "MIG-7a1b0a7e-1111-2222-3333-444455556666"


def test_a_gpu_is_known_by_its_uuid_with_every_kind_of_process() -> None:
    recorded = Recorded(GPU_ID, compute={10: GIB, 11: None}, graphics={12: 5}, knows_mig=False)
    answers = RecordedNvml(recorded)
    found = inventory(answers)
    (device,) = found.devices
    assert (device.device_id, device.name, device.total_bytes) == (GPU_ID, "NVIDIA H200", 139 * GIB)
    assert device.processes == (DeviceProcess(10, GIB), DeviceProcess(11, None), DeviceProcess(12, 5))
    assert not device.mps
    assert found.driver_version == "580.95.05"
    assert answers.sessions == 0, "NVML is shut down again"


def test_in_mig_mode_the_instances_are_the_devices() -> None:
    instance = Recorded(MIG_ID, name="NVIDIA H200 MIG 1g.18gb", total_bytes=18 * GIB, compute={20: GIB})
    found = inventory(RecordedNvml(Recorded(GPU_ID, instances=[None, instance, None])))
    (device,) = found.devices
    assert (device.device_id, device.parent_id, device.total_bytes) == (MIG_ID, GPU_ID, 18 * GIB)
    assert device.processes == (DeviceProcess(20, GIB),)


def test_processes_under_mps_count_once_and_are_said_to_be_so() -> None:
    (device,) = inventory(RecordedNvml(Recorded(GPU_ID, compute={7: 3}, mps={7: 3, 8: 4}))).devices
    assert device.mps
    assert [process.pid for process in device.processes] == [7, 8]


def test_a_device_that_shares_the_hosts_memory_has_no_figures() -> None:
    (device,) = inventory(RecordedNvml(Recorded(GPU_ID, total_bytes=None))).devices
    assert device.total_bytes is None
    assert device.free_bytes is None


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (nvml.NVMLError_LibraryNotFound("NVML Shared Library Not Found"), Unavailable.NO_DRIVER),
        (nvml.NVMLError_DriverNotLoaded("Driver Not Loaded"), Unavailable.NO_DRIVER),
        (nvml.NVMLError_Unknown("Unknown Error"), Unavailable.FAILED),
    ],
)
def test_a_machine_without_answers_is_an_answer(failure: nvml.NVMLError, reason: Unavailable) -> None:
    found = inventory(RecordedNvml(failure=failure))
    assert found.unavailable is reason
    assert found.detail == str(failure)
    assert found.devices == ()


def test_without_the_package_there_is_no_answer_and_no_traceback() -> None:
    program = (
        "import sys; sys.modules['pynvml'] = None\n"
        "from kvcached_core.devices import inventory\n"
        "print(inventory().unavailable.name)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "NO_PACKAGE"


class Proc:
    """A /proc of chosen processes, seen from the host or from a container."""

    def __init__(self, root: Path, namespace: str = HOST_PID_NAMESPACE) -> None:
        self.root = root
        (root / "self/ns").mkdir(parents=True)
        (root / "self/ns/pid").symlink_to(namespace)

    def add(self, host_pid: int, *inner_pids: int, command: str = "vllm serve") -> None:
        folder = self.root / str(host_pid)
        folder.mkdir()
        pids = "\t".join(map(str, (host_pid, *inner_pids)))
        (folder / "status").write_text(f"Name:\tx\nNSpid:\t{pids}\nThreads:\t1\n")
        (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")


def test_on_the_host_a_member_in_a_container_is_no_outsider(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    proc.add(5000, 17)  # a member inside a container, whose ledger says 17
    proc.add(6000)
    listed = [DeviceProcess(5000, GIB), DeviceProcess(6000, 2 * GIB)]
    found = outsiders(listed, [17], proc.root)
    assert found.comparable
    assert found.processes == (DeviceProcess(6000, 2 * GIB),)


def test_two_containers_may_use_the_same_pid_and_one_member_hides_one_process_alone(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    proc.add(5000, 17)
    proc.add(6000, 17)
    found = outsiders([DeviceProcess(5000, 1), DeviceProcess(6000, 1)], [17], proc.root)
    assert found.count == 1


def test_a_process_that_cannot_be_looked_at_is_an_outsider(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    assert outsiders([DeviceProcess(5000, 1)], [5000], proc.root).count == 1


def test_inside_a_container_only_numbers_are_compared(tmp_path: Path) -> None:
    proc = Proc(tmp_path, "pid:[4026532000]")
    listed = [DeviceProcess(5000, 1), DeviceProcess(6000, 1)]
    found = outsiders(listed, [17], proc.root)
    assert (found.count, found.processes, found.comparable) == (1, (), False)
    assert outsiders(listed, [17, 18, 19], proc.root).count == 0


def test_this_process_is_known_to_itself() -> None:
    if os.readlink("/proc/self/ns/pid") != HOST_PID_NAMESPACE:
        pytest.skip("this test runs in a PID namespace of its own")
    assert outsiders([DeviceProcess(os.getpid(), 1)], [os.getpid()]).count == 0


def test_the_command_of_a_process(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    proc.add(5000, command="vllm serve qwen3")
    assert command_of(5000, proc.root) == "vllm serve qwen3"
    assert command_of(5001, proc.root) == ""


def test_a_device_without_virtual_memory_is_named() -> None:
    driver = FakeDriver(Gpu(GIB), Gpu(GIB, name="GRID A16-4Q", virtual_memory=False))
    assert without_virtual_memory(driver) == ("device 1 (GRID A16-4Q)",)


def test_looking_for_virtual_memory_creates_no_context() -> None:
    driver = FakeDriver(Gpu(GIB))
    without_virtual_memory(driver)
    assert driver.contexts_created == []


def test_without_a_driver_virtual_memory_is_refused_in_words() -> None:
    with pytest.raises(UnsupportedError, match="NO_DEVICE"):
        without_virtual_memory(FakeDriver())
