"""The thread that maps: a real rank, a real ledger, host memory."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvcached_core.backends.host import HostBackend
from kvcached_core.config import Settings
from kvcached_core.errors import LedgerError
from kvcached_core.orders import Ack, Map, Report, Retire
from kvcached_sglang.mapper import Allowance
from kvcached_sglang.member import Member, open_backend

from tests.sglang.test_pools import make_mha, rebuild

BUDGET = 1 << 20


def join(runtime_dir: Path, name: str = "one", **more: str) -> Member:
    settings = Settings.load({"KVCACHED_RUNTIME_DIR": str(runtime_dir), "KVCACHED_HOST_BUDGET": str(BUDGET), **more})
    backend = open_backend(settings, "cpu", 0)
    return Member(settings, backend, name=name, model="m", rank=0, static_used_bytes=None)


@pytest.fixture
def member(runtime_dir: Path) -> Iterator[Member]:
    made = join(runtime_dir)
    made.layout.add(rebuild(make_mha(), page_bytes=4096))
    made.rank.pin(range(1))
    yield made
    made.close()


def answers(member: Member, count: int) -> list[Ack]:
    """So many acknowledgements, in the order in which they came."""
    found: list[Ack] = []
    deadline = time.monotonic() + 10
    while len(found) < count:
        assert time.monotonic() < deadline
        member.mapper.wait(1.0)
        found += [message for message in member.mapper.take() if isinstance(message, Ack)]
    return found


def test_orders_are_carried_out_and_answered(member: Member):
    member.mapper.send(Map(1, ((1, 5),)))
    assert answers(member, 1) == [Ack(1)]
    assert member.arenas.resident_bytes == 5 * member.extent_bytes
    member.mapper.note_step(1, ())
    member.mapper.send(Retire(2, ((3, 5),), after_step=1))
    assert answers(member, 1) == [Ack(2)]
    assert member.arenas.resident_bytes == 3 * member.extent_bytes


def test_what_retires_waits_for_its_step(member: Member):
    member.mapper.send(Map(1, ((1, 2),)))
    answers(member, 1)
    member.mapper.send(Retire(2, ((1, 2),), after_step=7))
    member.mapper.send(Map(3, ((5, 6),)))
    assert answers(member, 1) == [Ack(3)]
    member.mapper.note_step(7, ())
    assert answers(member, 1) == [Ack(2)]


def test_an_order_beyond_the_budget_is_a_shortage_and_changes_nothing(member: Member):
    before = member.arenas.resident_bytes
    member.mapper.send(Map(1, ((1, 64),)))
    [ack] = answers(member, 1)
    assert ack.shortage
    assert "the ledger grants" in ack.error
    assert member.arenas.resident_bytes == before


def test_a_neighbours_demand_is_heard_with_no_order_given(member: Member, runtime_dir: Path):
    member.mapper.send(Map(1, ((1, 30),)))
    answers(member, 1)
    neighbour = join(runtime_dir, "two")
    neighbour.account.report(demand_bytes=BUDGET, unmet_bytes=BUDGET, free_bytes=0, cached_bytes=0, busy=True)
    deadline = time.monotonic() + 10
    owed = 0
    while not owed:
        assert time.monotonic() < deadline
        member.mapper.wait(0.5)
        for message in member.mapper.take():
            if isinstance(message, Allowance):
                owed = message.owed_bytes
    assert owed > 0
    neighbour.close()


def test_a_neighbours_demand_is_heard_while_steps_come_without_a_pause(member: Member, runtime_dir: Path):
    member.mapper.send(Map(1, ((1, 30),)))
    answers(member, 1)
    neighbour = join(runtime_dir, "two")
    until_snoozed(member)
    neighbour.account.report(demand_bytes=BUDGET, unmet_bytes=BUDGET, free_bytes=0, cached_bytes=0, busy=True)
    deadline = time.monotonic() + 10
    owed = 0
    while not owed:
        assert time.monotonic() < deadline
        member.mapper.note_step(1, ())
        time.sleep(0.001)
        owed = max((each.owed_bytes for each in member.mapper.take() if isinstance(each, Allowance)), default=0)
    neighbour.close()


def until_snoozed(member: Member) -> None:
    """Steps come until there is nothing for the mapper to look at."""
    deadline = time.monotonic() + 10
    while not member.rank.is_calm:
        assert time.monotonic() < deadline
        member.mapper.note_step(1, ())
        time.sleep(0.001)


def test_things_to_do_are_done_between_orders(member: Member):
    done = []
    member.mapper.send(lambda: done.append(member.arenas.resident_bytes))
    member.mapper.send(Map(1, ((1, 2),)))
    answers(member, 1)
    assert done == [member.extent_bytes]


def test_stopping_gives_everything_back(runtime_dir: Path):
    made = join(runtime_dir)
    made.layout.add(rebuild(make_mha(), page_bytes=4096))
    made.rank.pin(range(1))
    made.mapper.send(Report(1, 0, 0, 0, busy=True))
    other = join(runtime_dir, "two")
    made.close()
    assert other.account.allowance().may_hold_bytes == BUDGET
    other.close()


def test_no_room_for_the_padding_page_is_said_with_figures(runtime_dir: Path):
    first = join(runtime_dir)
    first.account.lease(BUDGET)
    second = join(runtime_dir, "two")
    second.layout.add(rebuild(make_mha(), page_bytes=4096))
    with pytest.raises(LedgerError, match="the ledger grants 0 B"):
        second.rank.pin(range(1))
    first.account.give_back(BUDGET)
    first.close()
    second.close()


def test_an_error_that_nobody_expected_ends_the_process(runtime_dir: Path):
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from pathlib import Path\n"
        "from tests.sglang import conftest\n"
        "from tests.sglang.test_mapper import join\n"
        f"member = join(Path({str(runtime_dir)!r}))\n"
        "member.mapper.send(lambda: 1 / 0)\n"
        "member.mapper.join(30)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 70
    assert "ZeroDivisionError" in done.stderr


def test_the_budget_is_a_share_of_the_machine_where_it_is_one(runtime_dir: Path):
    settings = Settings.load({"KVCACHED_RUNTIME_DIR": str(runtime_dir), "KVCACHED_HOST_BUDGET": "50%"})
    machine = HostBackend().memory().total_bytes
    assert open_backend(settings, "cpu", 0).memory().total_bytes == machine // 2
