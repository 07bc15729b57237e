"""The matrix: which server each case starts, and why a case is not run where it cannot be."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from tests.e2e.engines import SGLANG, VLLM, Engine
from tests.models.families import MATRIX_FAMILIES

# A case's KV cache has the same size whoever else is on the device, so that natives can run side by side: an engine
# that sizes it from the memory free at its start would fail, or differ, when a neighbour starts in the same seconds.
VLLM_SIZE = ("--gpu-memory-utilization", "0.08", "--kv-cache-memory-bytes", str(4 << 30))
SGLANG_SIZE = ("--mem-fraction-static", "0.5", "--max-total-tokens", "131072")
VLLM_CPU_SIZE = ("--kv-cache-memory-bytes", str(1 << 30))
SGLANG_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"),
    *("--disable-custom-all-reduce", "--max-total-tokens", "65536"),
)

VLLM_LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "block": {"VLLM_KV_CACHE_LAYOUT": "BLNHC"},
    "layer": {"VLLM_KV_CACHE_LAYOUT": "LBNHC"},
}
# The default prefill kernel on Hopper, FlashInfer's, compiles for minutes at the first start.
VLLM_FAMILY_FLAGS = {"linear": ("--gdn-prefill-backend", "triton")}
SGLANG_FAMILY_FLAGS = {"linear": ("--max-mamba-cache-size", "128")}


@dataclass(frozen=True)
class Case:
    """One native server and one elastic server with the same model, flags and variables.

    Attributes:
        settings: ``KVCACHED_*`` of the elastic server alone.
    """

    name: str
    engine: Engine = field(hash=False)
    family: str
    flags: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)
    tensor_parallel: int = 1
    settings: Mapping[str, str] = field(default_factory=dict, hash=False)

    def why_not(self, num_gpus: int) -> str:
        """Why this case cannot run on a machine with that many GPUs; empty when it can. A CPU counts as one."""
        if self.tensor_parallel > max(num_gpus, 1):
            return f"needs {self.tensor_parallel} GPUs, {num_gpus} here"
        return ""


def gpu_cases() -> list[Case]:
    """The whole matrix."""
    return [*_vllm_cases(), *_sglang_cases()]


def cpu_cases() -> list[Case]:
    """What a CPU can show: vLLM's CPU build, which has layer-major layouts only, and SGLang without its kernels."""
    vllm = [
        Case(f"vllm-{family}-cpu", VLLM, family, (*VLLM_CPU_SIZE, "--enforce-eager"), _CPU_THREADS)
        for family in ("gqa", "mla", "swa")
    ]
    return [*vllm, Case("sglang-gqa-cpu", SGLANG, "gqa", SGLANG_CPU, _CPU_THREADS)]


_CPU_THREADS = {"VLLM_CPU_OMP_THREADS_BIND": "0", "OMP_NUM_THREADS": "1"}


def select(cases: Sequence[Case], patterns: Iterable[str]) -> list[Case]:
    """The cases whose name matches a shell pattern, in the order of the patterns: what matters most goes first."""
    matching = (case for pattern in patterns for case in cases if fnmatchcase(case.name, pattern))
    return list(dict.fromkeys(matching))


def _vllm_cases() -> Iterator[Case]:
    for family, layout, parallel in itertools.product(MATRIX_FAMILIES, VLLM_LAYOUTS, (1, 2)):
        yield _vllm(family, layout, parallel)
    for layout in VLLM_LAYOUTS:
        yield _vllm("gqa", layout, 1, "fp8", "--kv-cache-dtype", "fp8")
        yield _vllm("gqa", layout, 1, "eager", "--enforce-eager")
    # Every decoding step is padded to eight: what fills up a batch must touch no block of a request.
    for family in ("swa", "linear"):
        yield _vllm(family, "block", 1, "padded", "--cudagraph-capture-sizes", "8")
    # No layout asked for: the plugin's preference against the engine's own.
    yield Case("vllm-gqa-default", VLLM, "gqa", VLLM_SIZE)
    # No size given: vLLM profiles, and from 0.34 on grows its KV cache to what it finds free, unless it is elastic.
    yield Case("vllm-gqa-profiled", VLLM, "gqa", VLLM_SIZE[:2])


def _vllm(family: str, layout: str, parallel: int, variant: str = "", *flags: str) -> Case:
    name = "-".join(filter(None, ("vllm", family, layout, variant, f"tp{parallel}" if parallel > 1 else "")))
    return Case(
        name,
        VLLM,
        family,
        (*VLLM_SIZE, "--tensor-parallel-size", str(parallel), *VLLM_FAMILY_FLAGS.get(family, ()), *flags),
        VLLM_LAYOUTS[layout],
        parallel,
    )


def _sglang_cases() -> Iterator[Case]:
    for family, parallel in itertools.product(MATRIX_FAMILIES, (1, 2)):
        yield _sglang(family, parallel)
    yield _sglang("gqa", 1, "page64", "--page-size", "64")
    yield _sglang("gqa", 1, "fp8", "--kv-cache-dtype", "fp8_e4m3")
    yield _sglang("gqa", 1, "eager", "--disable-cuda-graph")
    yield _sglang("gqa", 1, "noradix", "--disable-radix-cache")
    for family in ("swa", "linear"):
        yield _sglang(family, 1, "padded", "--cuda-graph-bs-decode", "8")
    for family in MATRIX_FAMILIES:
        yield replace(_sglang(family, 1, "token"), settings={"KVCACHED_LAYOUT": "token-major"})


def _sglang(family: str, parallel: int, variant: str = "", *flags: str) -> Case:
    name = "-".join(filter(None, ("sglang", family, variant, f"tp{parallel}" if parallel > 1 else "")))
    family_flags = SGLANG_FAMILY_FLAGS.get(family, ())
    tensor_flags = ("--tp-size", str(parallel))
    return Case(name, SGLANG, family, (*SGLANG_SIZE, *tensor_flags, *family_flags, *flags), tensor_parallel=parallel)
