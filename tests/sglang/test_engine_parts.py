"""The parts of engine.py, without an engine: a real ledger, SGLang's own pools, host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kvcached_core.account import Account
from kvcached_core.config import Settings
from kvcached_core.ledger import Ledger
from kvcached_sglang.engine import Engine
from kvcached_sglang.member import Member
from kvcached_sglang.placement import LAYER_MAJOR
from kvcached_sglang.refusals import refused_pools
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from tests.sglang.test_mapper import BUDGET, join
from tests.sglang.test_pools import MHA, make_mha

Make = Callable[..., tuple[Engine, Member]]


@pytest.fixture
def make(runtime_dir: Path) -> Iterator[Make]:
    """Makes a member and its engine."""
    members: list[Member] = []

    def build(**more: str) -> tuple[Engine, Member]:
        settings = Settings.load({"KVCACHED_PAGE_SIZE": "4096", **more})
        members.append(join(runtime_dir, **more))
        return Engine(settings, members[-1], "0", LAYER_MAJOR), members[-1]

    yield build
    for member in members:
        member.close()


@pytest.fixture
def neighbour(runtime_dir: Path) -> Iterator[Account]:
    """Holds the whole device, all of it cached content."""
    ledger = Ledger.open("host", BUDGET, runtime_dir=runtime_dir)
    account = ledger.join("neighbour", engine="vllm")
    account.lease(BUDGET)
    account.created(BUDGET)
    account.report(demand_bytes=0, unmet_bytes=0, free_bytes=0, cached_bytes=BUDGET, busy=False)
    yield account
    ledger.close()


def create(engine: Engine) -> MHATokenToKVPool:
    pool = make_mha()
    engine.create_buffers(MHATokenToKVPool._create_buffers_normal, pool, MHA)
    return pool


def test_the_first_extent_waits_for_a_neighbour_that_holds_the_device(make: Make, neighbour: Account):
    engine, member = make()

    def trim() -> None:
        neighbour.destroyed(BUDGET // 2)
        neighbour.give_back(BUDGET // 2)

    trimming = threading.Timer(0.1, trim)
    trimming.start()
    create(engine)
    trimming.join()
    assert member.arenas.resident_bytes == member.extent_bytes


def unfit() -> object:
    """An allocator of no kind that there is an elastic one of."""
    return SimpleNamespace()


def test_pools_that_do_not_fit_together_end_a_strict_process(make: Make):
    engine, _ = make(KVCACHED_STRICT="1")
    pool = create(engine)
    with pytest.raises(SystemExit, match="MHATokenToKVPool and SimpleNamespace are not elastic together"):
        engine.build(unfit(), pool, None)


def test_pools_that_do_not_fit_together_are_mapped_for_good(make: Make):
    engine, member = make(KVCACHED_HOST_BUDGET=str(4 * BUDGET))
    pool = create(engine)
    native = unfit()
    assert engine.build(native, pool, None) is native
    assert member.arenas.resident_bytes >= member.layout.pools[0].geometry.size_bytes


def configurator(full_attention_layers: list[int] | None) -> SimpleNamespace:
    return SimpleNamespace(
        device="cuda",
        post_capture_kv_active=False,
        kv_cache_dtype=torch.float16,
        kv_cache_dtype_str="auto",
        use_mla_backend=False,
        is_hybrid_swa=True,
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["Gemma3ForCausalLM"]),
            full_attention_layer_ids=full_attention_layers,
        ),
    )


def test_a_model_of_windows_alone_stays_native():
    assert refused_pools(configurator([0, 6])) == []
    [reason] = refused_pools(configurator([]))
    assert "without full attention" in reason
