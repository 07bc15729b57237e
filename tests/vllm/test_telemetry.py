"""A real server beside the ``kvcached`` command: metrics, doctor, and a limit while it is idle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from kvcached_core.metrics import MEMBER_FAMILIES
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.server import Server, free_port

MIB = 1 << 20
NAME = "told"
READY_SECONDS = 280


@pytest.fixture(scope="module")
def environ(module_runtime_dir: Path) -> dict[str, str]:
    return {
        "ENABLE_KVCACHED": "1",
        "KVCACHED_STRICT": "1",
        "KVCACHED_NAME": NAME,
        "KVCACHED_HOST_BUDGET": "512MiB",
        "KVCACHED_RUNTIME_DIR": str(module_runtime_dir),
    }


@pytest.fixture(scope="module")
def server(tiny_llama: Path, environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    flags = ["--enforce-eager", "--max-model-len", "2048", "--kv-cache-memory-bytes", str(512 * MIB)]
    command = ["vllm", "serve", str(tiny_llama), "--served-model-name", "tiny", "--port", str(port), *flags]
    log = tmp_path_factory.mktemp("telemetry") / "server.log"
    with Server("vllm", command, environ, port=port, log=log, cwd=log.parent) as running:
        running.wait_ready("/health", deadline_seconds=READY_SECONDS)
        yield running


def complete(server: Server, num_tokens: int) -> None:
    prompt = [10 + (num_tokens + at) % 200 for at in range(num_tokens)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    asked = Request(
        f"http://127.0.0.1:{server.port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urlopen(asked, timeout=120) as answered:
        assert answered.status == 200


def kvcached(environ: dict[str, str], *words: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "kvcached_core.cli", *words, "--json"],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, answer


def member(environ: dict[str, str]) -> dict[str, Any]:
    _, status = kvcached(environ, "status")
    (found,) = (member for device in status["devices"] for member in device["members"])
    return found


def exported(server: Server) -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answered:
        text = answered.read().decode()
    labels = {"gpu_uuid": "host", "member": NAME, "engine": "vllm", "model_name": "tiny"}
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels == labels
    }


def test_metrics_on_the_engines_endpoint_are_the_numbers_of_status(server: Server, environ: dict[str, str]) -> None:
    complete(server, 800)
    deadline = time.monotonic() + 60
    while True:  # a figure may change between the two
        metrics, status = exported(server), member(environ)
        changed = {
            family.name
            for family in MEMBER_FAMILIES
            if family.figure != "heartbeat_age_seconds" and metrics.get(family.name) != status[family.figure]
        }
        if not changed:
            break
        assert time.monotonic() < deadline, (changed, metrics, status)
    assert metrics["kvcached_resident_bytes"] > 0
    assert metrics["kvcached_maps_total"] > 0


def test_doctor_says_that_the_server_is_active(server: Server, environ: dict[str, str]) -> None:
    _, answer = kvcached(environ, "doctor")
    messages = [finding["message"] for finding in answer["findings"] if finding["check"] == "server"]
    assert any(f"is active: member {NAME}" in message and "vllm serve" in message for message in messages), answer
    assert not [finding for finding in answer["findings"] if finding["status"] == "problem"], answer


def test_a_limit_and_a_trim_act_on_the_idle_server_with_no_request_sent(
    server: Server, environ: dict[str, str]
) -> None:
    for num_tokens in range(1700, 1900, 20):
        complete(server, num_tokens)
    before = member(environ)["resident_bytes"]
    code, answer = kvcached(environ, "limit", NAME, "--ceiling", str(before // 2))
    (change,) = answer["changes"]
    assert (code, change["outcome"]) == (0, "reached")
    assert change["now"]["resident_bytes"] <= before // 2
    assert change["seconds"] < 5
    code, answer = kvcached(environ, "trim", NAME)
    (trim,) = answer["trims"]
    assert code == 0
    assert trim["now"]["resident_bytes"] < trim["before"]["resident_bytes"] <= before // 2
    complete(server, 300)


def test_the_start_up_line_is_in_the_engines_log_and_an_end_leaves_no_member(
    server: Server, environ: dict[str, str]
) -> None:
    (line,) = (line for line in server.log_text().splitlines() if "kvcached" in line and " is on: " in line)
    for part in (f"member {NAME} on host", "virtual capacity", "floor", "ceiling", "layout", "page"):
        assert part in line
    server.interrupt(deadline_seconds=60)
    _, status = kvcached(environ, "status")
    assert [device["members"] for device in status["devices"]] == [[]]
