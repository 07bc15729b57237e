"""The ledger's figures on an engine's /metrics: the numbers of status, in both of Prometheus' modes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

from kvcached_core.ledger_file import ledger_path
from kvcached_core.metrics import DEVICE_FAMILIES, MEMBER_FAMILIES, Collector, Publisher, Reader, labels_of
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tests.core.command import kvcached, surroundings
from tests.core.follower import MIB, Follower

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]

GPU_ID = "GPU-3f1c0a7e-1111-2222-3333-444455556666"

# What each engine does to make its /metrics. Sources: vllm/v1/metrics/prometheus.py, get_prometheus_registry (0.30 to
# 0.33); sglang/srt/utils/common.py, set_prometheus_multiproc_dir and add_prometheus_middleware (0.5.20 to 0.5.23).
SCRAPE = """
import os
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, multiprocess
registry = REGISTRY
if os.getenv("PROMETHEUS_MULTIPROC_DIR") is not None:
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""

REGISTER = """
import logging, time
logging.basicConfig()
from kvcached_core import metrics
from kvcached_core.config import Settings
assert metrics.register(Settings.load()) == EXPECTED
assert metrics.register(Settings.load()) == EXPECTED
"""


def series(text: str) -> Series:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for metric in text_string_to_metric_families(text)
        for sample in metric.samples
        if sample.name.startswith("kvcached_")
    }


def scraped(reader: Reader) -> Series:
    registry = CollectorRegistry()
    registry.register(Collector(reader))
    return series(generate_latest(registry).decode())


def member_labels(name: str = "qwen3-0.6b", device_id: str = "host") -> frozenset[tuple[str, str]]:
    labels = {"gpu_uuid": device_id, "member": name, "engine": "vllm", "model_name": "Qwen/Qwen3-0.6B"}
    return frozenset(labels.items())


