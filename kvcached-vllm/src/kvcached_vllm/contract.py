"""Everything of vLLM that the plugin relies on, as data, and the check of a release's sources against it.

The check reads sources and imports nothing, so it takes a second, needs no GPU, and says of any release what
has moved. It runs at start-up on a release that is not in the table of tested ones, and in tests/contract
on every release that is. Whoever changes what the plugin relies on changes `EXPECTATIONS`; a test compares
it with the plugin's imports.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvcached_core.errors import UnsupportedError


@dataclass(frozen=True)
class Finding:
    """One thing that is not as expected.

    Attributes:
        where: The file, and the object in it.
        expected: What the plugin relies on.
        found: What is there instead.
    """

    where: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, found {self.found}"


class Expectation(Protocol):
    """Something that holds in every supported release."""

    @property
    def file(self) -> str:
        """The file that it is about, below ``vllm/``."""

    def check(self, sources: Sources) -> Iterator[Finding]:
        """What is not as expected."""


def check(root: Path) -> list[Finding]:
    """Compare the sources of one release with what the plugin relies on.

    Args:
        root: The folder that holds ``vllm/``: site-packages, or an unpacked wheel.

    Returns:
        What has moved, in the order of `EXPECTATIONS`; empty if the plugin can work with this release.
    """
    sources = Sources(root)
    return [finding for expectation in EXPECTATIONS for finding in expectation.check(sources)]


def require(root: Path, version: str) -> None:
    """Refuse a release that does not keep the contract.

    Raises:
        UnsupportedError: Names the release, and the first things that have moved.
    """
    findings = check(root)
    if findings:
        shown = "; ".join(map(str, findings[:3]))
        more = f"; and {len(findings) - 3} more" if len(findings) > 3 else ""
        raise UnsupportedError(f"vLLM {version} is not what this kvcached relies on: {shown}{more}.")


class Sources:
    """Parsed files of one release."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @functools.cache  # noqa: B019 - as long-lived as the check
    def tree(self, file: str) -> ast.Module | None:
        """A file's syntax tree, or None if there is no such file."""
        path = self.root / "vllm" / file
        return ast.parse(path.read_text()) if path.exists() else None

    def find(self, file: str, name: str) -> ast.AST | None:
        """The class, function or assignment that a dotted name stands for in a file; methods also of base classes.

        Base classes are looked for in the same file only.
        """
        node: ast.AST | None = self.tree(file)
        for part in name.split("."):
            node = None if node is None else self._member(file, node, part)
        return node

    def _member(self, file: str, node: ast.AST, name: str) -> ast.AST | None:
        for child in _body(node):
            if name in _names_defined_by(child):
                return child
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                parent = self.find(file, ast.unparse(base))
                if parent is not None and (found := self._member(file, parent, name)) is not None:
                    return found
        return None


@dataclass(frozen=True)
class Function:
    """A function or method with these first parameters; None: the plugin passes on whatever it is given."""

    file: str
    name: str
    parameters: tuple[str, ...] | None = None
    kind: str = ""

    def check(self, sources: Sources) -> Iterator[Finding]:
        node = sources.find(self.file, self.name)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield Finding(f"{self.file} {self.name}", "a function", _kind(node))
            return
        parameters = tuple(argument.arg for argument in (*node.args.posonlyargs, *node.args.args))
        if self.parameters is not None and parameters[: len(self.parameters)] != self.parameters:
            yield Finding(f"{self.file} {self.name}", f"first parameters {self.parameters}", f"{parameters}")
        num_passed = len(parameters if self.parameters is None else self.parameters)
        required = parameters[num_passed : len(parameters) - len(node.args.defaults)]
        if required:
            yield Finding(f"{self.file} {self.name}", f"no parameters needed after {self.parameters}", f"{required}")
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        if self.kind and self.kind not in decorators:
            yield Finding(f"{self.file} {self.name}", f"a {self.kind}", f"decorators {decorators}")


