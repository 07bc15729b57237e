"""What the SGLang plugin relies on, read in the sources of every release that it supports, without importing them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from kvcached_sglang.hooks import HOOKS, Hook
from kvcached_sglang.placement import ENTRY_ALIGN_BYTES, ROW_ALIGN_BYTES
from kvcached_sglang.refusals import BALANCE_CHECK, REFUSALS
from kvcached_sglang.releases import STRIDED_BACKENDS, TESTED_RELEASES

Root = Callable[[str], Path]

ATTRIBUTES = {
    "configs/model_config.py:ModelConfig": ("full_attention_layer_ids", "hf_config"),
    "managers/scheduler.py:Scheduler": (
        "attn_tp_cpu_group",
        "chunked_prefill_size",
        "chunked_req",
        "device",
        "forward_stream",
        "is_hybrid_ssm",
        "is_hybrid_swa",
        "max_prefill_tokens",
        "max_running_requests",
        "max_total_num_tokens",
        "page_size",
        "running_batch",
        "schedule_stream",
        "server_args",
        "tp_cpu_group",
        "tree_cache",
        "waiting_queue",
    ),
    "managers/io_struct.py:AbortReq": ("abort_all", "finished_reason"),
    "managers/io_struct.py:BaseReq": ("rid",),
    "managers/schedule_batch.py:Req": ("beam_group", "kv", "origin_input_ids", "output_ids", "rid", "sampling_params"),
    "managers/schedule_batch.py:ReqKvInfo": ("kv_allocated_len",),
    "managers/schedule_batch.py:ScheduleBatch": ("batch_is_full", "reqs"),
    "mem_cache/allocator/base.py:BaseTokenToKVPoolAllocator": (
        "device",
        "dtype",
        "free_pages",
        "need_sort",
        "page_size",
        "size",
    ),
    "mem_cache/allocator/swa.py:SWATokenToKVPoolAllocator": ("full_attn_allocator", "swa_attn_allocator"),
    "mem_cache/memory_pool.py:KVCache": ("layer_num", "page_size", "size", "store_dtype"),
    "mem_cache/memory_pool.py:MHATokenToKVPool": ("k_buffer", "v_buffer"),
    "mem_cache/memory_pool.py:MLATokenToKVPool": ("kv_buffer",),
    "mem_cache/memory_pool.py:HybridLinearKVPool": ("full_kv_pool",),
    "mem_cache/swa_memory_pool.py:SWAKVPool": ("full_kv_pool", "swa_kv_pool"),
    "model_executor/model_runner.py:ModelRunner": ("device", "gpu_id", "is_draft_worker", "server_args"),
}
"""What handlers read of SGLang's objects."""

CONFIGURATOR_FIELDS = (
    "device",
    "gpu_id",
    "is_hybrid_swa",
    "kv_cache_dtype",
    "kv_cache_dtype_str",
    "mambaish_config",
    "model_config",
    "post_capture_kv_active",
    "server_args",
    "sliding_window_size",
    "use_mla_backend",
)

METHODS = {
    "managers/scheduler.py:Scheduler": {"abort_request": ("self", "recv_req")},
    "mem_cache/allocator/token.py:TokenToKVPoolAllocator": {
        "__init__": ("self", "size", "dtype", "device", "kvcache", "need_sort"),
        "alloc": ("self", "need_size"),
        "available_size": ("self",),
        "clear": ("self",),
    },
    "mem_cache/allocator/paged.py:PagedTokenToKVPoolAllocator": {
        "__init__": ("self", "size", "page_size", "dtype", "device", "kvcache", "need_sort"),
        "alloc": ("self", "need_size"),
        "alloc_decode": ("self", "seq_lens", "seq_lens_cpu", "last_loc"),
        "available_size": ("self",),
        "clear": ("self",),
    },
    "mem_cache/base_prefix_cache.py:BasePrefixCache": {
        "evict": ("self", "params"),
        "evictable_size": ("self",),
        "full_evictable_size": ("self",),
        "swa_evictable_size": ("self",),
    },
}
EXTEND = ("self", "prefix_lens", "prefix_lens_cpu", "seq_lens", "seq_lens_cpu", "last_loc", "extend_num_tokens")
SWA = ("self", "size", "size_swa", "page_size", "dtype", "device", "kvcache", "need_sort")

FUNCTIONS = {
    "beam_search/batch_tail.py": {"num_beam_member_rows": ("reqs",)},
    "mem_cache/allocation_sizing.py": {"get_alloc_reserve_per_decode": ()},
    "runtime_context.py": {"get_schedule": ()},
}
"""Functions of SGLang that are called."""

