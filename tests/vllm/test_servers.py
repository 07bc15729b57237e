"""Real ``vllm serve`` processes with default memory flags on one host budget, from their start to SIGTERM.

Each has an API server, an engine core and a worker, three processes. The tests run in this order and share the servers.
An extent is 256 tokens, 1 MiB; the budget is 64 of them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.vllm import watched_backend
from tests.vllm.engine import MIB, prompts, until
from tests.vllm.servers import BUDGET, EXTENT, Host, Serving

CACHE_CEILING = 8 * MIB
OUR_ERROR = re.compile(
    r"(ERROR|CRITICAL) .*\[(account|agent|rank|orders|ledger|ledger_file|member|queue|starvation)\.py:"
)


@pytest.fixture(scope="module")
def host(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, module_runtime_dir: Path) -> Iterator[Host]:
    """Two servers, started at once."""
    with ExitStack() as stack:
        made = Host(tiny_llama, tmp_path_factory.mktemp("servers"), module_runtime_dir, stack)
        made.start("A")
        made.start("B", {"KVCACHED_CACHE_CEILING": str(CACHE_CEILING)})
        made.wait_ready("A")
        made.wait_ready("B")
        made.watch()
        yield made


def test_two_engines_with_default_flags_start_at_once_with_the_same_capacity(host: Host) -> None:
    """V11, V19: what the other holds plays no part."""
    assert sorted(host.members()) == ["A", "B"]
    for serving in host.servings.values():
        [line] = [line for line in serving.server.log_text().splitlines() if " is on: vLLM" in line]
        assert "virtual capacity 64.00 MiB" in line
    assert host.member("A").ceiling_bytes == host.member("B").ceiling_bytes == BUDGET


def test_usage_on_the_metrics_endpoint_is_a_share_of_what_can_be_had(host: Host) -> None:
    """A router takes an engine at 0.8 for full. Nearly all of eight extents are used here, an eighth of all 64."""
    a = host.servings["A"]
    seen: list[float] = []

    def usage() -> float:
        seen.append(a.metric("vllm:kv_cache_usage_perc"))
        return seen[-1]

    with host.limited("A", 8 * EXTENT), _loaded(a, 8, num_tokens=40, max_tokens=200):
        until(lambda: usage() > 0.6, "usage of nearly all that can be had", 120)
    assert max(seen) <= 1
    until(lambda: a.metric("vllm:kv_cache_usage_perc") == 0, "no usage while idle")


def test_the_limit_command_is_followed_by_an_idle_server_with_no_request_sent(host: Host) -> None:
    host.limit("A")
    host.servings["A"].ask_all(prompts(14, 900, seed=2), 4)
    assert host.member("A").resident_bytes > 40 * EXTENT
    command = [sys.executable, "-m", "kvcached_core.cli", "limit", "A", "--floor", "0", "--ceiling", "6MiB", "--json"]
    done = subprocess.run(
        command,
        env={**os.environ, "KVCACHED_RUNTIME_DIR": str(host.runtime_dir)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert host.member("A").resident_bytes <= 6 * EXTENT
    print(json.loads(done.stdout))
    host.limit("A")


def test_the_first_request_of_one_gets_the_memory_that_the_other_has_only_cached(host: Host) -> None:
    host.drop_caches()
    host.servings["A"].ask_all(prompts(18, 900, seed=3), 4)
    held = host.member("A").resident_bytes
    assert held > 55 * EXTENT
    requests = prompts(10, 900, seed=4)
    started = time.monotonic()
    tokens = host.servings["B"].ask_all(requests, 4)
    print(f"B answered in {time.monotonic() - started:.2f} s; A went from {held // MIB} MiB")
    assert host.member("A").resident_bytes <= held - 20 * EXTENT
    assert host.servings["A"].ask_all(requests, 4) == tokens


def test_more_demand_than_memory_for_a_while_ends_every_request_with_the_same_tokens(host: Host) -> None:
    """V1: each of the two alone would want three quarters of the budget."""
    requests = prompts(16, 500, seed=5)
    alone = host.servings["A"].ask_all(requests, 250)
    host.drop_caches()
    running = {name: [serving.ask(prompt, 250) for prompt in requests] for name, serving in host.servings.items()}
    peak = 0
    while not all(future.done() for futures in running.values() for future in futures):
        peak = max(peak, sum(host.member(name).lease_bytes for name in running))
        time.sleep(0.01)
    assert peak <= BUDGET
    assert {name: [future.result() for future in futures] for name, futures in running.items()} == {
        "A": alone,
        "B": alone,
    }
    preempted = {name: serving.metric("vllm:num_preemptions_total") for name, serving in host.servings.items()}
    print(f"peak lease {peak // MIB} MiB, preemptions {preempted}")
    assert sum(preempted.values()) > 0


def test_after_load_an_idle_server_holds_little_more_than_its_cache_bound(host: Host) -> None:
    """V3: at most half as much again, five seconds later."""
    b = host.servings["B"]
    for seed, length in enumerate((60, 400, 900, 200)):
        b.ask_all(prompts(8, length, seed=20 + seed), 16)
    until(lambda: host.member("B").resident_bytes <= 1.5 * CACHE_CEILING, "the cache bound", 5)
    assert host.member("B").cached_bytes > 0


def test_a_third_engine_starts_and_serves_while_a_neighbour_saturates_the_host(host: Host, tmp_path: Path) -> None:
    """V2: its first page and its floor come from the neighbour, at the price of preempting requests there.

    It is held up just before it asks for memory until the neighbour has all of it: a saturated server takes two
    processors, and an engine needs a minute beside it to come that far.
    """
    hold, a = tmp_path / "hold", host.servings["A"]
    hold.touch()
    [prompt] = prompts(1, 900, seed=30)
    host.start("C", watched_backend.install(tmp_path))
    try:
        until(lambda: any("reserve" in path.read_text() for path in tmp_path.glob("calls-*")), "C about to begin", 240)
        with _loaded(a, 16, num_tokens=500, max_tokens=400):
            until(lambda: host.ledger.snapshot().unleased_bytes < EXTENT, "saturation", 120)
            began = time.monotonic()
            hold.unlink()
            host.wait_ready("C")
            ready = time.monotonic()
            tokens = host.servings["C"].ask(prompt, 16).result(timeout=120)
            answered = time.monotonic()
    finally:
        hold.unlink(missing_ok=True)
    assert "kvcached got no memory for a first extent" not in host.servings["C"].server.log_text()
    print(f"C was ready {ready - began:.1f} s after it asked for memory and answered in {answered - ready:.1f} s")
    assert host.servings["A"].ask(prompt, 16).result() == tokens


@contextmanager
def _loaded(serving: Serving, count: int, *, num_tokens: int, max_tokens: int) -> Iterator[None]:
    """So many clients, each with one request after another and no pause, for as long as the block lasts."""
    over = threading.Event()

    def client(seed: int) -> None:
        while not over.is_set():
            serving.ask_all(prompts(1, num_tokens, seed=seed), max_tokens)
            seed += 100

    clients = [serving.pool.submit(client, 100 + place) for place in range(count)]
    try:
        yield
        assert not any(each.done() for each in clients)
    finally:
        over.set()
    for each in clients:
        each.result()


def test_a_terminated_server_leaves_nothing_and_its_name_is_free(host: Host) -> None:
    """V15."""
    end = host.servings.pop("C").server.interrupt(deadline_seconds=60, number=signal.SIGTERM)
    assert end.left == ()
    assert "C" not in host.members()
    assert list((host.runtime_dir / "orders").iterdir()) == []
    again = host.ledger.join("C", engine="vllm")
    assert again.name == "C"
    again.leave()


def test_an_orderly_end_says_nothing_of_errors_and_empties_the_ledger(host: Host) -> None:
    for name, serving in host.servings.items():
        end = serving.server.interrupt(deadline_seconds=60)
        assert end.left == ()
        said = [line for line in serving.server.log_text().splitlines() if OUR_ERROR.search(line)]
        assert said == [], f"{name}: {said[:5]}"
    assert host.members() == []
    assert host.ledger.snapshot().unleased_bytes == BUDGET
