"""Ranks of one group decide alike, whatever each one's ledger and speed."""

from __future__ import annotations

import random

import pytest
from kvcached_core.orders import Map
from kvcached_sglang.agreement import Agreement
from kvcached_sglang.demand import Demand

from tests.sglang.fakes import NO_LIMIT, FakeHands, kinds
from tests.sglang.scene import EXTENT_BYTES, Scene, demand, in_lockstep

WANTED = demand(1000, running=10)


def scenes_with(*hands: FakeHands):
    return lambda rank, agreement: Scene(hands=hands[rank], agreement=agreement)


def free_lists(scenes: list[Scene]) -> list[list[int]]:
    return [scene.space.free_list.free_pages.tolist() for scene in scenes]


def test_ranks_stop_at_the_one_with_the_least_room():
    def steps(rank: int, scene: Scene) -> None:
        scene.settle(WANTED)

    scenes = in_lockstep(2, scenes_with(FakeHands(), FakeHands(room_bytes=3 * EXTENT_BYTES)), steps)
    assert [scene.num_resident for scene in scenes] == [4, 4]
    assert free_lists(scenes)[0] == free_lists(scenes)[1]


def test_extents_join_only_when_every_rank_has_mapped_them():
    def steps(rank: int, scene: Scene) -> None:
        if rank == 1:
            scene.hands.on_wait = lambda: None
        scene.clock.seconds = 1000.0
        scene.ticker.tick(demand(10, ahead=500, running=1))
        for _ in range(20):
            if rank == 0:
                scene.hands.carry_out()
            scene.tick(demand(10, ahead=500, running=1))
        assert scene.num_resident == 1
        scene.hands.carry_out()
        for _ in range(20):
            scene.tick(demand(10, ahead=500, running=1))

    scenes = in_lockstep(2, scenes_with(FakeHands(), FakeHands()), steps)
    assert [scene.num_resident for scene in scenes] == [8, 8]


def test_when_one_rank_fails_the_others_unmap_and_the_next_try_is_right():
    def steps(rank: int, scene: Scene) -> None:
        if rank == 1:
            scene.hands.fail_next = "no page"
        for _ in range(60):
            scene.hands.carry_out()
            scene.tick(demand(10, ahead=500, running=1), after_seconds=0.005)

    scenes = in_lockstep(2, scenes_with(FakeHands(), FakeHands()), steps)
    assert kinds(scenes[0].hands.log).startswith("mum")
    assert kinds(scenes[1].hands.log).startswith("mm")
    assert [scene.num_resident for scene in scenes] == [8, 8]
    maps = [[order.block_ranges for order in scene.hands.log if isinstance(order, Map)] for scene in scenes]
    assert maps[0][0] == maps[0][1] == maps[1][0] == maps[1][1]


def test_what_one_rank_owes_leaves_on_all():
    def steps(rank: int, scene: Scene) -> None:
        scene.settle(WANTED)
        if rank == 1:
            scene.hands.owed_bytes = 2 * EXTENT_BYTES
            scene.hands.say()
        for _ in range(40):
            scene.tick(demand(10, running=1))

    scenes = in_lockstep(2, scenes_with(FakeHands(), FakeHands()), steps)
    assert kinds(scenes[0].hands.log) == kinds(scenes[1].hands.log)
    assert free_lists(scenes)[0] == free_lists(scenes)[1]


def test_agreements_are_rare_while_nothing_is_short():
    def steps(rank: int, scene: Scene) -> None:
        for _ in range(160):
            scene.tick(demand(1, running=1))

    scenes = in_lockstep(2, scenes_with(FakeHands(), FakeHands()), steps)
    assert scenes[0].ticker.statistics.agreements == 10


def test_one_rank_alone_makes_no_collective():
    assert Agreement(None).least([3, 1]) == [3, 1]


@pytest.mark.parametrize("seed", range(12))
def test_random_ranks_never_part(seed):
    """Rooms, failures, debts and speeds differ from rank to rank; what the scheduler sees never does."""
    num_ranks = 2 + seed % 2
    shared = random.Random(seed)
    plan = [
        Demand(
            decode=shared.choice([0, 5, 200, 900]),
            ahead=shared.choice([0, 300]),
            running=shared.choice([0, 1, 8]),
            pledged=(pledged := shared.choice([0, 0, 0, 400])),
            prefill=pledged,
        )
        for _ in range(120)
    ]
    sizes = [shared.choice([0, 0, 1, 30, 120]) for _ in plan]
    seen: list[list[tuple[object, ...]]] = [[] for _ in range(num_ranks)]

    def steps(rank: int, scene: Scene) -> None:
        own = random.Random(1000 * seed + rank)
        held = []

        def behave() -> None:
            scene.clock.seconds += own.choice([0.001, 0.02])
            if own.random() < 0.6:
                scene.hands.carry_out()

        scene.hands.on_wait = behave
        for wanted, size in zip(plan, sizes, strict=True):
            behave()
            if own.random() < 0.2:
                scene.hands.room_bytes = own.choice([0, 2, 10, 40]) * EXTENT_BYTES
                scene.hands.owed_bytes = own.choice([0, 0, 3]) * EXTENT_BYTES
                scene.hands.must = own.random() < 0.3
                scene.hands.ceiling_bytes = own.choice([NO_LIMIT, 12 * EXTENT_BYTES])
                scene.hands.say()
            if own.random() < 0.1:
                scene.hands.fail_next = "no page"
            scene.ticker.tick(wanted)
            if size and size <= scene.space.free_tokens:
                held.append(scene.space.free_list.alloc(size))
            elif held:
                scene.space.free_list.free(held.pop(0))
            space = scene.space
            seen[rank].append(
                (tuple(space.free_list.free_pages.tolist()), space.credit_tokens, space.extents.num_resident)
            )
            assert space.free_list.conserved_size() == space.num_usable_tokens - sum(map(len, held))

    in_lockstep(num_ranks, scenes_with(*(FakeHands() for _ in range(num_ranks))), steps)
    for step, rows in enumerate(zip(*seen, strict=True)):
        assert len(set(rows)) == 1, f"ranks part at step {step}"