PREDICATES = ("is_deepseek_dsa", "is_deepseek_v4", "is_float4_e2m1fn_x2", "is_minimax_sparse")
"""Names that ``refusals.py`` takes from SGLang's configurator module."""


_ROCM = "ROCm alone"
KV_IN_MODELS = {
    "deepseek_common/attention_forward_methods/forward_mha.py": "indexes rows; its other use is for sparse attention",
    "deepseek_common/attention_forward_methods/forward_mha_rocm.py": _ROCM,
    "deepseek_common/attention_forward_methods/forward_mla_fused_rope_rocm.py": _ROCM,
    "deepseek_common/attention_forward_methods/forward_mla_rocm.py": _ROCM,
    "dots3_common/modeling.py": "indexes rows",
    "dspark.py": "speculative decoding, refused",
    "inkling_common/attn.py": "steps by stride(0)",
    "mindspore.py": "another framework",
    "minimax_m3.py": "a pool of its own, refused",
    "muse_spark.py": "takes them as contiguous, refused",
    "qwen3.py": "ROCm alone: `aiter`",
    "utils.py": "hands a view of rows to a kernel that takes its stride",
}
"""Files of SGLang's models that take KV buffers from the pool, and why token-major ones are no harm there."""


@pytest.fixture(params=TESTED_RELEASES)
def srt(request: pytest.FixtureRequest, engine_root: Root) -> Path:
    """``sglang/srt`` of one release."""
    return engine_root(f"sglang-{request.param}") / "sglang" / "srt"


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def class_of(srt: Path, where: str) -> ast.ClassDef:
    file, name = where.split(":")
    return next(node for node in parse(srt / file).body if isinstance(node, ast.ClassDef) and node.name == name)


def functions(body: list[ast.stmt]) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def parameters(function: ast.FunctionDef) -> tuple[str, ...]:
    names = [argument.arg for argument in function.args.posonlyargs + function.args.args]
    if function.args.kwonlyargs:
        names += ["*", *(argument.arg for argument in function.args.kwonlyargs)]
    return tuple(names)