@dataclass(frozen=True)
class Class:
    """A class with these bases and these names in its body: fields, members, methods."""

    file: str
    name: str
    has: str = ""
    bases: str = ""

    def check(self, sources: Sources) -> Iterator[Finding]:
        node = sources.find(self.file, self.name)
        if not isinstance(node, ast.ClassDef):
            yield Finding(f"{self.file} {self.name}", "a class", _kind(node))
            return
        missing = [name for name in self.has.split() if sources.find(self.file, f"{self.name}.{name}") is None]
        if missing:
            yield Finding(f"{self.file} {self.name}", f"{', '.join(missing)} in it", "none")
        bases = [ast.unparse(base) for base in node.bases]
        if not set(self.bases.split()) <= set(bases):
            yield Finding(f"{self.file} {self.name}", f"base class {self.bases}", f"{bases}")


@dataclass(frozen=True)
class Sets:
    """A class whose methods assign these attributes of ``self``."""

    file: str
    name: str
    attributes: str

    def check(self, sources: Sources) -> Iterator[Finding]:
        node = sources.find(self.file, self.name)
        assigned = {
            target.attr
            for statement in ast.walk(node or ast.Module([], []))
            for target in _targets(statement)
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
        }
        missing = [attribute for attribute in self.attributes.split() if attribute not in assigned]
        if missing:
            yield Finding(f"{self.file} {self.name}", f"self.{', self.'.join(missing)} assigned", "no such assignment")


@dataclass(frozen=True)
class Contains:
    """A function, class or assignment whose text has these pieces, in this order."""

    file: str
    name: str
    pieces: tuple[str, ...]

    def check(self, sources: Sources) -> Iterator[Finding]:
        node = sources.find(self.file, self.name)
        if node is None:
            yield Finding(f"{self.file} {self.name}", "it to be there", "nothing")
            return
        text, position = ast.unparse(node), 0
        for piece in self.pieces:
            found = text.find(piece, position)
            if found < 0:
                elsewhere = "it comes earlier" if piece in text else "no such text"
                yield Finding(f"{self.file} {self.name}", f"{piece!r} in this order of {self.pieces}", elsewhere)
                return
            position = found + len(piece)


@dataclass(frozen=True)
class Exports:
    """Names that can be imported from a module, wherever they are defined."""

    file: str
    names: str

    def check(self, sources: Sources) -> Iterator[Finding]:
        tree = sources.tree(self.file)
        there = {node.id for node in ast.walk(tree or ast.Module([], [])) if isinstance(node, ast.Name)}
        for node in ast.walk(tree or ast.Module([], [])):
            if isinstance(node, ast.stmt):
                there |= _names_defined_by(node)
        if missing := set(self.names.split()) - there:
            yield Finding(self.file, f"{', '.join(sorted(missing))} in it", "no such name")


@dataclass(frozen=True)
class OnlyThese:
    """The names that one object's attributes are used by in a file: no others, and not fewer."""

    file: str
    object: str
    names: str
    optional: str = ""

    def check(self, sources: Sources) -> Iterator[Finding]:
        tree = sources.tree(self.file)
        used = {
            node.attr
            for node in ast.walk(tree or ast.Module([], []))
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == self.object
        }
        where = f"{self.file} {self.object}"
        names = set(self.names.split())
        if more := used - names - set(self.optional.split()):
            yield Finding(where, f"no use but of {self.names}", f"{', '.join(sorted(more))}")
        if fewer := names - used:
            yield Finding(where, f"{', '.join(sorted(fewer))} to be used", "no use")


@dataclass(frozen=True)
class Either:
    """Expectations of one file of which at least one holds: a release has the one or the other."""

    file: str
    choices: tuple[Expectation, ...]

    def check(self, sources: Sources) -> Iterator[Finding]:
        findings = [list(choice.check(sources)) for choice in self.choices]
        if all(findings):
            yield findings[0][0]


@dataclass(frozen=True)
class Where:
    """Expectations of one file, for those releases that have this in it."""

    file: str
    name: str
    expectations: tuple[Expectation, ...]

    def check(self, sources: Sources) -> Iterator[Finding]:
        if sources.find(self.file, self.name) is not None:
            for expectation in self.expectations:
                yield from expectation.check(sources)


