"""What the hooks call, with stand-ins of SGLang's objects. Sizing is on a device that is 80 GiB large."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcached_core.config import Settings
from kvcached_core.errors import LedgerError
from kvcached_sglang import handlers
from kvcached_sglang.engine import Engine
from kvcached_sglang.handlers import Plugin
from kvcached_sglang.placement import LAYER_MAJOR
from kvcached_sglang.sizing import GIB
from sglang.srt.runtime_context import get_context

TOTAL = 80 * GIB
USED = 10 * GIB
FRACTION = 0.9
SLACK = int(TOTAL * (1 - FRACTION))


class Scene:
    """A plugin that has joined a ledger, and what happened to it in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ceiling_bytes: int = TOTAL - GIB) -> None:
        self.log: list[Any] = []
        backend = SimpleNamespace(device_id="GPU-1", memory=lambda: SimpleNamespace(total_bytes=TOTAL))
        limits = SimpleNamespace(total_bytes=TOTAL, ceiling_bytes=ceiling_bytes)
        plugin = Plugin(Settings.load({}), "0", lambda *_: None)
        plugin._member = SimpleNamespace(backend=backend, limits=limits)
        plugin._static = SimpleNamespace(take=self.take)
        self.plugin = plugin
        self.refuse = False
        monkeypatch.setattr(handlers, "refused_pools", lambda _: [])
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: USED)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.log.append("emptied"))
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(gc, "collect", lambda: self.log.append("collected"))

    def take(self, coming_bytes: int = 0) -> None:
        if self.refuse and coming_bytes:
            raise LedgerError("none")
        self.log.append(coming_bytes)

    def device(self, ordinal: int) -> Any:
        self.log.append(f"on {ordinal}")
        return torch.no_grad()  # any context manager

    def profile(self, state_share: float | None = None, state_slots: int | None = None) -> int:
        """What SGLang does of the memory that it is told of: it takes a share for states, if it has any."""

        def original(_: Any, pre_model_load_gib: float) -> int:
            free = self.plugin.get_available_memory(self.never, "cuda", 3, distributed=False)
            rest = free - pre_model_load_gib * (1 - FRACTION)
            return int(rest * (1 - (state_share or 0)) * GIB)

        configurator = SimpleNamespace(
            gpu_id=3,
            mambaish_config=None if state_share is None else object(),
        )
        with get_context().override_server_args(mem_fraction_static=FRACTION, max_mamba_cache_size=state_slots):
            return self.plugin.profile_available_bytes(original, configurator, 0.0)

    @staticmethod
    def never(*_: Any, **__: Any) -> float:
        raise AssertionError("while it is sized, SGLang's own answer does not count")


def test_what_loading_left_is_dropped_before_it_is_taken_for_weights(monkeypatch):
    scene = Scene(monkeypatch)
    assert scene.profile() == pytest.approx(TOTAL - USED - SLACK, abs=1024)
    assert scene.log == ["collected", "on 3", "emptied", 0]


def test_states_of_linear_attention_are_leased_before_they_are_allocated(monkeypatch):
    scene = Scene(monkeypatch)
    kv_bytes = scene.profile(state_share=0.5)
    assert scene.log[-1] == pytest.approx(kv_bytes, abs=1024)
    assert kv_bytes + scene.log[-1] == pytest.approx(TOTAL - USED - SLACK, abs=1024)


def test_states_of_linear_attention_are_sized_within_the_ceiling(monkeypatch):
    scene = Scene(monkeypatch, ceiling_bytes=20 * GIB)
    assert scene.profile(state_share=0.5) == pytest.approx(10 * GIB, abs=1024)
    assert scene.log[-1] == pytest.approx(10 * GIB, abs=1024)


def test_states_whose_size_was_asked_for_take_nothing_from_what_the_cache_may_grow_to(monkeypatch):
    scene = Scene(monkeypatch, ceiling_bytes=20 * GIB)
    assert scene.profile(state_share=0.25, state_slots=400) == pytest.approx(0.75 * (TOTAL - USED - SLACK), abs=1024)
    assert scene.log[-1] == pytest.approx(0.25 * (TOTAL - USED - SLACK), abs=1024)


def test_without_states_a_ceiling_does_not_bound_the_capacity(monkeypatch):
    """An operator may raise it while the engine runs."""
    assert Scene(monkeypatch, ceiling_bytes=20 * GIB).profile() > 50 * GIB


def test_states_that_find_no_room_are_refused_in_words(monkeypatch, caplog):
    caplog.set_level("INFO")
    scene = Scene(monkeypatch)
    scene.refuse = True
    with pytest.raises(LedgerError):
        scene.profile(state_share=0.5)
    assert "--max-mamba-cache-size" in caplog.text


# Before a batch


class Scheduling:
    """A plugin whose engine has one request waiting, for which a ceiling leaves room or not."""

    def __init__(self, *, starves: bool, ceiling_tokens: int, output: int = 0) -> None:
        self.ended: list[Any] = []
        self.batch = SimpleNamespace(reqs=[], batch_is_full=True)
        first = SimpleNamespace(rid="first", origin_input_ids=[7] * 98, output_ids=[7] * output)
        self.scheduler = SimpleNamespace(waiting_queue=[first], abort_request=self.ended.append)
        self.plugin = Plugin(Settings.load({}), "0", lambda *_: None)
        engine = Engine(self.plugin._settings, None, "0", LAYER_MAJOR)
        engine.spaces["full"] = None
        engine.ticker = SimpleNamespace(starves=starves, ceiling_tokens=ceiling_tokens)
        engine._demand = SimpleNamespace(margin_tokens=2)
        engine.tick = lambda *_: None
        self.plugin._engine = engine

    def before_batch(self) -> None:
        self.plugin.before_batch(self.scheduler, self.batch, None)


def test_a_prompt_may_begin_where_nothing_runs_though_one_had_to_wait():
    """0.5.20 and 0.5.21 would remember that the batch was full."""
    scene = Scheduling(starves=False, ceiling_tokens=100)
    scene.before_batch()
    assert scene.batch.batch_is_full is False
    scene.batch.reqs, scene.batch.batch_is_full = ["running"], True
    scene.before_batch()
    assert scene.batch.batch_is_full is True


def test_a_first_request_that_the_ceiling_leaves_no_room_for_is_refused_once_nothing_has_run_for_long():
    scene = Scheduling(starves=True, ceiling_tokens=99)
    scene.before_batch()
    [ended] = scene.ended
    assert ended.rid == "first"
    assert "takes 100 tokens of KV cache, and this engine's ceiling leaves 99" in ended.finished_reason["message"]
    assert not ended.abort_all


@pytest.mark.parametrize(
    ("starves", "ceiling_tokens", "output"),
    [
        pytest.param(False, 99, 0, id="it has only come"),
        pytest.param(True, 100, 0, id="the ceiling leaves room"),
        pytest.param(True, 99, 1, id="it has begun"),
    ],
)
def test_a_first_request_that_may_go_on_waits(starves: bool, ceiling_tokens: int, output: int):
    scene = Scheduling(starves=starves, ceiling_tokens=ceiling_tokens, output=output)
    scene.before_batch()
    assert scene.ended == []
