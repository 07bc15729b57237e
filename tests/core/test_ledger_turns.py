"""Admission, with members stopped and killed between any two writes: leases never exceed the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvcached_core.account import Account
from kvcached_core.errors import LedgerError
from kvcached_core.ledger_file import STEAL_AFTER_SECONDS

from tests.core.stepped import Actor, World

TOTAL = 100


@dataclass
class Run:
    """Two members, each about to do something, and an onlooker."""

    world: World
    actors: list[Actor]
    operations: list[Callable[[], object]]
    onlooker: Actor

    def leases(self) -> list[int]:
        rows, _ = self.onlooker.ledger._file.read()
        for row in rows:
            assert row.figures.created_bytes <= row.figures.lease_bytes
        return [row.figures.lease_bytes + row.figures.static_lease_bytes for row in rows]

    def proposals(self) -> list[int]:
        rows, _ = self.onlooker.ledger._file.read()
        return [row.figures.proposed_bytes + row.figures.static_proposed_bytes for row in rows]


def replay(make: Callable[[], Run], switches: tuple[int, ...]) -> list[bool]:
    """Let the two take turns at writing: a switch to the other one before the writes with these numbers.

    Returns:
        For each write that was done, whether the other one could have done its next instead.
    """
    run = make()
    try:
        for actor, operation in zip(run.actors, run.operations, strict=True):
            actor.start(operation)
        current, possible = 0, list[bool]()
        while any(actor.at_work for actor in run.actors):
            if len(possible) in switches or not run.actors[current].at_work:
                current = 1 - current
            possible.append(run.actors[1 - current].at_work)
            run.actors[current].step()
            assert sum(run.leases()) <= TOTAL
        for actor in run.actors:
            assert actor.error is None, actor.error
        assert not any(run.proposals())
    finally:
        run.world.close()
        run.world.path.unlink()
    return possible


def interleavings(make: Callable[[], Run], most_switches: int) -> Iterator[tuple[int, ...]]:
    """Replay every schedule with at most so many switches; yields each."""
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        switches = waiting.pop()
        possible = replay(make, switches)
        yield switches
        if len(switches) < most_switches:
            later = range(switches[-1] + 1 if switches else 0, len(possible))
            waiting += [(*switches, place) for place in later if possible[place]]


Operation = Callable[[Account], object]


def ask(account: Account) -> int:
    return account.lease(60)


def ask_static(account: Account) -> bool:
    try:
        account.static_lease(60, deadline_seconds=0.3)
    except LedgerError:
        return False
    return True


def give_back_and_ask(account: Account) -> int:
    account.give_back(account.lease_bytes)
    return account.lease(80)


@pytest.mark.parametrize(
    ("first", "second", "most_switches"),
    [
        (ask, ask, 4),
        (ask, ask_static, 3),
        (ask_static, ask_static, 3),
        (give_back_and_ask, ask, 3),
        (give_back_and_ask, give_back_and_ask, 3),
    ],
)
def test_two_members_never_get_more_than_there_is(
    runtime_dir: Path, first: Operation, second: Operation, most_switches: int
) -> None:
    def make() -> Run:
        world = World(runtime_dir, TOTAL)
        actors = [world.actor(), world.actor()]
        accounts = [actor.ledger.join("m", engine="test") for actor in actors]
        for account in accounts:
            account.lease(10)
        operations = [lambda: first(accounts[0]), lambda: second(accounts[1])]
        return Run(world, actors, operations, world.actor())

    assert sum(1 for _ in interleavings(make, most_switches)) > 40


def test_two_that_join_get_two_names(runtime_dir: Path) -> None:
    def make() -> Run:
        world = World(runtime_dir, TOTAL)
        actors = [world.actor(), world.actor()]
        names: list[str] = []

        def join(actor: Actor) -> Callable[[], None]:
            return lambda: names.append(actor.ledger.join("m", engine="test").name)

        made.append(names)
        return Run(world, actors, [join(actor) for actor in actors], world.actor())

    made: list[list[str]] = []
    for _ in interleavings(make, most_switches=2):
        assert sorted(made[-1]) == ["m", "m-2"]


# --- one member is killed, or stopped, at each of its writes -------------------------------------------------------


def grow(account: Account) -> None:
    account.created(account.lease(30))


def shrink(account: Account) -> None:
    account.destroyed(20)
    account.give_back(20)


def report(account: Account) -> None:
    account.report(demand_bytes=7, unmet_bytes=5, free_bytes=3, cached_bytes=2, busy=True)


def hold_static(account: Account) -> None:
    with suppress(LedgerError):
        account.static_lease(20, deadline_seconds=1.0)
        account.static_used(20)


def leave(account: Account) -> None:
    account.destroyed(20)
    account.leave()


@dataclass
class Place:
    """A member stopped at one write of one operation, another member, and a neighbour that died before."""

    world: World
    victim: Actor
    account: Account
    other: Account
    other_actor: Actor


def places(runtime_dir: Path, operation: Operation) -> Iterator[Place]:
    """The same scene for every write of an operation: the victim stands before it."""
    for place in range(1000):
        world = World(runtime_dir, TOTAL)
        dead, victim, other_actor = world.actor(), world.actor(), world.actor()
        dead.ledger.join("dead", engine="test").lease(25)
        dead.kill()
        account = victim.ledger.join("victim", engine="test")
        other = other_actor.ledger.join("other", engine="test")
        account.created(account.lease(20))
        victim.start(lambda account=account: operation(account))  # type: ignore[misc]
        for _ in range(place):
            victim.step()
        beyond = not victim.at_work
        yield Place(world, victim, account, other, other_actor)
        world.close()
        world.path.unlink()
        if beyond:
            assert place > 0
            return


@pytest.mark.parametrize("operation", [grow, shrink, report, hold_static, leave])
def test_a_member_killed_at_any_write_leaves_all_it_had(runtime_dir: Path, operation: Operation) -> None:
    for place in places(runtime_dir, operation):
        place.victim.kill()
        assert place.other.lease(TOTAL) == TOTAL
        assert [member.name for member in place.other_actor.ledger.snapshot().members] == ["other"]


@pytest.mark.parametrize("operation", [grow, shrink, report, hold_static, leave])
def test_a_member_stopped_at_any_write_keeps_what_it_has_and_no_more(runtime_dir: Path, operation: Operation) -> None:
    for place in places(runtime_dir, operation):
        before = place.world.clock.seconds()
        granted = place.other.lease(TOTAL)
        assert place.world.clock.seconds() - before < 2 * STEAL_AFTER_SECONDS
        assert granted >= TOTAL - 50  # 20, and at most 30 more that it is being granted
        place.victim.finish()
        members = {member.name: member for member in place.other_actor.ledger.snapshot().members}
        held = [member.lease_bytes + member.static_lease_bytes for member in members.values()]
        assert sum(held) <= TOTAL
        assert members["other"].lease_bytes == granted


@pytest.mark.parametrize("operation", [grow, shrink, report, hold_static, leave])
def test_identities_hold_before_every_write(runtime_dir: Path, operation: Operation) -> None:
    for place in places(runtime_dir, operation):
        for member in place.other_actor.ledger.snapshot().members:
            assert 0 <= member.resident_bytes <= member.lease_bytes <= member.ceiling_bytes


def test_a_member_killed_while_joining_was_never_there_or_is_gone(runtime_dir: Path) -> None:
    writes = 0
    for place in range(1000):
        world = World(runtime_dir, TOTAL)
        victim, other = world.actor(), world.actor().ledger.join("other", engine="test")
        victim.start(lambda victim=victim: victim.ledger.join("victim", engine="test"))  # type: ignore[misc]
        for _ in range(place):
            victim.step()
        beyond = not victim.at_work
        victim.kill()
        assert [member.name for member in world.actors[1].ledger.snapshot().members] == ["other"]
        assert world.actor().ledger.join("victim", engine="test").name == "victim"
        assert other.lease(TOTAL) == TOTAL
        world.close()
        world.path.unlink()
        writes = place
        if beyond:
            break
    assert writes == 6


def test_an_operator_killed_at_any_write_leaves_whole_limits(runtime_dir: Path) -> None:
    seen = set()
    for place in range(1000):
        world = World(runtime_dir, TOTAL)
        member, operator, second = world.actor(), world.actor(), world.actor()
        account = member.ledger.join("m", engine="test", floor_bytes=10, ceiling_bytes=50)
        operator.start(lambda operator=operator: operator.ledger.set_limits("m", floor_bytes=20, ceiling_bytes=60))  # type: ignore[misc]
        for _ in range(place):
            operator.step()
        beyond = not operator.at_work
        [found] = second.ledger.snapshot().members
        seen.add((found.floor_bytes, found.ceiling_bytes))
        operator.kill()
        second.ledger.set_limits("m", weight=2.0)
        [found] = second.ledger.snapshot().members
        assert (found.floor_bytes, found.ceiling_bytes) in seen
        assert found.weight == 2.0
        assert account.allowance().ceiling_bytes == found.ceiling_bytes
        world.close()
        world.path.unlink()
        if beyond:
            break
    assert seen == {(10, 50), (20, 60)}


# --- examples that were hard to think of ---------------------------------------------------------------------------


def test_a_late_stealer_does_not_make_an_old_turn_look_current(runtime_dir: Path) -> None:
    world = World(runtime_dir, TOTAL)
    first, second, late, fourth = (world.actor() for _ in range(4))
    accounts = [actor.ledger.join("m", engine="test") for actor in (first, second, late, fourth)]

    def ask_all(account: Account) -> Callable[[], int]:
        return lambda: account.lease(TOTAL)

    first.start(ask_all(accounts[0]))  # stopped in its turn, epoch 0, before its proposal
    late.start(ask_all(accounts[2]))  # waited, is about to raise the epoch to 1, and is stopped
    assert late.word == "epoch"
    second.start(ask_all(accounts[1]))  # the same, and does
    while second.word != "proposed_bytes":
        second.step()  # in its turn, epoch 1, has read that all is free
    assert fourth.do(ask_all(accounts[3])) == TOTAL  # epoch 2
    late.step()  # stores its 1
    assert second.finish() == 0
    assert late.finish() == 0
    assert first.finish() == 0
    assert accounts[3].lease_bytes == TOTAL
    world.close()


def test_a_stopped_sweeper_resurrects_nobody(runtime_dir: Path) -> None:
    world = World(runtime_dir, TOTAL)
    dead, sweeper, other = (world.actor() for _ in range(3))
    dead.ledger.join("dead", engine="test").lease(TOTAL)
    dead.kill()
    sweeper.start(sweeper.ledger._file.sweep)
    assert sweeper.word == "tenure"
    assert other.ledger.join("other", engine="test").lease(TOTAL) == TOTAL
    sweeper.finish()
    assert [member.name for member in other.ledger.snapshot().members] == ["other"]
    world.close()


def test_more_stopped_holders_than_a_turn_can_wait_for_one_by_one(runtime_dir: Path) -> None:
    world = World(runtime_dir, TOTAL)
    stopped = [world.actor() for _ in range(20)]
    for actor in stopped:
        account = actor.ledger.join("m", engine="test")
        actor.start(lambda account=account: account.lease(1))  # type: ignore[misc]
        while actor.word != "proposed_bytes":
            actor.step()  # raises the epoch over those before it
    assert world.actor().ledger.join("other", engine="test").lease(TOTAL) == TOTAL
    assert {actor.finish() for actor in stopped} == {0}
    world.close()
