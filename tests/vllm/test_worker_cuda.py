"""Claims of worker_cuda.py, static.py and member.py about memory beside the KV cache.

The ledger, the worker and vLLM's allocator for sleep mode are real. Stood in for are the card, torch's counters and
what vLLM's own worker does between our lines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcached_core.account import Account
from kvcached_core.backends.base import DeviceMemory
from kvcached_core.errors import LedgerError
from kvcached_core.ledger_statistics import MemberStatistics
from kvcached_vllm import static, worker_cuda
from kvcached_vllm.worker_cuda import ElasticCudaWorker
from vllm.device_allocator import AllocationData, cumem
from vllm.v1.worker.gpu_worker import Worker

GIB = 1 << 30
CARD = "GPU-1"


class Card:
    """One GPU of 24 GiB, and what this process has of it: half a GiB of context, and what torch reserved."""

    device_id = CARD
    device = torch.device("cuda", 0)
    total_bytes = 24 * GIB

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self.peak_bytes = 0
        self.others_bytes = 0
        self.allocator = cumem.CuMemAllocator()

    @property
    def free_bytes(self) -> int:
        asleep = sum(data.handle[1] for data in self.allocator.pointer_to_data.values() if data.is_asleep)
        return self.total_bytes - GIB // 2 - self.others_bytes - self.reserved_bytes + asleep

    def memory(self) -> DeviceMemory:
        return DeviceMemory(free_bytes=self.free_bytes, total_bytes=self.total_bytes)

    def close(self) -> None:
        """As a backend's."""

    def reserve(self, num_gib: int, tag: str) -> None:
        """What torch does for a tensor while vLLM's pool of this tag is entered."""
        for _ in range(num_gib):
            address = len(self.allocator.pointer_to_data)
            self.allocator.pointer_to_data[address] = AllocationData((0, GIB, address, 0), tag)
        self.reserved_bytes += num_gib * GIB
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)

    def map_again(self, handle: Any) -> None:
        if self.free_bytes < handle[1]:
            raise RuntimeError("CUDA Error: out of memory")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> Card:
    card = Card()
    monkeypatch.setenv("KVCACHED_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setattr(worker_cuda, "load_backend", lambda *_, **__: card)
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", card.allocator)
    monkeypatch.setattr(cumem, "unmap_and_release", lambda handle: None)
    monkeypatch.setattr(cumem, "create_and_map", card.map_again)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: card.reserved_bytes)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: card.peak_bytes)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    return card


def stock(monkeypatch: pytest.MonkeyPatch, card: Card, weights_gib: int) -> None:
    """What vLLM's worker does, as the card sees it."""

    def init_device(worker: Any) -> None:
        worker.device = card.device
        worker.init_snapshot = SimpleNamespace(total_memory=card.total_bytes)

    def profile(worker: Any) -> int:
        card.peak_bytes = card.reserved_bytes + 2 * GIB  # activations, come and gone
        return worker.cache_config.kv_cache_memory_bytes

    monkeypatch.setattr(Worker, "init_device", init_device)
    monkeypatch.setattr(Worker, "load_model", lambda worker: card.reserve(weights_gib, "weights"))
    monkeypatch.setattr(Worker, "determine_available_memory", profile)
    monkeypatch.setattr(Worker, "compile_or_warm_up_model", lambda worker: None)
    monkeypatch.setattr(Worker, "get_kv_cache_spec", lambda worker: {})
    monkeypatch.setattr(Worker, "sleep", lambda worker, level: card.allocator.sleep(()))
    monkeypatch.setattr(Worker, "wake_up", lambda worker, tags: card.allocator.wake_up(tags))


def started(model: Path, card: Card) -> Any:
    """A worker as it is before its first request."""
    worker: Any = object.__new__(ElasticCudaWorker)
    worker.rank = 0
    worker.cache_config = SimpleNamespace(gpu_memory_utilization=0.9, kv_cache_memory_bytes=None)
    worker.model_runner = SimpleNamespace(model_memory_usage=0)
    worker.vllm_config = SimpleNamespace(
        instance_id="i",
        model_config=SimpleNamespace(model=str(model), served_model_name=None, revision=None, is_moe=False),
        load_config=SimpleNamespace(download_dir=None),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_index=0),
    )
    worker.init_device()
    worker.load_model()
    worker.determine_available_memory()
    worker.compile_or_warm_up_model()
    return worker


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch, card: Card, tmp_path: Path) -> Iterator[Any]:
    """A worker that sleeps, with 14 GiB of weights and 2 GiB of other things that sleep too."""
    stock(monkeypatch, card, 14)
    worker = started(tmp_path, card)
    card.reserve(2, "kv_cache")
    worker.compile_or_warm_up_model()
    worker.sleep(2)
    yield worker
    worker.member.account.leave()
    worker.member._ledger.close()


def ours(worker: Any) -> MemberStatistics:
    return worker.member._ledger.snapshot().members[0]


