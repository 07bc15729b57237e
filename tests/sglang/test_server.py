"""A stock SGLang server with kvcached on: its own endpoint shows both engines' figures."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.sglang.engine import FLAGS, QUIET, START_SECONDS, prompts
from tests.sglang.pair import settings

PORT = 31977
URL = f"http://127.0.0.1:{PORT}"


def words(flags: dict[str, object]) -> list[str]:
    """Flags as one types them."""
    typed = []
    for name, value in flags.items():
        typed += ["--" + name.replace("_", "-")] + ([] if value is True else [str(value)])
    return typed


def fetch(path: str, body: object = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def wait_until_healthy(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            fetch("/health")
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise AssertionError(f"no answer in {START_SECONDS} s: {log.read_text()[-3000:]}")


@pytest.mark.slow
def test_the_servers_own_endpoint_shows_our_figures(gqa_model: Path, tmp_path: Path, runtime_dir: Path):
    stubs = str(Path(__file__).parent / "stubs")
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), stubs])
    environment = os.environ | QUIET | settings(runtime_dir) | {"ENABLE_KVCACHED": "1", "PYTHONPATH": path}
    flags = FLAGS | {"model_path": gqa_model, "port": PORT, "enable_metrics": True, "skip_server_warmup": True}
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *words(flags)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_healthy(process, log)
        [prompt] = prompts(1, 600, seed=1)
        fetch("/generate", {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 64}})
        time.sleep(2.5)  # figures are written once a second
        shown = fetch("/metrics")
        [resident] = re.findall(r"^kvcached_resident_bytes\{.*member=\"gqa\".*\} (\S+)$", shown, re.MULTILINE)
        assert 600 * 4096 <= float(resident) < 16 << 20
        usages = re.findall(r"^sglang:token_usage\{.*\} (\S+)$", shown, re.MULTILINE)
        assert usages
        assert all(0 <= float(usage) <= 1 for usage in usages)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