def run(program: str, runtime_dir: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=surroundings(runtime_dir) | {"KVCACHED_ENGINE_ID": "mine"} | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_numbers_are_those_of_status(runtime_dir: Path) -> None:
    with Follower(runtime_dir, engine_id="mine", in_use=100 * MIB, cached=50 * MIB, wants=5 * MIB, floor=7 * MIB):
        metrics = scraped(Reader(runtime_dir, "mine"))
        (device,) = kvcached("status", "--json", runtime_dir=runtime_dir).document["devices"]
    (member,) = device["members"]
    for family in DEVICE_FAMILIES:
        assert metrics[family.name, frozenset({("gpu_uuid", "host")})] == device[family.figure], family.name
    for family in MEMBER_FAMILIES:
        if family.figure != "heartbeat_age_seconds":
            assert metrics[family.name, member_labels()] == member[family.figure], family.name
    assert metrics["kvcached_resident_bytes", member_labels()] == 150 * MIB
    assert metrics["kvcached_ledger_readable", frozenset({("gpu_uuid", "host")})] == 1
    assert len(metrics) == len(DEVICE_FAMILIES) + len(MEMBER_FAMILIES) + 1


def test_a_server_exports_its_own_members_on_the_devices_that_it_uses(runtime_dir: Path) -> None:
    with (
        Follower(runtime_dir, "mine", engine_id="mine"),
        Follower(runtime_dir, "my-second-engine", engine_id="mine/1"),
        Follower(runtime_dir, "other", engine_id="other"),
        Follower(runtime_dir, "elsewhere", engine_id="other", device_id=GPU_ID),
    ):
        exported = scraped(Reader(runtime_dir, "mine"))
    labels = [dict(labels) for _, labels in exported]
    assert {each["member"] for each in labels if "member" in each} == {"mine", "my-second-engine"}
    assert {each["gpu_uuid"] for each in labels} == {"host"}


def test_ranks_on_one_device_are_added_up(runtime_dir: Path) -> None:
    rank = {"engine_id": "mine", "cached": 10 * MIB}
    with Follower(runtime_dir, **rank), Follower(runtime_dir, rank=1, **rank):
        exported = scraped(Reader(runtime_dir, "mine"))
    assert exported["kvcached_resident_bytes", member_labels()] == 20 * MIB


def test_members_that_join_later_appear_and_those_that_end_disappear(runtime_dir: Path) -> None:
    reader = Reader(runtime_dir, "mine")
    assert scraped(reader) == {}
    with Follower(runtime_dir, engine_id="mine") as member:
        assert ("kvcached_resident_bytes", member_labels()) in scraped(reader)
        member.process.kill()
        member.process.wait(timeout=10)
        after = scraped(reader)
    assert ("kvcached_resident_bytes", member_labels()) not in after
    assert ("kvcached_device_unleased_bytes", frozenset({("gpu_uuid", "host")})) in after


def test_a_ledger_that_is_lost_is_said_and_its_successor_is_read(runtime_dir: Path) -> None:
    reader = Reader(runtime_dir, "mine")
    path = ledger_path(runtime_dir, "host")
    readable = ("kvcached_ledger_readable", frozenset({("gpu_uuid", "host")}))
    with Follower(runtime_dir, engine_id="mine"):
        assert scraped(reader)[readable] == 1
    path.rename(path.with_suffix(".old"))
    path.write_bytes(b"nonsense")
    assert scraped(reader) == {readable: 0}
    path.unlink()
    with Follower(runtime_dir, engine_id="mine"):
        assert scraped(reader)[readable] == 1


def test_both_exposition_formats_are_valid_and_name_units(runtime_dir: Path) -> None:
    registry = CollectorRegistry()
    registry.register(Collector(Reader(runtime_dir, "mine")))
    with Follower(runtime_dir, engine_id="mine"):
        families = list(parse_openmetrics(generate_openmetrics(registry).decode()))
    kinds = {family.name: family.type for family in families}
    assert kinds["kvcached_maps"] == "counter"
    assert kinds["kvcached_resident_bytes"] == "gauge"
    for family in (*DEVICE_FAMILIES, *MEMBER_FAMILIES):
        assert family.name.endswith(("_bytes", "_total", "_seconds", "_revision")), family.name
        assert family.counter == family.name.endswith("_total")
        assert family.help.endswith(".")


def test_with_the_default_registry_a_scrape_reads_the_ledger(runtime_dir: Path) -> None:
    with Follower(runtime_dir, engine_id="mine", cached=30 * MIB):
        done = run(REGISTER.replace("EXPECTED", "True") + SCRAPE, runtime_dir)
    assert series(done.stdout)["kvcached_resident_bytes", member_labels()] == 30 * MIB, done.stderr


def test_in_multiprocess_mode_another_process_shows_the_figures(runtime_dir: Path, tmp_path: Path) -> None:
    files = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    exporting = REGISTER.replace("EXPECTED", "True") + "print('ready', flush=True)\ntime.sleep(60)\n"
    with Follower(runtime_dir, engine_id="mine", cached=30 * MIB) as member:
        publisher = subprocess.Popen(
            [sys.executable, "-c", exporting],
            env=surroundings(runtime_dir) | {"KVCACHED_ENGINE_ID": "mine"} | files,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert publisher.stdout is not None
        assert publisher.stdout.readline() == "ready\n"
        try:
            await_value(runtime_dir, files, 30 * MIB)
            member.process.kill()
            await_value(runtime_dir, files, 0)
        finally:
            publisher.kill()
            publisher.communicate(timeout=10)


def await_value(runtime_dir: Path, files: dict[str, str], resident_bytes: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        shown = series(run(SCRAPE, runtime_dir, **files).stdout)
        if shown.get(("kvcached_resident_bytes", member_labels())) == resident_bytes:
            return
        assert time.monotonic() < deadline, shown


def test_in_multiprocess_mode_several_writers_of_one_series_are_not_added_up(runtime_dir: Path, tmp_path: Path) -> None:
    files = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    publish = """
        from pathlib import Path
        import os
        from kvcached_core.metrics import Publisher, Reader
        Publisher(Reader(Path(os.environ["KVCACHED_RUNTIME_DIR"]), "mine")).publish()
    """
    with Follower(runtime_dir, engine_id="mine", cached=30 * MIB):
        for _ in range(2):
            assert run(publish, runtime_dir, **files).returncode == 0
    shown = series(run(SCRAPE, runtime_dir, **files).stdout)
    assert shown["kvcached_resident_bytes", member_labels()] == 30 * MIB
    assert shown["kvcached_maps_total", member_labels()] == 1


def test_a_process_that_is_too_late_for_multiprocess_mode_says_so(runtime_dir: Path, tmp_path: Path) -> None:
    late = f"""
        import os, prometheus_client
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = {str(tmp_path)!r}
    """
    done = run(textwrap.dedent(late) + REGISTER.replace("EXPECTED", "False"), runtime_dir)
    assert done.returncode == 0, done.stderr
    assert "had imported prometheus_client: kvcached's metrics are not exported" in done.stderr


def test_nothing_imports_prometheus_before_an_engine_has_chosen_its_mode(runtime_dir: Path) -> None:
    program = """
        import sys, pkgutil, importlib, kvcached_core
        for module in ("metrics", "ledger", "config", "rank", "agent", "orders", "logs", "installation"):
            importlib.import_module(f"kvcached_core.{module}")
        assert "prometheus_client" not in sys.modules
    """
    done = run(program, runtime_dir)
    assert done.returncode == 0, done.stderr


def test_the_publishing_thread_ends_when_it_is_told(runtime_dir: Path) -> None:
    publisher = Publisher(Reader(runtime_dir, "mine"))
    publisher.start()
    publisher.stop()
    assert not publisher.is_alive()


def test_every_member_figure_has_the_four_labels() -> None:
    assert labels_of(MEMBER_FAMILIES[0]) == ("gpu_uuid", "member", "engine", "model_name")
    assert labels_of(DEVICE_FAMILIES[0]) == ("gpu_uuid",)