def assigned(node: ast.AST) -> Iterator[str]:
    """Attributes of ``self`` that are assigned to, and fields that are annotated."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            yield each.attr
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id


def find(srt: Path, hook: Hook) -> ast.FunctionDef:
    file = srt / (hook.module.replace(".", "/") + ".py")
    owner, _, name = hook.name.rpartition(".")
    if owner:
        return functions(class_of(srt, f"{file.relative_to(srt)}:{owner}").body)[name]
    return functions(parse(file).body)[name]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_every_hook_has_its_target(srt: Path, hook: Hook):
    assert parameters(find(srt, hook)) == hook.parameters


def test_the_registry_wraps_and_does_not_raise(srt: Path):
    """Why the plugin verifies before and after: an error while applying a hook is only logged."""
    registry = parse(srt / "plugins/hook_registry.py")
    [apply] = [node for node in ast.walk(registry) if isinstance(node, ast.FunctionDef) and node.name == "apply_hooks"]
    assert any(isinstance(node, ast.ExceptHandler) for node in ast.walk(apply))
    source = ast.unparse(registry)
    assert "functools.wraps(original_fn)" in source
    assert {"BEFORE", "AFTER", "AROUND"} <= set(ast.unparse(class_of(srt, "plugins/hook_registry.py:HookType")).split())
    assert "except Exception" in (srt / "plugins/__init__.py").read_text()  # SystemExit passes


def test_the_entry_point_group_is_still_called_so(srt: Path):
    assert 'GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"' in (srt / "plugins/__init__.py").read_text()


def test_plugins_load_before_anything_else_in_a_scheduler(srt: Path):
    run = functions(parse(srt / "managers/scheduler.py").body)["run_scheduler_process"]
    first = next(node for node in run.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)))
    assert ast.unparse(first) == "load_plugins()"


@pytest.mark.parametrize("where", ATTRIBUTES)
def test_attributes_that_are_read_exist(srt: Path, where: str):
    missing = set(ATTRIBUTES[where]) - set(assigned(class_of(srt, where)))
    # A mixin or a helper may set some: those are found anywhere in the file.
    missing -= set(assigned(parse(srt / where.split(":")[0])))
    assert not missing


def test_the_configurator_has_its_fields(srt: Path):
    fields = set(assigned(class_of(srt, "mem_cache/kv_cache_configurator.py:KVCacheConfigurator")))
    assert set(CONFIGURATOR_FIELDS) <= fields


@pytest.mark.parametrize("name", PREDICATES)
def test_the_configurator_module_knows_the_models(srt: Path, name: str):
    module = parse(srt / "mem_cache/kv_cache_configurator.py")
    imported = {
        alias.asname or alias.name
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert name in imported


@pytest.mark.parametrize("where", METHODS)
def test_methods_that_are_overridden_or_called(srt: Path, where: str):
    found = functions(class_of(srt, where).body)
    base = functions(class_of(srt, "mem_cache/allocator/base.py:BaseTokenToKVPoolAllocator").body)
    for name, expected in METHODS[where].items():
        assert parameters(found.get(name, base.get(name))) == expected


@pytest.mark.parametrize("where", FUNCTIONS)
def test_functions_that_are_called(srt: Path, where: str):
    found = functions(parse(srt / where).body)
    for name, expected in FUNCTIONS[where].items():
        assert parameters(found[name]) == expected


def test_a_server_over_several_devices_need_not_find_them_equally_free(srt: Path):
    assert BALANCE_CHECK in (srt / "environ.py").read_text()
    assert f"if envs.{BALANCE_CHECK}.get():" in (srt / "distributed/bootstrap.py").read_text()


def test_extending_and_sliding_window(srt: Path):
    paged = functions(class_of(srt, "mem_cache/allocator/paged.py:PagedTokenToKVPoolAllocator").body)
    assert parameters(paged["alloc_extend"])[: len(EXTEND)] == EXTEND
    swa = functions(class_of(srt, "mem_cache/allocator/swa.py:SWATokenToKVPoolAllocator").body)
    assert parameters(swa["__init__"])[: len(SWA)] == SWA
    assert {"size_full", "size_swa"} <= set(swa)


def test_pools_ask_for_their_tensors_as_the_plugin_answers_them(srt: Path):
    """``torch.zeros(shape, dtype=self.store_dtype, device=self.device)`` and nothing else makes a KV buffer."""
    for hook in HOOKS[1:3]:
        calls = [node for node in ast.walk(find(srt, hook)) if isinstance(node, ast.Call)]
        zeros = [call for call in calls if ast.unparse(call.func) == "torch.zeros"]
        assert zeros
        for call in zeros:
            assert len(call.args) == 1
            assert {k.arg: ast.unparse(k.value) for k in call.keywords} == {
                "dtype": "self.store_dtype",
                "device": "self.device",
            }
        made = {ast.unparse(call.func) for call in calls if ast.unparse(call.func).startswith("torch.")}
        assert made <= {"torch.zeros", "torch.cuda.use_mem_pool"}


def test_server_arguments_that_are_refused_exist(srt: Path):
    declared = set()
    for file in [srt / "server_args.py", *sorted((srt / "arg_groups").rglob("*.py"))]:
        declared |= set(assigned(parse(file)))
    since_0_5_22 = {"enable_kv_cache_sharding", "enable_unified_cache_external_linker"}
    names = {refusal.argument for refusal in REFUSALS} | {
        "enable_dp_attention",
        "enable_priority_scheduling",
        "max_mamba_cache_size",
        "mem_fraction_static",
        "model_path",
        "schedule_policy",
        "served_model_name",
        "sleep_on_idle",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "speculative_num_steps",
        "tp_size",
    }
    assert names - declared <= since_0_5_22


def test_the_leak_check_takes_what_is_available_from_the_stats(srt: Path):
    checker = "managers/scheduler_components/invariant_checker.py:SchedulerInvariantChecker"
    found = functions(class_of(srt, checker).body)
    assert "ps.full_available_size" in ast.unparse(found["_check_full_pool"])
    assert "ps.swa_available_size" in ast.unparse(found["_check_swa_pool"])


def test_stats_have_the_figures_that_are_made_true(srt: Path):
    fields = set(assigned(class_of(srt, "managers/scheduler_components/pool_stats_observer.py:PoolStats")))
    for pool in ("full", "swa"):
        assert {f"{pool}_{name}" for name in ("num_used", "token_usage", "available_size", "evictable_size")} <= fields


# Token-major KV caches


@pytest.fixture(params=STRIDED_BACKENDS)
def strided(request: pytest.FixtureRequest, engine_root: Root) -> tuple[str, Path]:
    """A release that can have token-major KV caches, and its ``sglang/srt``."""
    return request.param, engine_root(f"sglang-{request.param}") / "sglang" / "srt"


def constants(module: ast.Module) -> dict[str, ast.expr]:
    return {
        node.targets[0].id: node.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def strings(value: ast.expr, names: dict[str, ast.expr]) -> set[str]:
    """All in a literal, or in the constant that is named."""
    found = [names[node.id] if isinstance(node, ast.Name) and node.id in names else node for node in ast.walk(value)]
    return {node.value for each in found for node in ast.walk(each) if isinstance(node, ast.Constant)}


def test_a_release_has_token_major_pools_of_its_own_or_is_not_known_to_read_them(srt: Path):
    has_own = (srt / "mem_cache/layout/token_major.py").exists()
    assert has_own == (srt.parent.parent.name.removeprefix("sglang-") in STRIDED_BACKENDS)


def test_rows_and_entries_are_aligned_as_sglangs_own(strided: tuple[str, Path]):
    found = constants(parse(strided[1] / "mem_cache/layout/token_major.py"))
    assert ast.literal_eval(found["ROW_ALIGN_BYTES"]) == ROW_ALIGN_BYTES
    assert ast.literal_eval(found["ENTRY_ALIGN_BYTES"]) == ENTRY_ALIGN_BYTES


def test_the_backends_that_read_by_the_stride_are_those_that_sglang_allows_itself(strided: tuple[str, Path]):
    release, srt = strided
    hook = parse(srt / "arg_groups/kv_cache_hook.py")
    gate = functions(hook.body)["handle_page_major_kv_layout"]
    sets = [
        strings(node.value, constants(hook))
        for node in ast.walk(gate)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "allowed_full"
    ]
    ours = STRIDED_BACKENDS[release]
    if len(sets) == 3:
        assert sorted(map(sorted, sets)) == sorted(map(sorted, (ours.mla, ours.mha, ours.unequal)))
    else:  # 0.5.22 refuses K and V rows of different width before it looks at the backend
        assert sorted(map(sorted, sets)) == sorted(map(sorted, (ours.mla, ours.mha)))
        assert ours.unequal == frozenset()
        assert "unified_memory_supported_for_model" in ast.unparse(gate)


def test_sglangs_own_token_major_pools_read_and_write_with_the_methods_of_the_ordinary_ones(
    strided: tuple[str, Path],
):
    """So those take rows that are apart; what is overridden instead is in the table of refusals."""
    _, srt = strided
    unified = "mem_cache/unified_memory_pool.py"
    for pool in ("MHATokenToKVPool", "MLATokenToKVPool"):
        own = class_of(srt, f"{unified}:Unified{pool}")
        assert [ast.unparse(base) for base in own.bases] == [pool]
        assert (
            set(functions(own.body))
            & {
                "get_key_buffer",
                "get_value_buffer",
                "get_kv_buffer",
                "set_kv_buffer",
                "set_mla_kv_buffer",
                "get_mla_kv_buffer",
            }
            == set()
        )


def test_what_needs_contiguous_buffers_is_on_with_speculative_decoding_alone(strided: tuple[str, Path]):
    """``_init_kv_copy_and_warmup`` asserts them."""
    configurator = parse(strided[1] / "mem_cache/kv_cache_configurator.py")
    values = {
        ast.unparse(keyword.value)
        for node in ast.walk(configurator)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "enable_kv_cache_copy"
    }
    assert values == {"get_spec().speculative_algorithm is not None"}


def test_what_decides_on_token_major_is_there(strided: tuple[str, Path]):
    _, srt = strided
    context = functions(parse(srt / "runtime_context.py").body)
    assert parameters(context["attention_backends"]) == ()
    assert parameters(context["get_spec"]) == ()
    assert "SGLANG_USE_HND_KVCACHE = EnvBool(False)" in (srt / "environ.py").read_text()
    assert "is_cpu" in functions(parse(srt / "utils/common.py").body)
    model = class_of(srt, "configs/model_config.py:ModelConfig")
    assert "has_asymmetric_kv" in functions(model.body)
    widths = {"head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim", "kv_lora_rank", "qk_rope_head_dim"}
    assert widths <= set(assigned(model))


def test_models_that_write_rows_themselves_ask_for_their_stride_or_are_refused(strided: tuple[str, Path]):
    """Every file of a model that takes a KV buffer from the pool. One more is to be read before it is added."""
    _, srt = strided
    found = {
        path.relative_to(srt / "models").as_posix()
        for path in (srt / "models").rglob("*.py")
        if any(name in path.read_text() for name in (".get_key_buffer(", ".get_kv_buffer(", ".get_value_buffer("))
    }
    assert found - KV_IN_MODELS.keys() == set()


def test_a_request_can_be_refused_in_words(srt: Path):
    assert "set_finish_with_abort" in functions(class_of(srt, "managers/schedule_batch.py:Req").body)


def test_a_request_that_waits_can_be_ended_with_a_reason(srt: Path):
    """It is taken from the queue, and what it said of its end is passed on."""
    abort = ast.unparse(functions(class_of(srt, "managers/scheduler.py:Scheduler").body)["abort_request"])
    assert "self.waiting_queue.pop(i)" in abort
    assert "_make_abort_req(req, finished_reason=recv_req.finished_reason)" in abort