def _body(node: ast.AST) -> Sequence[ast.stmt]:
    return node.body if isinstance(node, (ast.Module, ast.ClassDef)) else ()


def _names_defined_by(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return {statement.name}
    if isinstance(statement, ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    return {target.id for target in _targets(statement) if isinstance(target, ast.Name)}


def _targets(statement: ast.AST) -> Iterator[ast.expr]:
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else (target,)
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        yield statement.target


def _kind(node: ast.AST | None) -> str:
    return "nothing" if node is None else f"a {type(node).__name__}"


# --- what the plugin relies on ----------------------------------------------------------------------------------------

_PLUGINS: tuple[Expectation, ...] = (
    Contains("plugins/__init__.py", "PLATFORM_PLUGINS_GROUP", ("'vllm.platform_plugins'",)),
    Contains("plugins/__init__.py", "DEFAULT_PLUGINS_GROUP", ("'vllm.general_plugins'",)),
    Contains("platforms/__init__.py", "builtin_platform_plugins", ("'cuda'", "'cpu'")),
    # The plugin ends the process with SystemExit in strict mode; vLLM swallows `Exception` only.
    Contains(
        "platforms/__init__.py",
        "resolve_current_platform_cls_qualname",
        ("except Exception", "Only one platform plugin can be activated"),
    ),
    Function("logger.py", "init_logger"),
    Exports("platforms/__init__.py", "builtin_platform_plugins current_platform"),
    Exports("config/__init__.py", "CacheConfig VllmConfig"),
    Exports("__init__.py", "__version__"),
)

_PLATFORMS: tuple[Expectation, ...] = (
    Function("platforms/cpu.py", "CpuPlatform.check_and_update_config", ("cls", "vllm_config"), "classmethod"),
    Function("platforms/cuda.py", "CudaPlatformBase.check_and_update_config", ("cls", "vllm_config"), "classmethod"),
    Contains("platforms/cuda.py", "CudaPlatform", ("NvmlCudaPlatform",)),
    Class("platforms/interface.py", "Platform", "is_cuda is_cpu is_out_of_tree"),
    Contains("platforms/cpu.py", "CpuPlatform.check_and_update_config", ("'vllm.v1.worker.cpu_worker.CPUWorker'",)),
    Contains("platforms/cuda.py", "CudaPlatformBase.check_and_update_config", ("'vllm.v1.worker.gpu_worker.Worker'",)),
)

_CONFIGURATION: tuple[Expectation, ...] = (
    Class(
        "config/vllm.py",
        "VllmConfig",
        "attention_config cache_config compilation_config diffusion_config instance_id "
        "is_mm_encoder_only kv_transfer_config load_config model_config parallel_config scheduler_config",
    ),
    Class(
        "config/parallel.py",
        "ParallelConfig",
        "data_parallel_index data_parallel_size distributed_executor_backend enable_elastic_ep nnodes "
        "pipeline_parallel_size tensor_parallel_size use_ray worker_cls world_size",
    ),
    # Dense replicas all become rank 0 of one; what still tells them apart is the index.
    Contains(
        "config/parallel.py",
        "ParallelConfig.reconfigure_for_independent_dp_rank",
        ("self.data_parallel_size = 1", "self.data_parallel_rank = 0"),
    ),
    Contains(
        "v1/engine/core.py",
        "EngineCoreProc.run_engine_core",
        ("parallel_config.data_parallel_index = dp_rank", "parallel_config.reconfigure_for_independent_dp_rank()"),
    ),
    Class("config/scheduler.py", "SchedulerConfig", "async_scheduling scheduler_cls watermark"),
    Contains("config/scheduler.py", "SchedulerConfig.get_scheduler_cls", ("self.scheduler_cls",)),
    Class(
        "config/cache.py",
        "CacheConfig",
        "block_size cache_dtype gpu_memory_utilization kv_cache_memory_bytes kv_offloading_size num_gpu_blocks",
    ),
    # A KV cache that vLLM grows itself is left out before vLLM settles whether to have one.
    Where(
        "config/vllm.py",
        "VllmConfig._resolve_extensible_kv_cache",
        (
            Contains(
                "config/vllm.py",
                "VllmConfig.__post_init__",
                ("current_platform.check_and_update_config(self)", "self._resolve_extensible_kv_cache()"),
            ),
            Contains(
                "config/vllm.py",
                "VllmConfig._resolve_extensible_kv_cache",
                ("requested = cache_config.enable_extensible_kv_cache", "if requested is None:"),
            ),
        ),
    ),
    Class("config/compilation.py", "CompilationConfig", "static_forward_context"),
    Class(
        "config/model.py",
        "ModelConfig",
        "attn_type has_inner_state is_moe max_model_len model revision served_model_name",
    ),
    Contains("config/model.py", "AttnTypeStr", ("'encoder_only'", "'attention_free'")),
    Class("config/load.py", "LoadConfig", "download_dir"),
    Class("config/kv_transfer.py", "KVTransferConfig", "kv_connector"),
    Class("config/attention.py", "AttentionConfig", "hisparse_config"),
)

_FREE_QUEUE: tuple[Expectation, ...] = (
    Function("v1/core/kv_cache_utils.py", "FreeKVCacheBlockQueue.__init__", ("self", "blocks")),
    Function("v1/core/kv_cache_utils.py", "FreeKVCacheBlockQueue.popleft", ("self",)),
    Function("v1/core/kv_cache_utils.py", "FreeKVCacheBlockQueue.popleft_n", ("self", "n")),
    Function("v1/core/kv_cache_utils.py", "FreeKVCacheBlockQueue.remove", ("self", "block")),
    Function("v1/core/kv_cache_utils.py", "FreeKVCacheBlockQueue.append", ("self", "block")),
    Function("v1/core/kv_cache_utils.py", "FreeKVCacheBlockQueue.append_n", ("self", "blocks")),
    Function("v1/core/kv_cache_utils.py", "FreeKVCacheBlockQueue.prepend_n", ("self", "blocks")),
    Function("v1/core/kv_cache_utils.py", "FreeKVCacheBlockQueue.get_all_free_blocks", ("self",)),
    Function("v1/core/kv_cache_utils.py", "FreeKVCacheBlockQueue.iter_blocks_after", ("self", "cursor")),
    Sets("v1/core/kv_cache_utils.py", "FreeKVCacheBlockQueue", "num_free_blocks"),
    # A block outside the list has no neighbours: that tells free cached blocks from all others.
    Contains(
        "v1/core/kv_cache_utils.py",
        "FreeKVCacheBlockQueue.remove",
        ("block.prev_free_block = block.next_free_block = None",),
    ),
    Contains(
        "v1/core/kv_cache_utils.py",
        "FreeKVCacheBlockQueue.popleft_n",
        ("last_block.prev_free_block = None", "last_block.next_free_block = None"),
    ),
    Class(
        "v1/core/kv_cache_utils.py",
        "KVCacheBlock",
        "block_id ref_cnt prev_free_block next_free_block is_null block_hash reset_hash",
    ),
)

_BLOCK_POOL: tuple[Expectation, ...] = (
    Sets("v1/core/block_pool.py", "BlockPool", "blocks free_block_queue null_block num_gpu_blocks"),
    # Nobody but these uses the queue, and nobody keeps it: `free_block_queue` may be replaced.
    OnlyThese(
        "v1/core/block_pool.py",
        "self.free_block_queue",
        "append_n num_free_blocks popleft popleft_n prepend_n remove",
    ),
    Contains("v1/core/block_pool.py", "BlockPool.__init__", ("self.free_block_queue.popleft()", "is_null = True")),
    # The count is checked before blocks are taken, and what they hold is evicted after.
    Contains(
        "v1/core/block_pool.py",
        "BlockPool.get_new_blocks",
        (
            "if num_blocks > self.get_num_free_blocks():",
            "raise ValueError",
            "self.free_block_queue.popleft_n(num_blocks)",
            "self._maybe_evict_cached_block(block)",
            "assert block.ref_cnt == 0",
        ),
    ),
    # Which end a freed block comes in at says whether it has cached content.
    Contains(
        "v1/core/block_pool.py",
        "BlockPool.free_blocks",
        (
            "if block.block_hash is None or not self.enable_caching",
            "blocks_to_evict_first.append(block)",
            "blocks_to_evict_last.append(block)",
            "self.free_block_queue.prepend_n(blocks_to_evict_first)",
            "self.free_block_queue.append_n(blocks_to_evict_last)",
        ),
    ),
    Contains("v1/core/block_pool.py", "BlockPool.touch", ("block.ref_cnt == 0", "self.free_block_queue.remove(block)")),
    Function("v1/core/block_pool.py", "BlockPool.evict_blocks", ("self", "block_ids")),
    Contains("v1/core/block_pool.py", "BlockPool.evict_blocks", ("self._maybe_evict_cached_block(block)",)),
    Contains("v1/core/block_pool.py", "BlockPool._maybe_evict_cached_block", ("_emit_block_removed_events",)),
    # `counting_absent` makes this true of a pool that is mostly absent.
    Contains(
        "v1/core/block_pool.py",
        "BlockPool.reset_prefix_cache",
        ("num_used_blocks = self.num_gpu_blocks - self.get_num_free_blocks()", "if num_used_blocks != 1:"),
    ),
    Contains("v1/core/block_pool.py", "BlockPool.get_num_free_blocks", ("self.free_block_queue.num_free_blocks",)),
    Contains(
        "v1/core/kv_cache_manager.py",
        "KVCacheManager.__init__",
        (
            "self.block_pool = self.coordinator.block_pool",
            "self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)",
        ),
    ),
    # A prompt is admitted, and a running request extended, by the count of free blocks alone.
    Contains(
        "v1/core/kv_cache_manager.py",
        "KVCacheManager.allocate_slots",
        ("self.block_pool.get_num_free_blocks() - reserved_blocks", "self.coordinator.allocate_new_blocks"),
    ),
)

_SCHEDULER: tuple[Expectation, ...] = (
    Class("v1/core/sched/async_scheduler.py", "AsyncScheduler", bases="Scheduler"),
    Class("v1/core/sched/scheduler.py", "Scheduler", bases="SchedulerInterface"),
    Function("v1/core/sched/async_scheduler.py", "AsyncScheduler.__init__", ("self",)),
    *(
        Function("v1/core/sched/scheduler.py", f"Scheduler.{name}")
        for name in (
            "schedule",
            "update_from_output",
            "finish_requests",
            "update_draft_token_ids",
            "update_draft_token_ids_in_output",
            "reset_prefix_cache",
            "make_stats",
        )
    ),
    Function("v1/core/sched/scheduler.py", "Scheduler.add_request", ("self", "request")),
    Function("v1/core/sched/scheduler.py", "Scheduler.get_kv_cache_usage", ("self",)),
    Function("v1/core/sched/scheduler.py", "Scheduler.has_requests", ("self",)),
    Function("v1/core/sched/scheduler.py", "Scheduler.shutdown", ("self",)),
    Sets(
        "v1/core/sched/scheduler.py",
        "Scheduler",
        "_pause_state kv_cache_config kv_cache_manager max_model_len max_num_running_reqs "
        "max_num_scheduled_tokens num_lookahead_tokens num_spec_tokens parallel_config running "
        "scheduler_config vllm_config waiting",
    ),
    # Every method that the engine core calls; one that is not in this list may need the scheduler's lock.
    OnlyThese(
        "v1/engine/core.py",
        "self.scheduler",
        "add_request connector ec_connector finish_requests get_ec_connector get_grammar_bitmask "
        "get_kv_cache_usage get_kv_connector get_kv_event_publisher_config "
        "get_num_unfinished_requests get_request_counts has_requests has_unfinished_requests "
        "make_stats pause_state reset_encoder_cache reset_prefix_cache schedule set_pause_state "
        "shutdown update_draft_token_ids update_draft_token_ids_in_output update_from_output",
        optional="has_request",
    ),
    Contains(
        "v1/engine/core.py",
        "EngineCore.step",
        (
            "self.scheduler.has_requests()",
            "self.scheduler.schedule(",
            "self.model_executor.execute_model(scheduler_output, non_block=True)",
            "if model_output is None:",
            "self.model_executor.sample_tokens(",
            "self.scheduler.update_from_output(",
        ),
    ),
    Class("v1/core/sched/interface.py", "PauseState", "UNPAUSED"),
    Function("v1/core/sched/request_queue.py", "RequestQueue.peek_request", ("self",)),
    Class("v1/core/sched/output.py", "SchedulerOutput"),
    Class("v1/metrics/stats.py", "SchedulerStats", "kv_cache_usage"),
    Class("v1/request.py", "Request", "num_tokens"),
    Sets("v1/request.py", "Request", "client_index max_tokens num_prompt_tokens request_id"),
    Class("v1/engine/__init__.py", "EngineCoreOutput", "request_id new_token_ids finish_reason"),
    Class("v1/engine/__init__.py", "EngineCoreOutputs", "finished_requests outputs"),
    Class("v1/engine/__init__.py", "FinishReason", "ERROR"),
)

_KV_CACHE: tuple[Expectation, ...] = (
    Class(
        "v1/kv_cache_interface.py",
        "KVCacheTensor",
        "size layers layer_stride block_stride offset host_resident",
    ),
    Class(
        "v1/kv_cache_interface.py",
        "KVCacheConfig",
        "num_blocks kv_cache_tensors kv_cache_groups kv_cache_layout",
    ),
    Class("v1/kv_cache_interface.py", "KVCacheGroupSpec", "layer_names kv_cache_spec"),
    Class("v1/kv_cache_interface.py", "KVCacheSpec", "block_size page_size_bytes has_layer_views"),
    # One int8 buffer for the whole model: the call that the allocation mode answers.
    Contains("v1/worker/utils.py", "allocate_kv_cache", ("assert len(sizes) == 1", "buf = ", "create_kv_cache_views")),
    Either(
        "v1/worker/utils.py",
        tuple(
            Contains(
                "v1/worker/utils.py",
                name,
                ("buf_size = raw_size", "torch.zeros(buf_size, dtype=torch.int8, device=device)"),
            )
            for name in ("_allocate_kv_cache_buffer", "allocate_kv_cache")
        ),
    ),
    Where(
        "v1/worker/utils.py",
        "_allocate_kv_cache_buffer",
        (
            Contains(
                "v1/worker/utils.py",
                "allocate_kv_cache",
                ("if allocate is not None:", "buf = _allocate_kv_cache_buffer(raw_size, device)"),
            ),
        ),
    ),
    Where(
        "v1/worker/gpu_model_runner.py",
        "GPUModelRunner",
        (
            Contains(
                "v1/worker/gpu_model_runner.py",
                "GPUModelRunner.initialize_kv_cache_tensors",
                ("allocate_kv_cache(",),
            ),
            Sets("v1/worker/gpu_model_runner.py", "GPUModelRunner", "model_memory_usage"),
        ),
    ),
    Contains("v1/worker/gpu/attn_utils.py", "init_kv_cache", ("allocate_kv_cache(",)),
    # Blocks that lie apart are never split into kernel blocks: vLLM would rather not start.
    Contains(
        "v1/kv_cache_interface.py",
        "create_kv_cache_views",
        ("if ratio > 1:", "if block_stride != dense_page_size:", "raise ValueError", "torch.as_strided("),
    ),
    Class("v1/kv_cache_layout.py", "KVCacheLayout", "LBHNC LBNHC BLHNC BLNHC"),
    Contains("model_executor/layers/attention_layer_base.py", "AttentionLayerBase.bind_kv_cache", ("self.kv_cache =",)),
    Contains("model_executor/layers/mamba/abstract.py", "MambaBase.bind_kv_cache", ("self.kv_cache = tuple(states)",)),
)

_WORKER: tuple[Expectation, ...] = (
    *(
        Function(file, f"{name}.{method}", parameters)
        for file, name in (("v1/worker/gpu_worker.py", "Worker"), ("v1/worker/cpu_worker.py", "CPUWorker"))
        for method, parameters in (("init_device", ("self",)), ("determine_available_memory", ("self",)))
    ),
    Class("v1/worker/cpu_worker.py", "CPUWorker", bases="Worker"),
    Function("v1/worker/gpu_worker.py", "Worker.initialize_from_config", ("self", "kv_cache_config")),
    Function("v1/worker/gpu_worker.py", "Worker.compile_or_warm_up_model", ("self",)),
    Function("v1/worker/gpu_worker.py", "Worker.execute_model", ("self", "scheduler_output")),
    Function("v1/worker/gpu_worker.py", "Worker.sample_tokens", ("self", "grammar_output")),
    Function("v1/worker/gpu_worker.py", "Worker.get_kv_cache_spec", ("self",)),
    Function("v1/worker/gpu_worker.py", "Worker.load_model", ("self",)),
    Function("v1/worker/gpu_worker.py", "Worker.shutdown", ("self",)),
    Function("v1/worker/gpu_worker.py", "Worker.sleep", ("self", "level")),
    Function("v1/worker/gpu_worker.py", "Worker.wake_up", ("self", "tags")),
    # What sleeps, and that waking again what is awake already is nothing.
    Class("device_allocator/__init__.py", "AllocationData", "handle tag is_asleep"),
    Class("device_allocator/cumem.py", "CuMemAllocator", "instance"),
    Sets("device_allocator/cumem.py", "CuMemAllocator", "pointer_to_data"),
    Either(
        "device_allocator/cumem.py",
        tuple(
            Contains(
                "device_allocator/cumem.py",
                f"CuMemAllocator.{method}",
                ("unmap_and_release(", "data.is_asleep = True"),
            )
            for method in ("sleep", "_put_to_sleep")
        ),
    ),
    Contains(
        "device_allocator/cumem.py",
        "CuMemAllocator.wake_up",
        (
            "if not data.is_asleep:",
            "continue",
            "if tags is None or data.tag in tags",
            "create_and_map(handle)",
            "data.is_asleep = False",
        ),
    ),
    Function("v1/worker/worker_base.py", "WorkerBase.get_supported_kv_cache_layouts", ("self",)),
    Sets("v1/worker/gpu_worker.py", "Worker", "init_snapshot requested_memory model_runner device"),
    Sets("v1/worker/worker_base.py", "WorkerBase", "cache_config compilation_config rank vllm_config"),
    Contains("v1/worker/gpu_worker.py", "Worker.sleep", ("Memory usage increased after sleeping.",)),
    Contains(
        "v1/worker/gpu_worker.py",
        "Worker.determine_available_memory",
        ("if (kv_cache_memory_bytes := self.cache_config.kv_cache_memory_bytes):", "profile_run", "return"),
    ),
    Either(
        "v1/worker/utils.py",
        tuple(
            Contains(
                "v1/worker/utils.py",
                "request_memory",
                (f"cache_config.{utilization}", "init_snapshot.free_memory < requested_memory"),
            )
            for utilization in ("gpu_memory_utilization", "resolved_gpu_memory_utilization")
        ),
    ),
    Where(
        "config/cache.py",
        "CacheConfig.resolved_gpu_memory_utilization",
        (
            Contains(
                "config/cache.py",
                "CacheConfig.resolved_gpu_memory_utilization",
                ("if self.gpu_memory_utilization is not None:", "return self.gpu_memory_utilization"),
            ),
        ),
    ),
    Contains("v1/worker/gpu_worker.py", "Worker.init_device", ("self.requested_memory = request_memory(",)),
    Sets("v1/worker/gpu/model_runner.py", "GPUModelRunner", "model_memory_usage"),
    Function("distributed/kv_transfer/kv_connector/utils.py", "get_current_attn_backends", ("vllm_config",)),
    Function("v1/attention/backend.py", "AttentionBackend.get_supported_kernel_block_sizes", (), "staticmethod"),
    Class("v1/attention/backend.py", "MultipleOf", "base"),
)

_DEMAND: tuple[Expectation, ...] = (
    # Every queue that requests wait in.
    Either(
        "v1/core/sched/scheduler.py",
        tuple(
            Contains(
                "v1/core/sched/scheduler.py",
                "Scheduler.get_request_counts",
                (f"return (len(self.running), {num_waiting})",),
            )
            for num_waiting in (
                "len(self.waiting) + len(self.kv_holding_waiting) + len(self.async_kv_waiting)",
                "len(self.waiting) + len(self.kv_holding_waiting)",
                "len(self.waiting) + len(self.skipped_waiting)",
            )
        ),
    ),
    # What a pause holds back, and that a session which waits for its user's input is no work.
    Contains(
        "v1/core/sched/scheduler.py",
        "Scheduler.get_num_unfinished_requests",
        ("PauseState.PAUSED_ALL", "return 0", "PauseState.PAUSED_NEW", "self.num_waiting_for_streaming_input"),
    ),
    Function("v1/core/sched/scheduler.py", "Scheduler.pause_state", ("self",), "property"),
    Sets("v1/core/sched/scheduler.py", "Scheduler", "num_waiting_for_streaming_input"),
    Contains(
        "v1/core/sched/scheduler.py",
        "Scheduler.schedule",
        ("num_running = len(self.running) + self.num_waiting_for_streaming_input",),
    ),
    Either(
        "v1/core/sched/scheduler.py",
        tuple(
            Contains("v1/core/sched/scheduler.py", "Scheduler.schedule", (f"num_running >= self.{most}",))
            for most in ("max_num_active_reqs", "max_num_running_reqs")
        ),
    ),
    Class("v1/request.py", "RequestStatus", "WAITING PREEMPTED"),
    Sets("v1/request.py", "Request", "num_computed_tokens status"),
    Class("v1/core/sched/request_queue.py", "RequestQueue", "__bool__ __iter__ __len__"),
    # How large requests are.
    Class("config/vllm.py", "VllmConfig", "max_in_flight_tokens"),
    Class("config/parallel.py", "ParallelConfig", "decode_context_parallel_size"),
    Class("config/scheduler.py", "SchedulerConfig", "max_num_encoder_input_tokens"),
    Function(
        "v1/kv_cache_interface.py",
        "SlidingWindowSpec.max_admission_blocks_per_request",
        ("self", "max_in_flight_tokens", "max_model_len"),
    ),
    Function(
        "v1/kv_cache_interface.py",
        "ChunkedLocalAttentionSpec.max_admission_blocks_per_request",
        ("self", "max_in_flight_tokens", "max_model_len"),
    ),
    Class(
        "v1/kv_cache_interface.py",
        "MambaSpec",
        "mamba_cache_mode num_prefill_checkpoint_blocks num_speculative_blocks",
    ),
    Contains(
        "v1/kv_cache_interface.py",
        "MambaSpec.max_memory_usage_bytes",
        ("'align'", "2 + self.num_speculative_blocks + self.num_prefill_checkpoint_blocks"),
    ),
    Contains(
        "v1/kv_cache_interface.py",
        "CrossAttentionSpec.max_memory_usage_bytes",
        ("cdiv(max_encoder_len, self.block_size)",),
    ),
    Contains("v1/kv_cache_interface.py", "CircularBufferSpec.max_memory_usage_bytes", ("return self.page_size_bytes",)),
    Class("v1/kv_cache_interface.py", "UniformTypeKVCacheSpecs", "kv_cache_specs"),
)

EXPECTATIONS = (
    _PLUGINS + _PLATFORMS + _CONFIGURATION + _FREE_QUEUE + _BLOCK_POOL + _SCHEDULER + _DEMAND + _KV_CACHE + _WORKER
)
"""Everything, from the plugin's entry points to its workers."""
