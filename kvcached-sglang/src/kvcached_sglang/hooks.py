"""What the plugin hooks in SGLang and what else of it the plugin relies on, as data; and whether it is there.

SGLang loads plugins leniently: an error while registering or applying a hook is logged, and the engine goes on
without it. A half-hooked engine would be worse than none, so every target is looked up and its parameters are
compared *before* anything is registered (all or nothing), and *after* that each hook must be found in place at the
first tick.

Source: ``sglang/srt/plugins/hook_registry.py``, the same code from 0.5.20 to 0.5.23.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from kvcached_core.errors import UnsupportedError


@dataclass(frozen=True)
class Hook:
    """One function of SGLang that the plugin wraps.

    Attributes:
        module: Of the target, below ``sglang.srt``.
        name: ``function`` or ``Class.method``.
        parameters: Names, in order; ``*`` before those that are keyword-only.
        kind: How: a member of SGLang's ``HookType``, in its own spelling.
        handler: The method of ``plugin.Plugin`` that is registered.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    kind: str
    handler: str

    @property
    def target(self) -> str:
        """The target as ``HookRegistry.register`` wants it."""
        return f"sglang.srt.{self.module}.{self.name}"


HOOKS = (
    Hook("model_executor.model_runner", "ModelRunner.load_model", ("self",), "BEFORE", "load_model"),
    Hook("mem_cache.memory_pool", "MHATokenToKVPool._create_buffers_normal", ("self",), "AROUND", "create_mha_buffers"),
    Hook("mem_cache.memory_pool", "MLATokenToKVPool._create_buffers", ("self",), "AROUND", "create_mla_buffers"),
    Hook(
        "mem_cache.kv_cache_configurator",
        "KVCacheConfigurator._profile_available_bytes",
        ("self", "pre_model_load_memory"),
        "AROUND",
        "profile_available_bytes",
    ),
    Hook(
        "utils.common",
        "get_available_gpu_memory",
        ("device", "gpu_id", "distributed", "empty_cache", "cpu_group"),
        "AROUND",
        "get_available_memory",
    ),
    Hook(
        "mem_cache.kv_cache_configurator",
        "KVCacheConfigurator._build_token_to_kv_pool_allocator",
        (
            "self",
            "*",
            "sizes",
            "token_to_kv_pool",
            "is_dsv4_model",
            "req_to_token_pool",
            "token_to_kv_pool_allocator",
        ),
        "AROUND",
        "build_allocator",
    ),
    Hook(
        "managers.scheduler",
        "Scheduler.get_next_batch_to_run",
        ("self", "running_batch", "last_batch"),
        "BEFORE",
        "before_batch",
    ),
    Hook("managers.scheduler", "Scheduler.init_req_max_new_tokens", ("self", "req"), "AFTER", "limit_request"),
    Hook(
        "managers.scheduler_components.pool_stats_observer",
        "SchedulerPoolStatsObserver.get_pool_stats",
        ("self",),
        "AFTER",
        "pool_stats",
    ),
    Hook(
        "managers.scheduler_components.invariant_checker",
        "SchedulerInvariantChecker._check_full_pool",
        ("self", "ps", "uncached"),
        "AROUND",
        "check_full_pool",
    ),
    Hook(
        "managers.scheduler_components.invariant_checker",
        "SchedulerInvariantChecker._check_swa_pool",
        ("self", "ps", "uncached"),
        "AROUND",
        "check_swa_pool",
    ),
)
"""Every function of SGLang that is wrapped."""


def verify(hooks: Iterable[Hook] = HOOKS, resolve: Callable[[str], ModuleType] = importlib.import_module) -> None:
    """Check that every target exists with the parameters that the handlers are written for.

    Raises:
        UnsupportedError: Naming all that do not, each with what was expected and what was found.
    """
    problems = [problem for hook in hooks if (problem := _problem(hook, resolve))]
    if problems:
        raise UnsupportedError(
            "this SGLang is not what kvcached is written for: " + "; ".join(problems) + ". Nothing was hooked."
        )


def missing(hooks: Iterable[Hook] = HOOKS) -> list[str]:
    """Targets that no hook is in place of; SGLang's registry logs a failure to apply one and goes on.

    SGLang wraps with ``functools.wraps``, so a hooked function has ``__wrapped__``.
    """
    return [hook.target for hook in hooks if not hasattr(_find(hook, importlib.import_module), "__wrapped__")]


_PREFIXES: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's parameters in the notation of `Hook.parameters`."""
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(_PREFIXES.get(parameter.kind, "") + parameter.name)
    return tuple(names)


def _find(hook: Hook, resolve: Callable[[str], ModuleType]) -> Any:
    found: Any = resolve(f"sglang.srt.{hook.module}")
    for part in hook.name.split("."):
        found = getattr(found, part)
    return found


def _problem(hook: Hook, resolve: Callable[[str], ModuleType]) -> str:
    try:
        found = parameters_of(_find(hook, resolve))
    except (ImportError, AttributeError) as error:
        return f"{hook.target} is gone ({error})"
    if found != hook.parameters:
        return f"{hook.target} takes ({', '.join(found)}), not ({', '.join(hook.parameters)})"
    return ""
