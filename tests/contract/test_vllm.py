"""What kvcached-vllm relies on, in every supported release of vLLM."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import kvcached_vllm
import pytest
from kvcached_core.errors import UnsupportedError
from kvcached_vllm import contract
from kvcached_vllm.releases import TESTED_RELEASES

HERE = Path(__file__).parent
PLUGIN = Path(kvcached_vllm.__file__).parent


@pytest.fixture(params=TESTED_RELEASES, scope="module")
def root(request: pytest.FixtureRequest, engine_root: Callable[[str], Path]) -> Path:
    return engine_root(f"vllm-{request.param}")


@pytest.fixture(scope="module")
def users_of(root: Path) -> Callable[[str], set[str]]:
    """The files of the release that have a text; each file is read once."""
    texts = {str(path.relative_to(root / "vllm")): path.read_text() for path in root.glob("vllm/**/*.py")}
    return lambda words: {file for file, text in texts.items() if words in text}


def test_the_release_keeps_the_contract(root: Path) -> None:
    assert [str(finding) for finding in contract.check(root)] == []


def test_nobody_but_the_pool_and_a_refused_connector_touches_the_free_queue(
    users_of: Callable[[str], set[str]],
) -> None:
    """So nothing keeps vLLM's own queue after it has been replaced."""
    assert users_of(".free_block_queue") == {"v1/core/block_pool.py", "v1/simple_kv_offload/manager.py"}


def test_nobody_but_the_queue_looks_at_a_blocks_neighbours(users_of: Callable[[str], set[str]]) -> None:
    assert users_of("next_free_block") == {"v1/core/kv_cache_utils.py"}


def test_only_hisparse_reads_blocks_after_freeing_them(users_of: Callable[[str], set[str]]) -> None:
    """A block that is free may be unmapped; HiSparse is refused."""
    assert users_of(".unpin_blocks(") == {"v1/hisparse/coordinator.py"}


# Behaviour, with the release's own modules imported in a process of its own.


def run_with(root: Path, script: str, *arguments: str) -> str:
    """Run a script of this folder with the release's sources before any installed vLLM."""
    path = os.pathsep.join([str(root), *filter(None, sys.path)])
    command = [sys.executable, "-W", "ignore", str(HERE / script), *arguments]
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{script} with {root.name}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert f"{root.name}\n" in done.stdout, f"another vLLM was imported: {done.stdout}"
    return done.stdout


@pytest.mark.slow
def test_the_queue_serves_the_releases_real_pool_as_its_own_queue_does(root: Path) -> None:
    assert "20000 operations" in run_with(root, "fuzz_queue.py", "20000", "1")


@pytest.mark.slow
def test_the_releases_own_tensors_lie_where_the_geometry_says(root: Path) -> None:
    assert "layouts" in run_with(root, "check_layouts.py")


@pytest.mark.slow
def test_the_releases_own_demand_for_free_memory_and_sleep_mode_are_what_we_count_with(root: Path) -> None:
    assert "memory" in run_with(root, "check_memory.py")


@pytest.mark.slow
def test_the_releases_own_scheduler_gets_the_memory_that_it_admits_requests_by(root: Path) -> None:
    assert "scheduler of" in run_with(root, "check_scheduler.py")


# The check itself.


@pytest.fixture
def changed(tmp_path: Path, engine_root: Callable[[str], Path]) -> Path:
    """A copy of the newest release that a test may change: only the files that the contract names."""
    root = engine_root(f"vllm-{TESTED_RELEASES[-1]}")
    for file in {expectation.file for expectation in contract.EXPECTATIONS}:
        if (root / "vllm" / file).exists():
            target = tmp_path / "vllm" / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / "vllm" / file, target)
    return tmp_path


