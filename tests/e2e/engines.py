"""The two engines as the suite starts and asks them: their normal entry points, their own endpoints."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.client import MODEL, Client

CONTEXT_TOKENS = 8192


@dataclass(frozen=True)
class Engine:
    """What differs between the engines, as data.

    Attributes:
        module: Run with ``-m``: the program behind the engine's command.
        flags: Every server of the suite gets these.
        variables: The same, in the environment.
        health_path: Answers 200 once the server serves.
        reset: Drops the prefix cache; false when the server refused.
    """

    name: str
    distribution: str
    module: tuple[str, ...]
    flags: tuple[str, ...]
    variables: Mapping[str, str]
    health_path: str
    reset: Callable[[Client], bool]

    def command(self, python: str, model: Path, port: int, flags: Sequence[str]) -> list[str]:
        model_flag = [str(model)] if self.name == "vllm" else ["--model-path", str(model)]
        own = ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
        return [python, "-m", *self.module, *model_flag, *own, *self.flags, *flags]


@dataclass(frozen=True)
class Installed:
    """An engine in one Python environment."""

    engine: Engine
    python: str
    release: str = field(default="")

    @classmethod
    def find(cls, engine: Engine, python: str) -> Installed:
        """Ask the environment for the engine's release; raises CalledProcessError where it has none."""
        query = f"from importlib.metadata import version; print(version({engine.distribution!r}))"
        release = subprocess.run([python, "-c", query], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        return cls(engine, python, release.partition("+")[0])


def _reset_vllm(client: Client) -> bool:
    status, answer = client.post("/reset_prefix_cache")
    return status == 200 and (not isinstance(answer, dict) or bool(answer.get("success", True)))


def _reset_sglang(client: Client) -> bool:
    # A request that has just been answered may still hold its slots: the engine waits for it.
    status, _ = client.post("/flush_cache?timeout=5")
    return status == 200


_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
# Triton times candidate kernels at start and keeps the fastest: without a stored choice two servers may run different
# kernels, and differ in the last bit for reasons that are not ours.
_REPEATABLE = {"TRITON_CACHE_AUTOTUNING": "1"}

VLLM = Engine(
    name="vllm",
    distribution="vllm",
    module=("vllm.entrypoints.cli.main", "serve"),
    flags=(
        *("--dtype", "bfloat16", "--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "32"),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
    ),
    # The sampler of FlashInfer compiles for a minute at the first start; the dev mode has /reset_prefix_cache.
    variables={
        **_QUIET,
        **_REPEATABLE,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    },
    health_path="/health",
    reset=_reset_vllm,
)

SGLANG = Engine(
    name="sglang",
    distribution="sglang",
    module=("sglang.launch_server",),
    flags=(
        *("--dtype", "bfloat16", "--context-length", str(CONTEXT_TOKENS), "--max-running-requests", "32"),
        *("--enable-cache-report", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    ),
    variables={**_QUIET, **_REPEATABLE},
    health_path="/health",
    reset=_reset_sglang,
)

ENGINES = {engine.name: engine for engine in (VLLM, SGLANG)}
