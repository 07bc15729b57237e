"""Registering: all or nothing, in words, and through SGLang's registry alone."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from kvcached_core.errors import UnsupportedError
from kvcached_sglang import hooks, releases
from kvcached_sglang.hooks import HOOKS, Hook
from kvcached_sglang.refusals import REFUSALS, refused_arguments
from kvcached_sglang.sizing import member_name

ROOT = Path(__file__).parents[2]


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process where SGLang's plugins have been loaded, as each of its processes does first."""
    clean = {name: value for name, value in os.environ.items() if "KVCACHED" not in name}
    path = os.pathsep.join([*filter(None, [clean.get("PYTHONPATH")]), str(ROOT / "tests/sglang/stubs")])
    prelude = "import warnings; warnings.simplefilter('ignore')\nfrom sglang.srt.plugins import load_plugins\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + code],
        env=clean | {"PYTHONPATH": path} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


SNAPSHOT = """
import importlib, inspect, sys
from kvcached_sglang.hooks import HOOKS
import sglang.srt.managers.scheduler

def everything():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang.srt") and module is not None:
            for key, value in vars(module).items():
                found[name, key] = value
                if inspect.isclass(value) and value.__module__ == name:
                    for attribute, member in vars(value).items():
                        found[name, f"{key}.{attribute}"] = member
    return found

for hook in HOOKS:
    importlib.import_module(f"sglang.srt.{hook.module}")
before = everything()
originals = {id(before[f"sglang.srt.{hook.module}", hook.name]) for hook in HOOKS}
load_plugins()
after = everything()
registry = "sglang.srt.plugins.hook_registry"
changed = {key for key, value in before.items() if after[key] is not value and key[0] != registry}
stray = {key for key in changed if id(before[key]) not in originals and key[1] not in ("_plugins_loaded",)}
wrapped = {key for key in changed if id(before[key]) in originals}
print(sorted(stray), all(hasattr(after[key], "__wrapped__") for key in wrapped), len(wrapped) >= len(HOOKS))
"""


def test_nothing_of_the_engine_changes_but_what_its_registry_wraps():
    done = in_a_process(SNAPSHOT, ENABLE_KVCACHED="1")
    assert done.stdout.strip().splitlines()[-1] == "[] True True", done.stdout[-2000:] + done.stderr[-2000:]


def test_not_asked_for_nothing_happens():
    code = "load_plugins()\nimport sys; print('kvcached_sglang.handlers' in sys.modules)"
    assert in_a_process(code).stdout.strip().splitlines()[-1] == "False"


def test_a_wrong_setting_ends_the_process_with_the_accepted_form():
    done = in_a_process("load_plugins()", ENABLE_KVCACHED="1", KVCACHED_CEILING="12G")
    assert done.returncode == 1
    assert "KVCACHED_CEILING='12G' is refused" in done.stderr
    unknown = in_a_process("load_plugins()", ENABLE_KVCACHED="1", KVCACHED_CIELING="12GiB")
    assert "Did you mean KVCACHED_CEILING?" in unknown.stderr


def test_devices_of_one_server_may_be_unequally_free_beside_neighbours():
    code = (
        "load_plugins()\nfrom sglang.srt.environ import envs; print(envs.SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK.get())"
    )
    assert in_a_process(code, ENABLE_KVCACHED="1").stdout.strip().splitlines()[-1] == "False"
    asked = in_a_process(code, ENABLE_KVCACHED="1", SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK="1")
    assert asked.stdout.strip().splitlines()[-1] == "True"
    assert in_a_process(code).stdout.strip().splitlines()[-1] == "True"


def test_a_hook_that_sglang_did_not_apply_is_found():
    code = (
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "HookRegistry.apply_hooks = classmethod(lambda cls: None)\n"
        "load_plugins()\n"
        "from kvcached_sglang.handlers import missing_hooks\n"
        "print(missing_hooks())"
    )
    done = in_a_process(code, ENABLE_KVCACHED="1")
    assert (
        "SGLang did not apply the hooks on sglang.srt.model_executor.model_runner.ModelRunner.load_model" in done.stdout
    )


def test_the_installed_release_has_every_target():
    hooks.verify()


def broken(name: str) -> ModuleType:
    module = ModuleType(name)
    module.MHATokenToKVPool = type("MHATokenToKVPool", (), {"_create_buffers_normal": lambda self, extra: None})  # type: ignore[attr-defined]
    return module


def test_what_moved_is_named_and_nothing_is_hooked():
    gone = Hook("nowhere", "Thing.method", ("self",), "BEFORE", "load_model")
    changed = HOOKS[1]

    def resolve(name: str) -> ModuleType:
        return broken(name) if name.endswith("memory_pool") else importlib.import_module(name)

    with pytest.raises(UnsupportedError) as raised:
        hooks.verify([gone, changed], resolve)
    assert "sglang.srt.nowhere.Thing.method is gone" in str(raised.value)
    assert "takes (self, extra), not (self)" in str(raised.value)


def test_releases():
    assert all(releases.judge(version, allow_untested=False) for version in releases.TESTED_RELEASES)
    assert releases.judge("0.5.23.post1", allow_untested=False)
    assert not releases.judge("0.5.24", allow_untested=True)
    for version in ("0.5.24", "0.5.19", "1.0", "main", "0.5.23rc1"):
        with pytest.raises(UnsupportedError, match=r"0\.5\.20 to 0\.5\.23"):
            releases.judge(version, allow_untested=False)
    with pytest.raises(UnsupportedError, match="older"):
        releases.judge("0.5.19", allow_untested=True)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.argument)
def test_each_refused_flag_says_why(refusal):
    good = {each.argument: each.allowed[0] for each in REFUSALS}
    assert refused_arguments(SimpleNamespace(**good)) == []
    [reason] = refused_arguments(SimpleNamespace(**(good | {refusal.argument: "something else"})))
    assert reason == f"{refusal.flag}=something else: {refusal.reason}"


def test_names_for_the_ledger():
    named = SimpleNamespace(served_model_name="Qwen/Qwen3-0.6B", model_path="/models/x")
    assert member_name(named) == "qwen3-0.6b"
    assert member_name(SimpleNamespace(served_model_name=None, model_path="/models/My Model/")) == "my-model"
    assert member_name(SimpleNamespace(served_model_name="///", model_path="")) == "sglang"
