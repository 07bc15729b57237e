"""What a user sees where kvcached is on, cannot be on, or is asked for in a way that cannot be meant.

Each case is a process of its own with vLLM in it, since vLLM decides once per process. They are started two at a time
before the first test and looked at one by one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import vllm
from kvcached_vllm import plugin

from tests.vllm.engine import QUIET, prompts

CPU_WORKER = "kvcached_vllm.worker_cpu.ElasticCpuWorker"
STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
SCHEDULER = "kvcached_vllm.scheduler.ElasticScheduler"
OFF = "is OFF, vLLM runs natively: "

ON = {"ENABLE_KVCACHED": "1"}
STRICT = {**ON, "KVCACHED_STRICT": "1"}


@dataclass(frozen=True)
class Done:
    """A process that has ended: its code, everything it printed, and its last line as JSON if it is that."""

    code: int
    text: str
    found: dict[str, Any]

    @property
    def errors(self) -> list[str]:
        """Our ERROR lines, without what the log puts before them."""
        return [line.partition("kvcached ")[2] for line in self.text.splitlines() if "ERROR" in line and OFF in line]


@dataclass(frozen=True)
class Places:
    """Folders that the cases need."""

    model: Path
    runtime_dir: Path
    newer_vllm: Path
    other_platform: Path
    damaged: Path


FOREIGN_WORKER = {"worker_cls": "vllm.v1.worker.gpu_worker.Worker"}
FOREIGN_SCHEDULER = {"scheduler_cls": "vllm.v1.core.sched.async_scheduler.AsyncScheduler"}
CONNECTOR = {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}
LAUNCHER = {"distributed_executor_backend": "external_launcher"}
OFFLOADING = {"kv_offloading_size": 4.0}
REFUSED = [FOREIGN_WORKER, FOREIGN_SCHEDULER, CONNECTOR, LAUNCHER, OFFLOADING]


_NO_ROOM = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
"""What a full file system is to a ledger: it takes 135 KiB at once, and may have 64."""


def _cases(places: Places) -> dict[str, tuple[list[str], dict[str, str]]]:
    model = {"model": str(places.model), "max_model_len": 512}

    def probe(*flags: Mapping[str, Any]) -> list[str]:
        return ["-m", "tests.vllm.probe", json.dumps([{**model, **each} for each in flags])]

    generate = {"prompt_token_ids": prompts(1, 40, seed=1)[0]}
    engine = [
        "-c",
        "import json, vllm\n"
        f"llm = vllm.LLM({str(places.model)!r}, dtype='float32', block_size=32, enforce_eager=True, max_model_len=512,"
        " kv_cache_memory_bytes=1 << 25, skip_tokenizer_init=True)\n"
        f"[output] = llm.generate({generate!r}, vllm.SamplingParams(max_tokens=4, detokenize=False), use_tqdm=False)\n"
        "print(json.dumps({'tokens': len(output.outputs[0].token_ids)}))",
    ]
    newer = {"PYTHONPATH": os.pathsep.join([str(places.newer_vllm), os.environ["PYTHONPATH"]])}
    other = {"PYTHONPATH": os.pathsep.join([str(places.other_platform), os.environ["PYTHONPATH"]])}
    return {
        "on": (probe({}, {"kv_cache_memory_bytes": 1 << 25}), STRICT),
        "not asked for": (probe({}), {}),
        "left out of VLLM_PLUGINS": (probe({}), {**STRICT, "VLLM_PLUGINS": "lora_filesystem_resolver"}),
        "target device set": (probe({}), {**STRICT, "VLLM_TARGET_DEVICE": "cpu"}),
        "refused": (probe(*REFUSED), ON),
        "refused, strict": (probe(*REFUSED[:3]), STRICT),
        "newer release": (engine, {**ON, **newer}),
        "newer release, strict": (probe({}), {**STRICT, **newer}),
        "newer release, to be tried": (probe({}), {**STRICT, **newer, "KVCACHED_ALLOW_UNTESTED": "1"}),
        "another platform": (probe({}), {**STRICT, **other}),
        "unknown name": (probe({}), {**ON, "KVCACHED_CIELING": "12GiB"}),
        "damaged ledger": (engine, {**ON, "KVCACHED_RUNTIME_DIR": str(places.damaged)}),
        "no room for the ledger": (["-c", _NO_ROOM + engine[1]], ON),
        "no place for the ledger": (engine, {**ON, "KVCACHED_RUNTIME_DIR": "/dev/null/kvcached"}),
        "ceiling below one extent": (engine, {**ON, "KVCACHED_CEILING": "100KiB"}),
    }


@pytest.fixture(scope="module")
def cases(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, module_runtime_dir: Path
) -> Iterator[dict[str, Future[Done]]]:
    folder = tmp_path_factory.mktemp("plugin")
    damaged = module_runtime_dir / "damaged"
    damaged.mkdir(mode=0o700)
    (damaged / "host.ledger").write_bytes(b"not a ledger" * 1000)
    places = Places(tiny_llama, module_runtime_dir, _newer_vllm(folder), _other_platform(folder), damaged)
    base = {name: value for name, value in os.environ.items() if not name.startswith(("KVCACHED", "ENABLE_KVCACHED"))}
    base |= QUIET | {"KVCACHED_RUNTIME_DIR": str(module_runtime_dir)}
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(_run, words, {**base, **environ}) for name, (words, environ) in _cases(places).items()}


def _run(words: list[str], environ: Mapping[str, str]) -> Done:
    done = subprocess.run(
        [sys.executable, *words],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    last = next((line for line in reversed(done.stdout.splitlines()) if line.startswith("{")), "{}")
    return Done(done.returncode, done.stdout, json.loads(last))


def _newer_vllm(folder: Path) -> Path:
    """The installed vLLM under a release number that nobody has tested: every file is the original's but one."""
    original, made = Path(vllm.__file__).parent, folder / "newer" / "vllm"
    made.mkdir(parents=True)
    for entry in original.iterdir():
        if entry.name not in ("_version.py", "__pycache__"):
            (made / entry.name).symlink_to(entry)
    (made / "_version.py").write_text(
        "__version__ = version = '0.99.0'\n__version_tuple__ = version_tuple = (0, 99, 0)\n"
    )
    return made.parent


