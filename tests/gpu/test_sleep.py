"""vLLM's sleep mode on a real device: what sleeps is neighbours' to lease, and what wakes answers as before."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from kvcached_core.ledger import Ledger
from kvcached_core.ledger_statistics import MemberStatistics

from tests.e2e.cases import VLLM_SIZE
from tests.e2e.client import Client
from tests.e2e.engines import VLLM
from tests.e2e.phases import GENERATED_TOKENS, generation_prompts
from tests.e2e.readings import Readings, members, statistics
from tests.e2e.server import Server, free_port
from tests.models.families import make_model

pytest.importorskip("vllm")
ROOT = Path(__file__).parents[2]
MIB = 1 << 20

START_SECONDS = 240
SETTLE_SECONDS = 10


@contextmanager
def sleeper(out: Path) -> Iterator[tuple[Server, Client]]:
    """A vLLM server that can sleep."""
    make_model("gqa", Path("/tmp/kvcached-models/gqa"))
    port = free_port()
    flags = (*VLLM_SIZE, "--enable-sleep-mode", "--enforce-eager")
    command = VLLM.command(sys.executable, Path("/tmp/kvcached-models/gqa"), port, flags)
    ours = {
        "ENABLE_KVCACHED": "1",
        "KVCACHED_STRICT": "1",
        "KVCACHED_RUNTIME_DIR": str(out),
        "KVCACHED_NAME": "sleeper",
    }
    with Server("sleeper", command, {**VLLM.variables, **ours}, port=port, log=out / "sleeper.log", cwd=ROOT) as server:
        server.wait_ready(VLLM.health_path, deadline_seconds=START_SECONDS)
        yield server, Client(port)


@contextmanager
def nothing_left(runtime_dir: Path) -> Iterator[None]:
    """A neighbour whose headroom is the whole device: the ledger grants nothing, whoever else ends meanwhile."""
    (device_id,) = Ledger.devices(runtime_dir)
    total_bytes = statistics(runtime_dir).total_bytes
    with closing(Ledger.open(device_id, total_bytes, runtime_dir=runtime_dir, headroom_bytes=total_bytes)) as ledger:
        neighbour = ledger.join("neighbour", engine="vllm", ceiling_bytes=total_bytes)
        try:
            yield
        finally:
            neighbour.leave()


def member(runtime_dir: Path) -> MemberStatistics:
    return next(each for _, each in members(runtime_dir) if each.name == "sleeper")


def answers(client: Client) -> list[tuple[int, ...]]:
    found = [client.complete(*prompt, GENERATED_TOKENS) for prompt in generation_prompts()]
    assert not [answer.error for answer in found if answer.error]
    return [answer.tokens for answer in found]


def test_what_sleeps_is_neighbours_to_lease_and_what_wakes_answers_as_before(tmp_path: Path) -> None:
    with sleeper(tmp_path) as (server, client):
        readings = Readings(server, tmp_path, "sleeper")
        before = answers(client)
        awake, awake_bytes = member(tmp_path), readings.take()["driver_bytes"]

        assert client.post("/sleep?level=1")[0] == 200
        settled = readings.settle(below_bytes=awake.resident_bytes, deadline_seconds=SETTLE_SECONDS)
        asleep, asleep_bytes = member(tmp_path), settled["driver_bytes"]
        weights = awake.static_lease_bytes - asleep.static_lease_bytes
        returned = weights + awake.resident_bytes - asleep.resident_bytes
        print(f"static {awake.static_lease_bytes / MIB:.0f} -> {asleep.static_lease_bytes / MIB:.0f} MiB,", end=" ")
        print(f"KV {awake.resident_bytes / MIB:.0f} -> {asleep.resident_bytes / MIB:.0f} MiB,", end=" ")
        print(f"driver {awake_bytes / MIB:.0f} -> {asleep_bytes / MIB:.0f} MiB")
        assert weights > 256 * MIB
        assert asleep.resident_bytes < awake.resident_bytes
        assert awake_bytes - asleep_bytes >= 0.9 * returned

        with nothing_left(tmp_path):
            status, answer = client.post("/wake_up")
        print(f"refused: {status} {answer}")
        assert status == 500
        assert "sleeper needs" in server.log_text()  # with the figures
        assert client.post("/wake_up")[0] == 200
        assert answers(client) == before
        assert member(tmp_path).static_lease_bytes >= 0.95 * awake.static_lease_bytes
