"""Which device is meant: names, numbers, threads. Most of it needs two devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvcached_core.backends.cuda import CudaBackend
from kvcached_core.devices import inventory

from .conftest import RunProgram


@pytest.fixture(scope="module")
def device_ids() -> list[str]:
    """By ordinal, as the driver has them in this process."""
    count = len(inventory().devices)
    backends = [CudaBackend(ordinal) for ordinal in range(count)]
    for backend in backends:
        backend.close()
    return [backend.device_id for backend in backends]


def test_the_driver_and_the_management_library_name_devices_alike(device_ids: list[str]) -> None:
    assert sorted(device_ids) == sorted(device.device_id for device in inventory().devices)


def test_asking_for_the_current_device_creates_no_context(run_program: RunProgram, device_ids: list[str]) -> None:
    done = run_program("name_devices")
    assert done.stdout.splitlines() == [device_ids[0], "contexts 0", *device_ids], done.stderr


def test_a_device_chosen_by_uuid_keeps_its_name(run_program: RunProgram, device_ids: list[str]) -> None:
    done = run_program("name_devices", CUDA_VISIBLE_DEVICES=device_ids[-1])
    assert done.stdout.splitlines() == [device_ids[-1], "contexts 0", device_ids[-1]], done.stderr


def test_asking_for_capacity_creates_neither_a_context_nor_a_file(
    run_program: RunProgram, device_ids: list[str], tmp_path: Path
) -> None:
    done = run_program("ask_capacity", tmp_path / "nowhere")
    assert done.stdout.splitlines() == [f"{device_ids[0]} True 5", "contexts 0"], done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.dual_gpu
@pytest.mark.usefixtures("two_devices")
class TestWithTwoDevices:
    @pytest.mark.parametrize("callers_device", ["none", 0, 1])
    @pytest.mark.parametrize("ordinal", [0, 1])
    def test_every_answer_is_the_pools_own_devices(
        self, run_program: RunProgram, ordinal: int, callers_device: str | int
    ) -> None:
        done = run_program("check_device", ordinal, callers_device)
        assert done.returncode == 0, done.stdout + done.stderr

    @pytest.mark.parametrize("visible", ["1", "1,0", "uuid"])
    def test_a_device_keeps_its_name_under_another_number(
        self, run_program: RunProgram, device_ids: list[str], visible: str
    ) -> None:
        done = run_program("name_devices", CUDA_VISIBLE_DEVICES=device_ids[1] if visible == "uuid" else visible)
        assert done.stdout.splitlines()[:3] == [device_ids[1], "contexts 0", device_ids[1]], done.stderr

    def test_a_pool_works_on_the_only_visible_device(self, run_program: RunProgram) -> None:
        done = run_program("stray", "read", "sealed", CUDA_VISIBLE_DEVICES="1")
        assert done.stdout == "read 0\nmapped page 2\n", done.stderr
