"""Claims of member.py about who is who, with vLLM's own parallel configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvcached_vllm.member import Member, host_backend, order_address
from vllm.config import ParallelConfig


def replica(index: int) -> Any:
    """What a process of a dense model's replica has, once vLLM's engine core has made it independent."""
    parallel = ParallelConfig(tensor_parallel_size=2, data_parallel_size=2, distributed_executor_backend="mp")
    parallel.data_parallel_index = index
    parallel.reconfigure_for_independent_dp_rank()
    model_config = SimpleNamespace(model="org/name", served_model_name=None)
    return SimpleNamespace(instance_id="one-server", parallel_config=parallel, model_config=model_config)


def test_replicas_and_their_ranks_take_orders_each_at_its_own_address(
    monkeypatch: pytest.MonkeyPatch, runtime_dir: Path
) -> None:
    monkeypatch.setenv("KVCACHED_RUNTIME_DIR", str(runtime_dir))
    places = [order_address(replica(index), rank) for index in range(2) for rank in range(2)]
    assert len(set(places)) == 4
    assert places[0] == order_address(replica(0), 0)  # the scheduler's process and the worker's agree


def test_replicas_are_members_of_their_own_and_processes_of_one_server(
    monkeypatch: pytest.MonkeyPatch, runtime_dir: Path
) -> None:
    monkeypatch.setenv("KVCACHED_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setenv("KVCACHED_ENGINE_ID", "server")
    monkeypatch.setenv("KVCACHED_HOST_BUDGET", "1GiB")
    first, second = (Member(replica(index), 0, host_backend()) for index in range(2))
    assert [member.account.member_id for member in (first, second)] == ["server/one-server-0", "server/one-server-1"]
    assert [member.account.name for member in (first, second)] == ["name", "name-2"]
    first.close()
    second.close()