@pytest.mark.parametrize("on_this_machine", [True, False])
def test_an_engine_alone_on_its_card_loads_more_than_half_of_it(
    monkeypatch: pytest.MonkeyPatch, card: Card, tmp_path: Path, on_this_machine: bool
) -> None:
    if on_this_machine:
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.truncate(17 * GIB - (100 << 20))  # torch reserves a little more than the files hold
    stock(monkeypatch, card, 17)
    worker = started(tmp_path, card)
    assert ours(worker).static_used_bytes == 17 * GIB
    assert ours(worker).static_lease_bytes == 19 * GIB
    assert worker.member._ledger.snapshot().unleased_bytes == card.free_bytes - GIB - 2 * GIB
    worker.member.close()


def test_what_sleeps_is_neighbours_to_lease(card: Card, asleep: Any) -> None:
    assert static.asleep_bytes() == 16 * GIB
    assert static.used_bytes(card.device) == 0
    assert (ours(asleep).static_used_bytes, ours(asleep).static_lease_bytes) == (0, 0)
    assert neighbour(card, asleep, 22 * GIB).lease_bytes == 22 * GIB


def neighbour(card: Card, worker: Any, num_bytes: int) -> Account:
    """A member with so much of the card, all of it cached."""
    account = worker.member._ledger.join("neighbour", engine="test")
    account.created(account.lease(num_bytes))
    card.others_bytes += account.created_bytes
    account.report(demand_bytes=0, unmet_bytes=0, free_bytes=0, cached_bytes=account.created_bytes, busy=False)
    return account


def give_back(card: Card, account: Account, num_bytes: int) -> None:
    account.destroyed(num_bytes)
    card.others_bytes -= num_bytes
    account.give_back(num_bytes)


def test_an_engine_wakes_once_a_neighbour_has_made_room(card: Card, asleep: Any) -> None:
    other = neighbour(card, asleep, 12 * GIB)
    waking = threading.Thread(target=asleep.wake_up)
    waking.start()
    deadline = time.monotonic() + 10
    while other.allowance().target_bytes > 7 * GIB and time.monotonic() < deadline:
        time.sleep(0.01)
    give_back(card, other, other.lease_bytes - other.allowance().target_bytes)
    waking.join(10)
    assert static.asleep_bytes() == 0
    assert ours(asleep).static_lease_bytes == ours(asleep).static_used_bytes == 16 * GIB
    give_back(card, other, other.lease_bytes)
    other.leave()


def test_a_card_taken_by_another_process_fails_a_wake_in_words_and_a_second_try_works(
    monkeypatch: pytest.MonkeyPatch, card: Card, asleep: Any
) -> None:
    monkeypatch.setattr(worker_cuda, "WAKE_DEADLINE_SECONDS", 0.05)
    card.others_bytes = 12 * GIB  # of a process that no ledger knows
    for _ in range(2):
        with pytest.raises(LedgerError, match=r"needs 16\.00 GiB .* 10\.50 GiB could be granted"):
            asleep.wake_up()
        assert static.asleep_bytes() == 16 * GIB
        assert (ours(asleep).static_lease_bytes, ours(asleep).static_unmet_bytes) == (0, 0)
    card.others_bytes = 0
    asleep.wake_up()
    assert static.asleep_bytes() == 0
    assert ours(asleep).static_lease_bytes == 16 * GIB


def test_a_part_that_wakes_needs_room_for_that_part(monkeypatch: pytest.MonkeyPatch, card: Card, asleep: Any) -> None:
    monkeypatch.setattr(worker_cuda, "WAKE_DEADLINE_SECONDS", 0.05)
    card.others_bytes = 8 * GIB
    card.reserve(1, "runtime")  # from 0.33 on, such things wake with any part
    asleep.compile_or_warm_up_model()
    asleep.sleep(2)
    with pytest.raises(LedgerError):
        asleep.wake_up(["weights"])
    asleep.wake_up(["kv_cache"])
    assert ours(asleep).static_lease_bytes == card.reserved_bytes - static.asleep_bytes()
    card.others_bytes = 0
    asleep.wake_up(["weights"])
    asleep.wake_up()
    assert static.asleep_bytes() == 0
    assert ours(asleep).static_lease_bytes == 17 * GIB


def test_a_driver_that_refuses_all_the_same_leaves_a_wake_that_can_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, card: Card, asleep: Any
) -> None:
    asked = []

    def refuses_once(handle: Any) -> None:
        asked.append(handle)
        if len(asked) == 5:
            raise RuntimeError("CUDA Error: out of memory")

    monkeypatch.setattr(cumem, "create_and_map", refuses_once)
    with pytest.raises(RuntimeError, match="out of memory"):
        asleep.wake_up()
    assert static.used_bytes(card.device) == 4 * GIB
    assert ours(asleep).static_lease_bytes == 16 * GIB  # nobody else's until it is tried again
    asleep.wake_up()
    assert len(asked) == 17
    assert static.asleep_bytes() == 0


def test_without_sleep_mode_nothing_sleeps(monkeypatch: pytest.MonkeyPatch, card: Card) -> None:
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", None)
    card.reserved_bytes = 3 * GIB
    assert static.asleep_bytes() == 0
    assert static.used_bytes(card.device) == 3 * GIB
