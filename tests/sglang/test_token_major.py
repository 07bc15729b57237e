"""Which servers can have a token-major KV cache, and what becomes of those that cannot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcached_core.config import Settings
from kvcached_sglang import handlers, token_major
from kvcached_sglang.handlers import Plugin
from kvcached_sglang.placement import LAYER_MAJOR, TOKEN_MAJOR
from kvcached_sglang.releases import TESTED_RELEASES
from kvcached_sglang.token_major import choose_layout
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_context

RELEASE = "0.5.23"
ODD_WINDOWS = {"is_hybrid_swa": True, "swa_v_head_dim": 12}
ODD_LATENTS = {"use_mla_backend": True, "qk_rope_head_dim": 60}


def configurator(**changed: Any) -> SimpleNamespace:
    """Of an 8B model on FlashAttention 3, unless something is changed, of it or of its model."""
    model = {
        "hf_config": SimpleNamespace(architectures=["LlamaForCausalLM"]),
        "has_asymmetric_kv": False,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    } | dict.fromkeys(["head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim"], 128)
    whole = {
        "use_mla_backend": False,
        "is_hybrid_swa": False,
        "kv_cache_dtype": torch.bfloat16,
        "model_config": SimpleNamespace(**(model | {name: changed[name] for name in changed if name in model})),
    }
    return SimpleNamespace(**(whole | {name: changed[name] for name in changed if name in whole}))


@contextmanager
def served(prefill: str = "fa3", decode: str = "fa3", algorithm: str | None = None) -> Iterator[None]:
    """SGLang's configuration, as its scheduler process has it."""
    with get_context().override_server_args(
        attention_backend="triton",
        prefill_attention_backend=prefill,
        decode_attention_backend=decode,
        speculative_algorithm=algorithm,
    ):
        yield


def chosen(asked: str, version: str = RELEASE, *, backend: str = "fa3", **changed: Any) -> tuple[str, list[str]]:
    with served(backend, backend):
        return choose_layout(asked, configurator(**changed), version)


def test_layer_major_needs_nothing_of_sglang():
    assert choose_layout(LAYER_MAJOR, None, "0") == (LAYER_MAJOR, [])


def test_auto_is_layer_major():
    assert chosen("auto") == (LAYER_MAJOR, [])


@pytest.mark.parametrize("version", TESTED_RELEASES)
def test_releases_whose_kernels_read_by_the_stride_have_it(version: str):
    layout, reasons = chosen(TOKEN_MAJOR, version)
    assert layout == TOKEN_MAJOR
    if version in ("0.5.22", "0.5.23"):
        assert reasons == []
    else:
        expected = f"the kernels of SGLang {version} are not known to read one; those of 0.5.22, 0.5.23 are"
        assert reasons == [f"KVCACHED_LAYOUT=token-major: {expected}"]


@pytest.mark.parametrize("version", ["0.5.22.post1", "0.5.23+cu130"])
def test_post_releases_and_local_builds_count_as_their_release(version: str):
    assert chosen(TOKEN_MAJOR, version) == (TOKEN_MAJOR, [])


@pytest.mark.parametrize(
    ("version", "backend", "changed"),
    [
        pytest.param("0.5.23", "flashmla", {"use_mla_backend": True}, id="MLA"),
        pytest.param("0.5.22", "tokenspeed_mla", {"use_mla_backend": True}, id="MLA, 0.5.22"),
        pytest.param("0.5.23", "flashinfer", {}, id="MHA"),
        pytest.param("0.5.23", "fa4", {"has_asymmetric_kv": True}, id="unequal rows"),
        pytest.param("0.5.23", "torch_native", {}, id="indexing"),
        pytest.param("0.5.23", "triton", {"is_hybrid_swa": True}, id="windows"),
        pytest.param("0.5.23", "fa3", {"kv_cache_dtype": torch.float8_e4m3fn}, id="fp8"),
    ],
)
def test_backends_that_read_by_the_stride_are_allowed(version: str, backend: str, changed: dict[str, Any]):
    assert chosen(TOKEN_MAJOR, version, backend=backend, **changed) == (TOKEN_MAJOR, [])


