"""What members, operators and onlookers of one ledger can rely on."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from kvcached_core.account import Account
from kvcached_core.errors import ConfigError, InvariantError, LedgerError
from kvcached_core.ledger import Ledger
from kvcached_core.ledger_file import ledger_path
from kvcached_core.ledger_statistics import MemberStatistics

from tests.core.stepped import World

TOTAL = 1000


@pytest.fixture
def world(runtime_dir: Path) -> Iterator[World]:
    world = World(runtime_dir, TOTAL)
    yield world
    world.close()


def join(world: World, name: str = "m", **limits: object) -> Account:
    return world.actor().ledger.join(name, engine="test", **limits)  # type: ignore[arg-type]


def say(
    account: Account, *, demand: int = 0, unmet: int = 0, free: int = 0, cached: int = 0, busy: bool = False
) -> None:
    account.report(demand_bytes=demand, unmet_bytes=unmet, free_bytes=free, cached_bytes=cached, busy=busy)


def grow(account: Account, num_bytes: int) -> int:
    granted = account.lease(num_bytes)
    account.created(granted)
    return granted


def shrink(account: Account, num_bytes: int) -> None:
    account.destroyed(num_bytes)
    account.give_back(num_bytes)


def seen(world: World) -> dict[str, MemberStatistics]:
    return {member.name: member for member in world.actors[0].ledger.snapshot().members}


# --- leases ------------------------------------------------------------------------------------------------------


def test_a_lease_is_as_much_as_there_is(world: World) -> None:
    first, second = join(world), join(world)
    assert first.lease(600) == 600
    assert second.lease(600) == 400
    assert second.lease(1) == 0
    first.give_back(50)
    assert second.lease(600) == 50


def test_the_ceiling_is_all_but_the_headroom_or_what_is_set(runtime_dir: Path) -> None:
    world = World(runtime_dir, TOTAL, headroom_bytes=100)
    account, small = join(world), join(world, ceiling_bytes=70)
    assert small.lease(TOTAL) == 70
    assert account.allowance().ceiling_bytes == 900
    assert account.lease(TOTAL) == 830
    world.close()


def test_the_largest_headroom_of_the_living_counts(world: World) -> None:
    first = join(world)
    world.headroom_bytes = 300
    second = join(world)
    assert first.lease(TOTAL) == 700
    second.leave()
    assert first.lease(TOTAL) == 300


@pytest.mark.parametrize(
    "misuse",
    [
        lambda account: account.lease(-1),
        lambda account: account.created(31),
        lambda account: account.created(-1),
        lambda account: account.destroyed(21),
        lambda account: account.destroyed(-1),
        lambda account: account.give_back(11),
        lambda account: account.give_back(-1),
        lambda account: account.leave(),
    ],
)
def test_a_wrong_count_is_our_bug_and_changes_nothing(world: World, misuse: Callable[[Account], object]) -> None:
    account = join(world)
    account.lease(30)
    account.created(20)
    before = seen(world)
    with pytest.raises(InvariantError, match="m on host: lease 30 B, created 20 B"):
        misuse(account)
    assert (seen(world)["m"].lease_bytes, seen(world)["m"].resident_bytes) == (30, 20)
    assert before.keys() == seen(world).keys()


# --- pressure ----------------------------------------------------------------------------------------------------


def test_an_idle_device_is_no_reason_to_give_anything_back(world: World) -> None:
    idle, other = join(world), join(world)
    grow(idle, 900)
    say(idle, cached=900)
    say(other, demand=50)
    assert idle.allowance().target_bytes == TOTAL


def test_an_idle_cache_gives_way_by_what_is_missing(world: World) -> None:
    idle, wanting = join(world), join(world)
    grow(idle, 900)
    say(idle, cached=900)
    assert grow(wanting, 300) == 100
    say(wanting, demand=300, unmet=200, busy=True)
    assert idle.allowance().target_bytes == 700
    assert idle.allowance().ceiling_bytes == TOTAL  # nothing that runs has to stop
    shrink(idle, 200)
    assert idle.lease(200) == 0  # what was given back is not taken back
    assert grow(wanting, 200) == 200
    say(wanting, demand=300, busy=True)
    assert idle.allowance().target_bytes == TOTAL


def test_who_wants_more_than_its_share_gets_its_share(world: World) -> None:
    first, second = join(world), join(world, weight=3.0)
    grow(first, TOTAL)
    say(first, demand=TOTAL, free=TOTAL)
    say(second, demand=TOTAL, unmet=TOTAL, busy=True)
    assert first.allowance().target_bytes == 250
    shrink(first, 750)
    assert first.lease(TOTAL) == 0
    assert second.lease(TOTAL) == 750


def test_what_is_asked_for_counts_as_demand_before_it_was_reported(world: World) -> None:
    first, second = join(world), join(world)
    grow(first, 500)
    say(first, demand=TOTAL, unmet=500, busy=True)
    assert second.lease(300) == 300
    assert second.lease(300) == 200
    assert first.lease(500) == 0


def test_saturated_members_rest_at_their_weights_and_stay_there(world: World) -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 5.0}
    accounts = [join(world, name, weight=weight) for name, weight in weights.items()]
    unit = 10

    def tick(account: Account) -> int:
        before = account.lease_bytes
        surplus = max(0, account.lease_bytes - account.allowance().target_bytes)
        shrink(account, -(-surplus // unit) * unit)
        room = max(0, account.allowance().may_hold_bytes - account.lease_bytes) // unit * unit
        grow(account, room)
        say(account, demand=TOTAL, unmet=TOTAL - account.lease_bytes, free=account.created_bytes, busy=True)
        return account.lease_bytes - before

    for _ in range(10):
        for account in accounts:
            tick(account)
    for account, weight in zip(accounts, weights.values(), strict=True):
        share = account.lease_bytes / TOTAL
        assert share == pytest.approx(weight / 8, rel=0.05, abs=unit / TOTAL)
    assert [tick(account) for _ in range(5) for account in accounts] == [0] * 15


def test_an_unmet_floor_stops_running_requests_and_nothing_else_does(world: World) -> None:
    busy, protected = join(world), join(world, floor_bytes=200)
    grow(busy, TOTAL)
    say(busy, demand=TOTAL, busy=True)
    say(protected, demand=500, unmet=500, busy=True)
    allowance = busy.allowance()
    assert (allowance.target_bytes, allowance.ceiling_bytes) == (500, 800)
    shrink(busy, 200)
    assert grow(protected, 500) == 200
    say(protected, demand=500, unmet=300, busy=True)
    allowance = busy.allowance()
    assert (allowance.target_bytes, allowance.ceiling_bytes) == (500, TOTAL)


def test_a_stopped_member_asks_for_nothing_and_keeps_what_it_has(world: World) -> None:
    stopped, other = join(world, "stopped"), join(world, "other")
    grow(stopped, 300)
    grow(other, 700)
    say(stopped, demand=900, unmet=600, busy=True)
    say(other, demand=700, cached=700, busy=True)
    assert other.allowance().target_bytes == 500
    world.clock.now_seconds += 3
    say(other, demand=700, cached=700, busy=True)
    assert other.allowance().target_bytes == TOTAL
    assert seen(world)["stopped"].state == "stopped"
    assert seen(world)["stopped"].lease_bytes == 300
    stopped.heartbeat()
    assert seen(world)["stopped"].state == "serving"


def test_unmet_demand_beyond_its_own_ceiling_is_nobody_elses_business(world: World) -> None:
    small, other = join(world, ceiling_bytes=100), join(world)
    grow(small, 100)
    grow(other, 900)
    say(small, demand=500, unmet=400, busy=True)
    say(other, cached=900)
    assert other.allowance().target_bytes == TOTAL


# --- outsiders, and the driver -------------------------------------------------------------------------------------


class Driver:
    def __init__(self) -> None:
        self.free = TOTAL

    def __call__(self) -> int:
        return self.free


def test_what_outsiders_take_is_not_granted_and_is_made_room_for(runtime_dir: Path) -> None:
    driver = Driver()
    world = World(runtime_dir, TOTAL, headroom_bytes=100, device_id="GPU-1")
    account = world.actor(driver).ledger.join("m", engine="test")
    grow(account, 600)
    driver.free -= 600
    say(account, cached=600)
    assert account.allowance().target_bytes == 900
    driver.free -= 200  # a process that no ledger knows
    assert account.lease(TOTAL) == 100
    account.give_back(100)
    driver.free -= 150  # and now into the headroom
    assert account.lease(TOTAL) == 0
    assert account.allowance().target_bytes == 550
    assert account.allowance().may_hold_bytes == 600
    assert account.allowance().ceiling_bytes == 900  # running requests are not stopped for it
    assert seen(world)["m"].unmet_bytes == 0
    assert world.actors[0].ledger.snapshot().unleased_bytes == 0
    world.close()


def test_pages_made_while_the_driver_is_asked_are_not_granted_again(runtime_dir: Path) -> None:
    driver = Driver()
    world = World(runtime_dir, TOTAL, device_id="GPU-1")
    neighbour = world.actor(driver).ledger.join("neighbour", engine="test")
    neighbour.lease(600)
    made = False

    def asked() -> int:
        nonlocal made
        free = driver.free
        if not made:  # right after the driver has answered, the neighbour makes the pages it leased
            made = True
            driver.free -= 600
            neighbour.created(600)
        return free

    account = world.actor(asked).ledger.join("m", engine="test")
    assert account.lease(TOTAL) == 400
    world.close()


def test_the_command_line_shows_what_the_driver_told_a_member_last(runtime_dir: Path) -> None:
    driver = Driver()
    world = World(runtime_dir, TOTAL, device_id="GPU-1")
    onlooker = world.actor()
    account = world.actor(driver).ledger.join("m", engine="test")
    driver.free = 321
    say(account)
    assert onlooker.ledger.snapshot().driver_free_bytes == 321
    world.close()


# --- static leases -----------------------------------------------------------------------------------------------


def test_a_static_lease_is_had_whole_and_not_granted_to_others(world: World) -> None:
    loading, other = join(world), join(world)
    loading.static_lease(400, deadline_seconds=0)
    assert other.lease(TOTAL) == 600
    loading.static_used(300)
    assert other.lease(TOTAL) == 0
    loading.static_lease(350, deadline_seconds=0)
    assert other.lease(TOTAL) == 50


def test_who_waits_for_a_static_lease_is_made_room_for(world: World) -> None:
    idle, loading = join(world, "idle"), join(world, "loading")
    grow(idle, 900)
    say(idle, cached=900)
    actor = world.actors[1]
    targets = []

    def neighbour_trims(_: float) -> None:
        assert seen(world)["loading"].state == "waiting"
        targets.append(idle.allowance().target_bytes)
        shrink(idle, 100)

    world.clock.sleep = neighbour_trims  # type: ignore[method-assign]
    loading.static_lease(400, deadline_seconds=1)
    assert targets == [600, 600, 600]
    assert idle.allowance().target_bytes == TOTAL
    assert seen(world)["loading"].static_lease_bytes == 400
    assert actor.ledger.snapshot().unleased_bytes == 0


def test_nobody_grows_into_what_a_loading_member_waits_for(world: World) -> None:
    growing, loading = join(world), join(world)
    grow(growing, 500)
    actor = world.actors[1]
    actor.start(lambda: loading.static_lease(700, deadline_seconds=0.05))
    while actor.word != "static_unmet_bytes":
        actor.step()
    actor.step()  # it has said what it waits for
    assert growing.lease(500) == 0
    with pytest.raises(LedgerError):
        actor.finish()
    assert growing.lease(500) == 500


@pytest.mark.parametrize("asked", [550, 700, 900])
def test_what_is_loaded_already_need_not_be_free_a_second_time(runtime_dir: Path, asked: int) -> None:
    """Weights may take more than was expected, and more than half of the device."""
    driver = Driver()
    world = World(runtime_dir, TOTAL, headroom_bytes=100, device_id="GPU-1")
    loading, other = (world.actor(driver).ledger.join(name, engine="test") for name in ("loading", "other"))
    loading.static_lease(500, deadline_seconds=0)
    driver.free -= 600
    loading.static_used(600)
    loading.static_lease(asked, deadline_seconds=0)
    assert seen(world)["loading"].static_lease_bytes == asked
    assert other.lease(TOTAL) == 900 - max(600, asked)
    world.close()


def test_who_has_loaded_waits_for_what_is_still_to_come_and_for_no_more(runtime_dir: Path) -> None:
    driver = Driver()
    world = World(runtime_dir, TOTAL, device_id="GPU-1")
    idle, loading = (world.actor(driver).ledger.join(name, engine="test") for name in ("idle", "loading"))
    grow(idle, 300)
    driver.free -= 300
    say(idle, cached=300)
    driver.free -= 600
    loading.static_used(600)  # nothing leased yet
    unmet = []

    def neighbour_trims(_: float) -> None:
        unmet.append(seen(world)["loading"].static_unmet_bytes)
        assert idle.allowance().target_bytes == 200
        shrink(idle, 100)
        driver.free += 100

    world.clock.sleep = neighbour_trims  # type: ignore[method-assign]
    loading.static_lease(800, deadline_seconds=1)
    assert unmet == [200]
    assert world.actors[0].ledger.snapshot().unleased_bytes == 0
    world.close()


def test_a_static_lease_that_is_not_granted_in_time_says_why(world: World) -> None:
    busy, loading = join(world, "busy"), join(world, "loading")
    grow(busy, 700)
    say(busy, demand=700, free=100, busy=True)
    loading.static_lease(50, deadline_seconds=0)
    with pytest.raises(LedgerError) as refusal:
        loading.static_lease(400, deadline_seconds=1)
    for figure in (
        "loading needs 400 B",
        "holds 50 B",
        "waited 1.",
        "1000 B",
        "busy holds 700 B (600 B in use, serving)",
    ):
        assert figure in str(refusal.value)
    assert seen(world)["loading"].static_lease_bytes == 50
    assert seen(world)["loading"].static_unmet_bytes == 0
    assert seen(world)["loading"].state == "loading"


# --- members -----------------------------------------------------------------------------------------------------


def test_a_second_member_of_a_name_gets_a_suffix_and_says_so(world: World, caplog: pytest.LogCaptureFixture) -> None:
    first, second, third = join(world, "qwen"), join(world, "qwen"), join(world, "qwen")
    assert [account.name for account in (first, second, third)] == ["qwen", "qwen-2", "qwen-3"]
    assert [account.asked_name for account in (first, second, third)] == ["qwen"] * 3
    assert "is named qwen: this one is qwen-2" in caplog.text
    second.leave()
    assert join(world, "qwen").name == "qwen-2"
    assert join(world, "qwen-3").name == "qwen-3-2"


def test_the_ranks_of_one_engine_share_its_name(world: World) -> None:
    ranks = [join(world, "tp", engine_id="e1", rank=rank) for rank in range(2)]
    other = join(world, "tp", engine_id="e2")
    assert [account.name for account in ranks] == ["tp", "tp"]
    assert [account.member_id for account in ranks] == ["e1", "e1"]
    assert other.name == "tp-2"
    members = world.actors[0].ledger.snapshot().members
    assert [(member.name, member.rank, member.member_id) for member in members] == [
        *(("tp", rank, "e1") for rank in range(2)),
        ("tp-2", 0, "e2"),
    ]


@pytest.mark.parametrize("name", ["", "x" * 56, "a\nb", "a\0"])
def test_a_name_that_cannot_be_shown_is_refused(world: World, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a member"):
        join(world, name)


def test_an_id_that_would_be_cut_is_refused(world: World) -> None:
    with pytest.raises(ConfigError, match="too long for the id"):
        join(world, engine_id="x" * 64)
    assert join(world, engine_id="x" * 63).member_id == "x" * 63


def test_a_member_that_left_can_come_again(world: World) -> None:
    account = join(world)
    grow(account, 10)
    account.destroyed(10)
    account.leave()
    assert seen(world) == {}
    assert not account.registered
    again = world.actors[0].ledger.join("m", engine="test")
    assert again.name == "m"
    assert again.lease(TOTAL) == TOTAL


def test_another_total_is_refused_while_somebody_counts_with_the_first(runtime_dir: Path) -> None:
    world = World(runtime_dir, TOTAL)
    account = join(world, "a")
    world.total_bytes = 4000
    with pytest.raises(LedgerError) as refusal:
        world.actor()
    for figure in ("4000", "a (process", "counts with 1000", "Accepted: 1000", "KVCACHED_HOST_BUDGET"):
        assert figure in str(refusal.value)
    account.leave()
    assert join(world, "b").lease(9999) == 4000
    world.close()


def test_a_members_row_shows_what_it_said(world: World) -> None:
    account = join(world, "m", floor_bytes=10, ceiling_bytes=500, weight=2.5, rank=3, model="Qwen/Qwen3", engine_id="e")
    grow(account, 120)
    shrink(account, 20)
    account.create_failed()
    account.static_lease(50, deadline_seconds=0)
    account.static_used(40)
    say(account, demand=110, unmet=10, free=30, cached=20, busy=True)
    world.clock.now_seconds += 1
    member = seen(world)["m"]
    expected = {
        "name": "m",
        "member_id": "e",
        "engine": "test",
        "model": "Qwen/Qwen3",
        "rank": 3,
        "pid": os.getpid(),
        "state": "serving",
        "floor_bytes": 10,
        "ceiling_bytes": 500,
        "weight": 2.5,
        "limits_revision": 0,
        "limits_followed": True,
        "static_lease_bytes": 50,
        "static_used_bytes": 40,
        "static_unmet_bytes": 0,
        "lease_bytes": 100,
        "resident_bytes": 100,
        "in_use_bytes": 50,
        "free_bytes": 30,
        "cached_bytes": 20,
        "demand_bytes": 110,
        "unmet_bytes": 10,
        "maps_total": 1,
        "unmaps_total": 1,
        "mapped_bytes_total": 120,
        "unmapped_bytes_total": 20,
        "create_failures_total": 1,
        "heartbeat_age_seconds": 1.0,
        "age_seconds": 1.0,
    }
    assert {key: value for key, value in vars(member).items() if key in expected} == expected


def test_a_snapshot_is_json(world: World) -> None:
    join(world)
    device = world.actors[0].ledger.snapshot()
    told = json.loads(json.dumps(device.to_json()))
    assert (told["device_id"], told["total_bytes"], told["unleased_bytes"]) == ("host", TOTAL, TOTAL)
    assert told["members"][0]["name"] == "m"


def test_a_long_model_name_is_cut_at_a_character(world: World) -> None:
    join(world, model="é" * 500)
    assert seen(world)["m"].model == "é" * 127


def test_the_states_of_a_members_life(world: World) -> None:
    account = join(world)
    assert seen(world)["m"].state == "loading"
    world.clock.now_seconds += 60
    assert seen(world)["m"].state == "loading"  # an engine that reads weights says nothing for a while
    say(account)
    assert seen(world)["m"].state == "idle"
    say(account, busy=True)
    assert seen(world)["m"].state == "serving"


# --- operators ---------------------------------------------------------------------------------------------------


def test_a_lowered_ceiling_counts_at_once_and_is_visible_until_followed(world: World) -> None:
    account, operator = join(world), world.actor().ledger
    grow(account, 800)
    generation = account.generation
    revision = operator.set_limits("m", ceiling_bytes=300)
    assert account.generation != generation
    assert account.lease(100) == 0
    allowance = account.allowance()
    assert (allowance.target_bytes, allowance.ceiling_bytes, allowance.may_hold_bytes) == (300, 300, 800)
    member = seen(world)["m"]
    assert (member.ceiling_bytes, member.limits_revision, member.limits_followed) == (300, revision, False)
    shrink(account, 500)
    account.allowance()
    assert seen(world)["m"].limits_followed


def test_two_operators_see_each_others_changes(world: World) -> None:
    join(world, "a"), join(world, "b")
    operators = world.actor().ledger, world.actor().ledger
    assert operators[0].set_limits("a", floor_bytes=100) == 1
    assert operators[1].set_limits("a", ceiling_bytes=700) == 2
    assert operators[0].set_limits("b", weight=4.0) == 3
    members = seen(world)
    assert (members["a"].floor_bytes, members["a"].ceiling_bytes, members["a"].limits_revision) == (100, 700, 2)
    assert (members["b"].weight, members["b"].limits_revision) == (4.0, 3)


def test_limits_end_with_the_member_they_were_set_for(world: World) -> None:
    account = join(world)
    world.actor().ledger.set_limits("m", ceiling_bytes=10)
    slot = account.slot
    account.leave()
    again = world.actors[0].ledger.join("m", engine="test")
    assert again.slot == slot
    assert seen(world)["m"].ceiling_bytes == TOTAL
    assert seen(world)["m"].limits_revision == 0


def test_the_ranks_of_a_member_share_a_limit_evenly(world: World) -> None:
    for rank in range(2):
        join(world, "tp", engine_id="e", rank=rank)
    world.actor().ledger.set_limits("tp", floor_bytes=100, ceiling_bytes=600)
    members = world.actors[0].ledger.snapshot().members
    assert [(member.floor_bytes, member.ceiling_bytes) for member in members] == [(50, 300), (50, 300)]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"floor_bytes": 501}, "floor of 501 B and a ceiling of 500 B"),
        ({"ceiling_bytes": 99}, "floor of 100 B and a ceiling of 99 B"),
        ({"weight": 0.0}, "weight 0.0. Accepted: above 0"),
        ({"weight": 1001.0}, "weight 1001.0"),
        ({"floor_bytes": -1}, "floor of -1 B"),
    ],
)
def test_limits_that_cannot_work_are_refused_with_their_values(
    world: World, limits: dict[str, float], words: str
) -> None:
    join(world, floor_bytes=100, ceiling_bytes=500)
    with pytest.raises(ConfigError, match=words):
        world.actor().ledger.set_limits("m", **limits)  # type: ignore[arg-type]
    assert seen(world)["m"].limits_revision == 0


def test_a_floor_that_others_leave_no_room_for_is_refused(world: World) -> None:
    join(world, "a", floor_bytes=300).static_lease(200, deadline_seconds=0)
    join(world, "b")
    with pytest.raises(ConfigError, match="600 B for b cannot be kept: at most 500 B"):
        world.actor().ledger.set_limits("b", floor_bytes=600)
    world.actor().ledger.set_limits("b", floor_bytes=500)


def test_an_unknown_member_is_refused_with_those_there_are(world: World) -> None:
    join(world, "a"), join(world, "b")
    for command in (
        lambda ledger: ledger.set_limits("c", weight=1.0),
        lambda ledger: ledger.request_trim("c", 1),
    ):
        with pytest.raises(LedgerError, match=r"no member 'c' on host\. Members: a, b"):
            command(world.actors[0].ledger)


def test_a_trim_is_asked_for_followed_and_counted_down(world: World) -> None:
    account = join(world)
    grow(account, 500)
    revision = world.actor().ledger.request_trim("m", 200)
    assert account.allowance().trim_bytes == 200
    assert (seen(world)["m"].trim_revision, seen(world)["m"].trim_left_bytes) == (revision, 200)
    shrink(account, 150)
    assert account.allowance().trim_bytes == 50
    shrink(account, 150)
    assert account.allowance().trim_bytes == 0
    assert seen(world)["m"].trim_left_bytes == 0


def test_a_trim_that_finds_nothing_to_trim_is_forgotten(world: World) -> None:
    account = join(world)
    grow(account, 500)
    world.actor().ledger.request_trim("m", 200, deadline_seconds=5)
    assert account.allowance().trim_bytes == 200
    world.clock.now_seconds += 6
    generation = account.generation
    account.heartbeat()
    assert account.generation != generation
    assert account.allowance().trim_bytes == 0


def test_a_trim_leaves_limits_alone(world: World) -> None:
    join(world, floor_bytes=10, ceiling_bytes=500, weight=3.0)
    world.actor().ledger.request_trim("m", 5)
    world.actor().ledger.set_limits("m", floor_bytes=20)
    member = seen(world)["m"]
    assert (member.floor_bytes, member.ceiling_bytes, member.weight) == (20, 500, 3.0)


# --- watching ----------------------------------------------------------------------------------------------------


def test_every_change_changes_the_generation_and_a_heartbeat_does_not(world: World) -> None:
    account, onlooker = join(world, ceiling_bytes=700), world.actor().ledger
    seen_generations = {onlooker.generation}
    for change in (
        lambda: account.lease(10),
        lambda: account.created(10),
        lambda: say(account, demand=10),
        lambda: account.destroyed(10),
        lambda: account.give_back(10),
        lambda: account.static_lease(5, deadline_seconds=0),
        lambda: account.static_used(5),
        lambda: account.set_floor(5),
        lambda: onlooker.set_limits("m", weight=2.0),
        lambda: onlooker.request_trim("m", 5),
        lambda: account.leave(),
    ):
        change()
        assert onlooker.generation not in seen_generations
        seen_generations.add(onlooker.generation)
    again = world.actors[0].ledger.join("m", engine="test")
    say(again, demand=10)
    generation = onlooker.generation
    for _ in range(100):
        world.clock.now_seconds += 0.05
        say(again, demand=10)
        again.heartbeat()
    assert onlooker.generation == generation


def test_the_death_of_a_member_changes_the_generation_for_a_watcher(world: World) -> None:
    account = join(world)
    join(world, "dead").lease(400)
    world.actors[1].kill()
    generation = account.generation
    world.clock.now_seconds += 1
    account.heartbeat()
    assert account.generation != generation
    assert account.allowance().may_hold_bytes == TOTAL


def test_a_reader_changes_nothing_and_needs_no_member(runtime_dir: Path) -> None:
    with closing(Ledger.open("host", TOTAL, runtime_dir=runtime_dir)):
        pass
    before = ledger_path(runtime_dir, "host").read_bytes()
    with closing(Ledger.open("host", None, runtime_dir=runtime_dir)) as ledger:
        assert ledger.snapshot().members == ()
        assert ledger.snapshot().total_bytes == TOTAL
        with pytest.raises(LedgerError, match="total bytes must be known"):
            ledger.join("m", engine="test")
    assert ledger_path(runtime_dir, "host").read_bytes() == before


# --- one process -------------------------------------------------------------------------------------------------


def test_a_process_has_one_ledger_per_file_until_its_last_user_closes(runtime_dir: Path) -> None:
    first = Ledger.open("host", TOTAL, runtime_dir=runtime_dir)
    link = runtime_dir.with_name(runtime_dir.name + "-link")
    link.symlink_to(runtime_dir)
    try:
        second = Ledger.open("host", TOTAL, runtime_dir=link)
    finally:
        link.unlink()
    assert second is first
    account = first.join("m", engine="test")
    second.close()
    assert account.lease(10) == 10
    with pytest.raises(LedgerError, match="as 1000 bytes already, not as 5"):
        Ledger.open("host", 5, runtime_dir=runtime_dir)
    first.close()
    with closing(Ledger.open("host", TOTAL, runtime_dir=runtime_dir)) as third:
        assert third is not first
        assert third.snapshot().members == ()


def test_a_member_beside_an_onlooker_of_its_process_counts_with_its_own_headroom_and_driver(runtime_dir: Path) -> None:
    Ledger.open("GPU-1", TOTAL, runtime_dir=runtime_dir).close()
    with (
        closing(Ledger.open("GPU-1", None, runtime_dir=runtime_dir)) as onlooker,
        closing(
            Ledger.open("GPU-1", TOTAL, runtime_dir=runtime_dir, headroom_bytes=100, driver_free=lambda: 700)
        ) as ledger,
    ):
        assert ledger is onlooker
        account = ledger.join("m", engine="test")
        assert account.lease(TOTAL) == 600
        ledger_path(runtime_dir, "GPU-1").unlink()
        assert (
            onlooker.snapshot().total_bytes == TOTAL
        )  # it can make the file, though it was opened by one who could not


def test_the_devices_of_a_directory(runtime_dir: Path) -> None:
    assert Ledger.devices(runtime_dir) == []
    for device_id in ("host", "GPU-2", "GPU-1"):
        Ledger.open(device_id, TOTAL, runtime_dir=runtime_dir).close()
    assert Ledger.devices(runtime_dir) == ["GPU-1", "GPU-2", "host"]


# --- the file is lost while members serve --------------------------------------------------------------------------

LOSSES: dict[str, Callable[[Path], object]] = {
    "file deleted": lambda path: path.unlink(),
    "directory deleted": lambda path: shutil.rmtree(path.parent),
    "directory renamed": lambda path: path.parent.rename(path.parent.with_name("moved")),
    "file replaced": lambda path: path.rename(path.with_name("moved")),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_members_go_on_without_their_file_and_meet_again_in_the_next_one(
    runtime_dir: Path, loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(runtime_dir / "made", TOTAL)
    first, second = join(world, "first"), join(world, "second")
    grow(first, 300)
    first.lease(100)
    first.static_lease(50, deadline_seconds=0)
    first.static_used(50)
    grow(second, 200)
    LOSSES[loss](world.path)
    shrink(first, 50)  # counts for itself, whether it knows or not
    world.clock.now_seconds += 1
    for account in (first, second):
        account.heartbeat()  # finds out, makes or finds the file, joins again
    assert first.registered
    assert second.registered
    members = seen(world)
    assert (members["first"].lease_bytes, members["first"].resident_bytes) == (350, 250)
    assert (members["first"].static_lease_bytes, members["first"].static_used_bytes) == (50, 50)
    assert members["second"].lease_bytes == 200
    assert second.lease(TOTAL) == 400
    first.created(100)  # what was leased before still may be used
    for name in ("first", "second"):
        told = [record.message for record in caplog.records if f" {name} goes on with what it holds" in record.message]
        assert len(told) == 1
        assert f"{name} has joined the ledger of host again" in caplog.text
    world.close()


@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_members_of_a_damaged_file_go_on_and_join_again_once_it_is_removed(
    runtime_dir: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(runtime_dir, TOTAL)
    account = join(world)
    grow(account, 300)
    size = world.path.stat().st_size
    os.truncate(world.path, 0)
    if damage == "overwritten":
        os.truncate(world.path, size)
    for _ in range(5):
        world.clock.now_seconds += 1
        assert account.lease(10) == 0
        shrink(account, 10)
        say(account, demand=10, unmet=10)
        assert account.generation == -1
        assert account.allowance().may_hold_bytes == account.lease_bytes
        with pytest.raises(LedgerError):
            world.actors[0].ledger.snapshot()
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2  # that it is lost, and why it cannot join again yet: each once
    world.path.unlink()
    world.clock.now_seconds += 1
    account.heartbeat()
    assert seen(world)["m"].lease_bytes == 250
    assert account.lease(10) == 10
    world.close()


def test_a_member_that_others_do_not_let_in_again_says_why_once(
    runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(runtime_dir, TOTAL)
    account = join(world)
    grow(account, 300)
    world.path.unlink()
    world.total_bytes = 5000
    newcomer = join(world, "newcomer")
    for _ in range(5):
        world.clock.now_seconds += 1
        account.heartbeat()
        assert not account.registered
    assert caplog.text.count("m cannot join the ledger again yet: host is 1000 bytes here, but newcomer") == 1
    newcomer.leave()
    world.clock.now_seconds += 1
    account.heartbeat()
    assert [(member.name, member.lease_bytes) for member in world.actors[1].ledger.snapshot().members] == [("m", 300)]
    world.close()


def test_a_static_lease_outlasts_the_loss_of_the_file(runtime_dir: Path) -> None:
    world = World(runtime_dir, TOTAL)
    account = join(world)
    world.path.unlink()
    account.static_lease(100, deadline_seconds=5)
    assert seen(world)["m"].static_lease_bytes == 100
    world.close()


def test_an_onlooker_follows_to_the_next_file(runtime_dir: Path) -> None:
    with closing(Ledger.open("host", TOTAL, runtime_dir=runtime_dir)) as ledger:
        assert ledger.snapshot().members == ()
        path = ledger_path(runtime_dir, "host")
        path.unlink()
        other = World(runtime_dir, TOTAL)
        join(other, "new")
        assert other.path == path
        onlooker = Ledger.open("host", None, runtime_dir=runtime_dir)
        assert onlooker is ledger
        assert onlooker.snapshot().total_bytes == TOTAL
        onlooker.close()
        other.close()