MOVES = [
    pytest.param(
        "v1/core/block_pool.py", "def evict_blocks(self, block_ids", "def evict_blocks(self, ids",
        "v1/core/block_pool.py BlockPool.evict_blocks: expected first parameters ('self', 'block_ids'), "
        "found ('self', 'ids')", id="a parameter renamed",
    ),
    pytest.param(
        "v1/core/block_pool.py", "def evict_blocks(self, block_ids", "def evict_blocks(self, block_ids, why, how",
        "no parameters needed after ('self', 'block_ids'), found ('why',", id="a parameter added",
    ),
    pytest.param(
        "v1/core/kv_cache_utils.py", "def prepend_n", "def put_first_n",
        "FreeKVCacheBlockQueue.prepend_n: expected a function, found nothing", id="a method renamed",
    ),
    pytest.param(
        "v1/core/block_pool.py", "self.free_block_queue.append_n(blocks_to_evict_last)",
        "self.free_block_queue.extend(blocks_to_evict_last)",
        "v1/core/block_pool.py self.free_block_queue: expected no use but of append_n num_free_blocks popleft "
        "popleft_n prepend_n remove, found extend", id="another method of the queue used",
    ),
    pytest.param(
        "v1/core/block_pool.py", "self.free_block_queue.prepend_n(blocks_to_evict_first)",
        "self.free_block_queue.append_n(blocks_to_evict_first)",
        "BlockPool.free_blocks: expected 'self.free_block_queue.prepend_n(blocks_to_evict_first)' in this order",
        id="freed blocks at the other end",
    ),
    pytest.param(
        "v1/core/sched/scheduler.py", "+ len(self.async_kv_waiting)",
        "+ len(self.async_kv_waiting) + len(self.fourth_queue)",
        "Scheduler.get_request_counts: expected 'return (len(self.running), len(self.waiting) + "
        "len(self.kv_holding_waiting) + len(self.async_kv_waiting))'", id="requests wait in another queue",
    ),
    pytest.param(
        "v1/kv_cache_interface.py", "    block_stride: int\n", "    stride: int\n",
        "v1/kv_cache_interface.py KVCacheTensor: expected block_stride in it, found none", id="a field renamed",
    ),
    pytest.param(
        "v1/worker/utils.py", "torch.zeros(buf_size, dtype=torch.int8", "torch.empty(buf_size, dtype=torch.uint8",
        "utils.py _allocate_kv_cache_buffer: expected 'torch.zeros(buf_size, dtype=torch.int8, device=device)'",
        id="the allocation changed",
    ),
    pytest.param(
        "config/vllm.py", "if requested is None:", "if not requested:",
        "config/vllm.py VllmConfig._resolve_extensible_kv_cache: expected 'if requested is None:'",
        id="what only a newer release has changed",
    ),
    pytest.param(
        "v1/engine/core.py", "self.scheduler.reset_encoder_cache()", "self.scheduler.move_blocks()",
        "v1/engine/core.py self.scheduler: expected no use but of", id="the core calls another method of the scheduler",
    ),
    pytest.param(
        "v1/core/sched/async_scheduler.py", "class AsyncScheduler(Scheduler)", "class AsyncScheduler(Other)",
        "AsyncScheduler: expected base class Scheduler, found ['Other']", id="another base class",
    ),
    pytest.param(
        "config/parallel.py", "    worker_cls:", "    worker_class:",
        "config/parallel.py ParallelConfig: expected worker_cls in it", id="a setting renamed",
    ),
    pytest.param(
        "v1/worker/gpu_worker.py", "self.init_snapshot =", "self.snapshot =",
        "v1/worker/gpu_worker.py Worker: expected self.init_snapshot assigned", id="an attribute renamed",
    ),
    pytest.param(
        "plugins/__init__.py", '"vllm.platform_plugins"', '"vllm.platforms"',
        "plugins/__init__.py PLATFORM_PLUGINS_GROUP: expected \"'vllm.platform_plugins'\"", id="the group renamed",
    ),
    pytest.param(
        "config/__init__.py", "VllmConfig", "EngineConfig",
        "config/__init__.py: expected VllmConfig in it, found no such name", id="an export removed",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("file", "before", "after", "said"), MOVES)
def test_what_moved_is_named(changed: Path, file: str, before: str, after: str, said: str) -> None:
    path = changed / "vllm" / file
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    sources = contract.Sources(changed)
    expectations = [expectation for expectation in contract.EXPECTATIONS if expectation.file == file]
    findings = [str(finding) for expectation in expectations for finding in expectation.check(sources)]
    assert any(said in finding for finding in findings), findings


def test_a_file_that_is_gone_is_named(changed: Path) -> None:
    (changed / "vllm/v1/core/sched/async_scheduler.py").unlink()
    findings = [str(finding) for finding in contract.check(changed)]
    assert "v1/core/sched/async_scheduler.py AsyncScheduler: expected a class, found nothing" in findings


def test_a_release_that_moved_is_refused_with_what_moved(changed: Path) -> None:
    contract.require(changed, TESTED_RELEASES[-1])
    (changed / "vllm/v1/core/block_pool.py").write_text("")
    with pytest.raises(UnsupportedError, match=r"vLLM 0\.35\.0 is not .*block_pool\.py.*; and \d+ more\.$"):
        contract.require(changed, "0.35.0")


def imports_from_vllm() -> list[tuple[str, str, str]]:
    """Everything that the plugin imports from vLLM: file of the plugin, module and name."""
    found = []
    for path in sorted(PLUGIN.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                found += [(path.name, node.module or "", alias.name) for alias in node.names]
    return found


@pytest.mark.parametrize(("user", "module", "name"), imports_from_vllm())
def test_every_import_from_vllm_is_in_the_contract(user: str, module: str, name: str) -> None:
    base = module.removeprefix("vllm").lstrip(".").replace(".", "/")
    named = {
        (expectation.file, word)
        for expectation in contract.EXPECTATIONS
        for word in (
            expectation.names.split()
            if isinstance(expectation, contract.Exports)
            else [getattr(expectation, "name", "").partition(".")[0]]
        )
    }
    assert (f"{base}.py", name) in named or (f"{base}/__init__.py", name) in named, (
        f"{user} imports {name} from {module}: add what it relies on to kvcached_vllm/contract.py"
    )
