"""kvcached changes no module and no class of an engine, or of PyTorch: neither as its source says nor as it runs."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kvcached_core
import kvcached_vllm
import pytest

FOREIGN = ("vllm", "sglang", "torch")
PRODUCT = [Path(package.__file__).parent for package in (kvcached_core, kvcached_vllm)]


def changes(source: str) -> list[str]:
    """Statements that change what was imported from an engine or from PyTorch."""
    tree = ast.parse(source)
    foreign = {name for node in ast.walk(tree) for name in _imported(node)}
    return [ast.unparse(node) for node in ast.walk(tree) if any(_is_of(target, foreign) for target in _changed(node))]


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.partition(".")[0] in FOREIGN:
                yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in FOREIGN:
        for alias in node.names:
            yield alias.asname or alias.name


def _changed(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to or deletes from: the objects, not the names."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
        "setattr",
        "delattr",
        "__setattr__",
    ):
        yield from node.args[:1]
        return
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".update", ".setdefault", ".pop")):
        targets = [node.func]
    else:
        return
    for target in targets:
        for part in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
            if isinstance(part, (ast.Attribute, ast.Subscript)):
                yield part.value


def _is_of(node: ast.expr, foreign: set[str]) -> bool:
    """Whether an expression is an imported object, something in it, or the table of all modules."""
    text = ast.unparse(node)
    if text == "sys.modules" or (text.startswith("vars(") and isinstance(node, ast.Call)):
        return text == "sys.modules" or _is_of(node.args[0], foreign)
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("type", "importlib.import_module", "import_module"):
        return True
    return isinstance(node, ast.Name) and node.id in foreign


@pytest.mark.parametrize(
    "path", [path for root in PRODUCT for path in sorted(root.rglob("*.py"))], ids=lambda p: p.stem
)
def test_no_source_changes_what_it_imports(path: Path) -> None:
    assert changes(path.read_text()) == []


@pytest.mark.parametrize(
    "offence",
    [
        "from vllm.v1.core.sched.scheduler import Scheduler\nScheduler.schedule = None",
        "from vllm.v1.core.sched.scheduler import Scheduler as S\nsetattr(S, 'schedule', None)",
        "import vllm.platforms\nvllm.platforms.current_platform = None",
        "import torch\ntorch.zeros = None",
        "import torch as t\nt.nn.Linear.forward: object = None",
        "import torch\ndel torch.zeros",
        "import torch\ntorch.nn.functional.__dict__['relu'] = None",
        "import torch\nvars(torch)['zeros'] = None",
        "import torch\nvars(torch).update(zeros=None)",
        "from vllm.v1.core import block_pool\nblock_pool.BlockPool, x = None, 1",
        "import sys\nsys.modules['vllm.platforms'] = None",
        "import importlib\nimportlib.import_module('vllm').x = 1",
        "def f(pool):\n    type(pool).get_new_blocks = None",
        "from sglang.srt.managers import scheduler\nobject.__setattr__(scheduler, 'a', 1)",
    ],
)
def test_the_check_finds(offence: str) -> None:
    assert changes(offence)


@pytest.mark.parametrize(
    "allowed",
    [
        "from vllm.v1.core.block_pool import BlockPool\ndef f(pool: BlockPool):\n    pool.free_block_queue = 1",
        "from vllm.config import VllmConfig\ndef f(config: VllmConfig):\n    config.parallel_config.worker_cls = 'x'",
        "from torch import Tensor\nclass A:\n    def __init__(self):\n        self.tensor = Tensor()",
    ],
)
def test_the_check_allows_attributes_of_instances(allowed: str) -> None:
    assert changes(allowed) == []


AT_RUN_TIME = '''
import importlib, json, os, pkgutil, sys, types

def attributes():
    """Every function and class of the engine's modules and of PyTorch's own namespace, and all in the classes."""
    found = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and (name.partition(".")[0] == "vllm" or name == "torch"):
            for key, value in list(vars(module).items()):
                if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
                    found[f"{name}.{key}"] = value
                if isinstance(value, type) and (value.__module__ or "").partition(".")[0] == "vllm":
                    for inner, member in list(vars(value).items()):
                        if inner not in ("__annotations__", "__abstractmethods__", "_abc_impl", "__doc__"):
                            found[f"{value.__module__}.{value.__qualname__}.{inner}"] = member
    return found

for name in %(engine)r:
    importlib.import_module(name)
import torch
from vllm.plugins import load_general_plugins
before = attributes()
os.environ["ENABLE_KVCACHED"] = "1"      # only now, since vLLM asks for its platform as it is imported
import kvcached_vllm
from kvcached_vllm import plugin
assert plugin.platform() == "kvcached_vllm.platform_cpu.ElasticCpuPlatform", plugin.platform()
plugin.general()
load_general_plugins()
for module in pkgutil.iter_modules(kvcached_vllm.__path__, "kvcached_vllm."):
    if module.name != "kvcached_vllm.platform_cuda":      # needs NVML
        importlib.import_module(module.name)
from kvcached_vllm.allocation import KVAllocation
with KVAllocation(64, lambda: torch.empty(64, dtype=torch.int8)):
    torch.zeros(64, dtype=torch.int8)
%(offence)s
after = attributes()
print(json.dumps({
    "looked_at": len(before),
    "changed": sorted(key for key in before if key in after and after[key] is not before[key]),
    "gone": sorted(set(before) - set(after)),
    "ours": sorted(k for k, v in after.items() if (getattr(v, "__module__", None) or "").startswith("kvcached")),
}))
'''
ENGINE = [
    "vllm.v1.core.block_pool",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.metrics.loggers",
    "vllm.platforms.cpu",
    "vllm.config",
]


def run(runtime_dir: Path, offence: str = "") -> dict[str, list[str]]:
    script = AT_RUN_TIME % {"engine": ENGINE, "offence": offence}
    environment = {
        **{name: value for name, value in os.environ.items() if name != "ENABLE_KVCACHED"},
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "KVCACHED_HOST_BUDGET": "64MiB",
        "KVCACHED_RUNTIME_DIR": str(runtime_dir),
        "VLLM_NO_USAGE_STATS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_an_active_plugin_leaves_every_function_and_class_as_it_was(runtime_dir: Path) -> None:
    found = run(runtime_dir)
    assert found["looked_at"] > 10_000
    assert (found["changed"], found["gone"], found["ours"]) == ([], [], [])


def test_the_comparison_sees_a_changed_method_and_a_changed_function(runtime_dir: Path) -> None:
    offence = "\n".join([
        "from vllm.v1.core.block_pool import BlockPool",
        "BlockPool.get_new_blocks = lambda self, n: []",
        "torch.zeros = plugin.platform",
    ])  # fmt: skip
    found = run(runtime_dir, offence)
    assert set(found["changed"]) == {"torch.zeros", "vllm.v1.core.block_pool.BlockPool.get_new_blocks"}
    assert found["ours"] == ["torch.zeros"]