def _other_platform(folder: Path) -> Path:
    """Another distribution with a platform plugin, which wants to be used."""
    made = folder / "other"
    metadata = made / "other_platform-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-platform\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[vllm.platform_plugins]\nother = other_platform:platform\n")
    (made / "other_platform.py").write_text("def platform():\n    return 'vllm.platforms.cpu.CpuPlatform'\n")
    return made


def test_where_it_is_on_the_configuration_names_our_classes_and_all_else_is_vllms(
    cases: dict[str, Future[Done]],
) -> None:
    done = cases["on"].result()
    assert done.code == 0, done.text
    assert done.found["platform"] == "ElasticCpuPlatform"
    assert (done.found["is_cpu"], done.found["is_out_of_tree"]) == (True, False)
    unasked, asked = done.found["configs"]
    assert (unasked["worker"], unasked["scheduler"]) == (CPU_WORKER, SCHEDULER)
    assert unasked["capacity"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert asked["capacity"] == 1 << 25
    assert done.errors == []


def test_where_it_is_not_asked_for_nothing_is_different_and_nothing_is_said(cases: dict[str, Future[Done]]) -> None:
    done = cases["not asked for"].result()
    assert done.found["platform"] == "CpuPlatform"
    assert done.found["configs"][0]["worker"] == STOCK_WORKER
    assert "kvcached 0" not in done.text


def test_a_list_of_plugins_without_ours_is_vllms_to_keep(cases: dict[str, Future[Done]]) -> None:
    """No code of ours runs, so only the missing start-up line and `kvcached doctor` tell."""
    done = cases["left out of VLLM_PLUGINS"].result()
    assert (done.code, done.found["platform"]) == (0, "CpuPlatform")
    assert "kvcached 0" not in done.text


def test_a_target_device_that_hides_platform_plugins_is_said_once_and_ends_strict_mode(
    cases: dict[str, Future[Done]],
) -> None:
    done = cases["target device set"].result()
    assert (done.code, done.found) == (1, {})
    [error] = done.errors
    assert "vLLM chose CpuPlatform instead of kvcached's platform" in error
    assert "VLLM_TARGET_DEVICE must be unset" in error


def test_what_cannot_be_elastic_is_refused_with_the_value_and_runs_natively(cases: dict[str, Future[Done]]) -> None:
    done = cases["refused"].result()
    assert done.code == 0, done.text
    worker, scheduler, connector, launcher, offloading = done.found["configs"]
    assert worker["worker"] == FOREIGN_WORKER["worker_cls"]
    assert scheduler["scheduler"] == FOREIGN_SCHEDULER["scheduler_cls"]
    assert connector["worker"] == launcher["worker"] == offloading["worker"] == STOCK_WORKER
    for reason in (
        "The worker class 'vllm.v1.worker.gpu_worker.Worker' is not vLLM's own: leave --worker-cls out.",
        "The scheduler class 'vllm.v1.core.sched.async_scheduler.AsyncScheduler' is not vLLM's own",
        "The KV connector 'ExampleConnector' has not been tested with elastic memory (tested: none yet)",
        "The external launcher has no scheduler beside its workers: use the mp executor.",
        "Offloading 4 GiB of KV to the host is a KV connector, and none has been tested with elastic memory",
    ):
        assert sum(reason in error for error in done.errors) == 1, done.text
    strict = cases["refused, strict"].result()
    assert strict.found["configs"] == [{"exit": 1}] * 3


def test_an_unknown_release_runs_natively_with_one_line_and_strict_mode_ends(cases: dict[str, Future[Done]]) -> None:
    done = cases["newer release"].result()
    assert done.code == 0, done.text
    assert done.found["tokens"] == 4
    [error] = done.errors
    assert "vLLM 0.99.0 has not been tested with this kvcached, which knows 0.30.0 to 0.34.0" in error
    assert "KVCACHED_ALLOW_UNTESTED=1" in error
    strict = cases["newer release, strict"].result()
    assert (strict.code, strict.found) == (1, {})
    assert len(strict.errors) == 1


def test_an_unknown_release_may_be_tried(cases: dict[str, Future[Done]]) -> None:
    done = cases["newer release, to be tried"].result()
    assert done.code == 0, done.text
    assert done.found["platform"] == "ElasticCpuPlatform"
    assert "has not been tested with vLLM 0.99.0" in done.text


def test_another_platform_plugin_is_an_error_that_names_both(cases: dict[str, Future[Done]]) -> None:
    done = cases["another platform"].result()
    assert done.code != 0
    assert "Only one platform plugin can be activated" in done.text
    assert "'kvcached'" in done.text
    assert "'other'" in done.text


def test_a_setting_that_does_not_exist_ends_it_with_one_line(cases: dict[str, Future[Done]]) -> None:
    done = cases["unknown name"].result()
    assert (done.code, done.found) == (2, {})
    assert done.text.count("KVCACHED_CIELING is not a setting. Did you mean KVCACHED_CEILING?") == 1
    assert "Traceback" not in done.text


@pytest.mark.parametrize("entry_point", [plugin.platform, plugin.general])
def test_a_value_that_cannot_be_meant_ends_the_process_wherever_it_is_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, entry_point: Callable[[], object]
) -> None:
    monkeypatch.setenv("KVCACHED_CEILING", "12G")
    with pytest.raises(SystemExit) as end:
        entry_point()
    assert end.value.code == 2
    assert "KVCACHED_CEILING='12G' is refused. Accepted: " in caplog.text


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("damaged ledger", "host.ledger is not a ledger: it begins with b'not a le'"),
        ("no room for the ledger", "host.ledger cannot be opened: File too large"),
        ("no place for the ledger", "/dev/null/kvcached"),
        ("ceiling below one extent", "KVCACHED_CEILING is 100.00 KiB, and this model's KV cache grows in extents of "),
    ],
)
def test_an_engine_that_cannot_have_its_memory_ends_and_says_why(
    cases: dict[str, Future[Done]], module_runtime_dir: Path, case: str, message: str
) -> None:
    done = cases[case].result()
    assert done.code != 0
    assert message in done.text, done.text[-3000:]
    assert not list((module_runtime_dir / "orders").glob("*"))