@pytest.mark.parametrize(
    ("version", "backend", "changed", "words"),
    [
        pytest.param("0.5.23", "flex_attention", {}, "flex_attention is not known", id="another backend"),
        pytest.param("0.5.23", "fa4", {"use_mla_backend": True}, "fa4 is not known", id="MHA's backend for MLA"),
        pytest.param("0.5.23", "flashmla", {}, "flashmla is not known", id="MLA's backend for MHA"),
        pytest.param("0.5.23", "tokenspeed_mla", {"use_mla_backend": True}, "tokenspeed_mla is not", id="0.5.22's"),
        pytest.param("0.5.23", "flashinfer", {"has_asymmetric_kv": True}, "flashinfer is not", id="unequal rows"),
        pytest.param("0.5.22", "fa3", {"has_asymmetric_kv": True}, "fa3 is not", id="unequal rows, 0.5.22"),
        pytest.param("0.5.23", "fa3", {"head_dim": 100}, "head's row of 200 bytes", id="heads of odd width"),
        pytest.param("0.5.23", "fa3", ODD_WINDOWS, "head's row of 24 bytes", id="the windows' heads of odd width"),
        pytest.param("0.5.23", "fa3", ODD_LATENTS, "latent row of 1144 bytes", id="latents of odd width"),
        pytest.param(
            "0.5.23",
            "trtllm_mha",
            {"hf_config": SimpleNamespace(architectures=["MuseSparkForConditionalGeneration"])},
            "MuseSpark",
            id="a model that writes KV itself",
        ),
    ],
)
def test_what_might_write_into_other_layers_is_refused(version: str, backend: str, changed: dict[str, Any], words: str):
    layout, [reason] = chosen(TOKEN_MAJOR, version, backend=backend, **changed)
    assert layout == TOKEN_MAJOR
    assert words in reason


def test_the_backend_of_decoding_counts_too():
    with served("fa3", "flex_attention"):
        _, [reason] = choose_layout(TOKEN_MAJOR, configurator(), RELEASE)
    assert "flex_attention" in reason


def test_speculative_decoding_is_refused():
    with served(algorithm="EAGLE"):
        _, [reason] = choose_layout(TOKEN_MAJOR, configurator(), RELEASE)
    assert "speculative decoding" in reason


def test_pages_of_heads_are_refused():
    with envs.SGLANG_USE_HND_KVCACHE.override(True):
        _, [reason] = chosen(TOKEN_MAJOR)
    assert "SGLANG_USE_HND_KVCACHE" in reason


def test_sglangs_own_cpu_kernels_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sglang.srt.utils.is_cpu", lambda: True)
    _, [reason] = chosen(TOKEN_MAJOR, backend="torch_native")
    assert "SGLANG_USE_CPU_ENGINE" in reason


@pytest.fixture
def auto_is_token_major(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_major, "AUTO_LAYOUT", TOKEN_MAJOR)


@pytest.mark.usefixtures("auto_is_token_major")
def test_auto_takes_what_can_be_had(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    assert chosen("auto") == (TOKEN_MAJOR, [])
    assert caplog.text == ""
    assert chosen("auto", backend="flex_attention") == (LAYER_MAJOR, [])
    assert "the KV cache is layer-major, not token-major: attention backend flex_attention" in caplog.text
    assert chosen("auto", "0.5.20") == (LAYER_MAJOR, [])
    assert chosen(LAYER_MAJOR) == (LAYER_MAJOR, [])


# What the plugin makes of it


class Started:
    """A plugin whose model is loaded, about to size its KV cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run_natively: Callable[..., None], **settings: str) -> None:
        self.closed = 0
        self.plugin = Plugin(Settings.load(settings), RELEASE, run_natively)
        backend = SimpleNamespace(device_id="host")
        limits = SimpleNamespace(total_bytes=1 << 30, ceiling_bytes=1 << 30)
        self.plugin._member = SimpleNamespace(backend=backend, limits=limits, close=self.close)
        self.plugin._static = SimpleNamespace(take=lambda *_: None)
        monkeypatch.setattr(handlers, "refused_pools", lambda _: [])

    def close(self) -> None:
        self.closed += 1

    def size(self, backend: str) -> float:
        """What SGLang has before it sizes, as far as the plugin changes it."""
        what = configurator()
        what.gpu_id, what.mambaish_config = 0, None
        with served(backend, backend):
            return self.plugin.profile_available_bytes(lambda _, before: before, what, 0.5)

    @property
    def layout(self) -> str | None:
        return self.plugin._engine and self.plugin._engine._layout


def test_token_major_that_cannot_be_had_runs_natively_and_says_why(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    scene = Started(monkeypatch, lambda _, reason: said.append(reason), KVCACHED_LAYOUT=TOKEN_MAJOR)
    assert scene.size("flex_attention") == 0.5  # as it would be without kvcached
    [reason] = said
    assert reason.startswith("KVCACHED_LAYOUT=token-major: attention backend flex_attention is not known to read one")
    assert (scene.layout, scene.closed) == (None, 1)


def test_token_major_that_can_be_had_is_had(monkeypatch: pytest.MonkeyPatch):
    scene = Started(monkeypatch, lambda *_: None, KVCACHED_LAYOUT=TOKEN_MAJOR)
    assert scene.size("fa3") == 1.0
    assert (scene.layout, scene.closed) == (TOKEN_MAJOR, 0)


@pytest.mark.usefixtures("auto_is_token_major")
def test_a_server_that_was_not_asked_to_goes_on_layer_major(monkeypatch: pytest.MonkeyPatch):
    scene = Started(monkeypatch, lambda *_: None)
    assert scene.size("flex_attention") == 1.0
    assert (scene.layout, scene.closed) == (LAYER_MAJOR, 0)
