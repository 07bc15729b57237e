"""The arena's contract, and the memory it takes and gives, on a real device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvcached_core.arena import Arena
from kvcached_core.backends.cuda import CudaBackend
from kvcached_core.devices import inventory
from kvcached_core.errors import DeviceMemoryError
from kvcached_core.testing import check_arena

MIB = 1 << 20

pytest.importorskip("torch")


@pytest.fixture
def backend() -> Iterator[CudaBackend]:
    backend = CudaBackend()
    yield backend
    backend.close()


@pytest.mark.parametrize("page_bytes", [2 * MIB, 32 * MIB, 24 * MIB])
@pytest.mark.parametrize("guard", [True, False], ids=["guard", "strict"])
def test_arenas_keep_their_promises(guard: bool, page_bytes: int) -> None:
    check_arena(CudaBackend, page_bytes=page_bytes, guard=guard)


def test_memory_is_the_devices_again_when_a_page_is_unmapped(backend: CudaBackend) -> None:
    arena = Arena(backend, 64 << 30, 32 * MIB)
    before = backend.memory().free_bytes
    for _ in range(3):
        arena.map([range(1000, 1064)])
        assert before - backend.memory().free_bytes == pytest.approx(2048 * MIB, abs=64 * MIB)
        arena.unmap([range(1000, 1064)])
        assert backend.memory().free_bytes == pytest.approx(before, abs=64 * MIB)
    arena.close()


def test_the_management_library_sees_the_same_memory_under_the_same_name(backend: CudaBackend) -> None:
    device = inventory().find(backend.device_id)
    assert device is not None
    assert device.free_bytes == pytest.approx(backend.memory().free_bytes, abs=1024 * MIB)
    arena = Arena(backend, 4096 * MIB, 32 * MIB)
    arena.map([range(128)])
    with_arena = inventory().find(backend.device_id)
    assert with_arena is not None
    assert device.free_bytes - with_arena.free_bytes == pytest.approx(4096 * MIB, abs=64 * MIB)
    arena.close()


def test_a_device_that_runs_out_at_page_k_keeps_what_it_had(backend: CudaBackend) -> None:
    total_bytes = backend.memory().total_bytes
    arena = Arena(backend, 2 * total_bytes, 256 * MIB)
    before = backend.memory().free_bytes
    with pytest.raises(DeviceMemoryError, match=r"CUDA_ERROR_OUT_OF_MEMORY.*free.*none was kept"):
        arena.map([range(arena.num_pages)])
    assert arena.num_resident_pages == 0
    assert backend.memory().free_bytes == pytest.approx(before, abs=256 * MIB)
    assert arena.map([range(4)]) == 4
    arena.close()


def test_a_tensor_covers_a_whole_reserved_range(backend: CudaBackend) -> None:
    arena = Arena(backend, 256 << 30, 32 * MIB)
    arena.map([range(5, 6)])
    whole = arena.tensor()
    whole[5 * 32 * MIB : 6 * 32 * MIB].fill_(3)
    assert (whole.numel(), whole.data_ptr(), whole.device) == (256 << 30, arena.address, backend.device)
    assert int(arena.tensor(6 * 32 * MIB - 1, 1)) == 3
    arena.close()
