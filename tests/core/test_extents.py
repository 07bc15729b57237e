"""Claims of extents.py, beside naive models."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvcached_core.errors import InvariantError
from kvcached_core.extents import ExtentLists, ExtentPool, Residency

STEPS = {
    # step: the states it is allowed from, and the state it leads to (None: back to the one before)
    "arrived": ({Residency.MAPPING}, Residency.RESIDENT),
    "abandoned": ({Residency.MAPPING}, Residency.ABSENT),
    "retire": ({Residency.RESIDENT}, Residency.RETIRING),
    "departed": ({Residency.RETIRING}, Residency.ABSENT),
    "quarantine": ({Residency.MAPPING, Residency.RETIRING}, Residency.QUARANTINED),
    "restore": ({Residency.QUARANTINED}, None),
}


class PoolBesideModel(RuleBasedStateMachine):
    """Every step on any extents: the pool allows what the model allows, and nothing else changes it."""

    @initialize(num_extents=st.integers(1, 8), data=st.data())
    def start(self, num_extents: int, data: st.DataObject) -> None:
        self.pinned = data.draw(st.sets(st.integers(0, num_extents - 1)))
        self.pool = ExtentPool(num_extents, pinned=self.pinned)
        self.states = [Residency.ABSENT] * num_extents
        self.before: dict[int, Residency] = {}

    @rule(ceiling=st.integers(0, 10))
    def set_ceiling(self, ceiling: int) -> None:
        self.pool.ceiling = ceiling

    @rule(data=st.data())
    def take_absent(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, self.pool.room))
        taken = self.pool.take_absent(n)
        absent = [extent_id for extent_id, state in enumerate(self.states) if state is Residency.ABSENT]
        assert taken == absent[:n]
        for extent_id in taken:
            self.states[extent_id] = Residency.MAPPING

    @rule(excess=st.integers(1, 3))
    def take_more_than_there_is_room_for(self, excess: int) -> None:
        with pytest.raises(InvariantError, match="with room for"):
            self.pool.take_absent(self.pool.room + excess)

    @rule(step=st.sampled_from(sorted(STEPS)), data=st.data())
    def step(self, step: str, data: st.DataObject) -> None:
        sources, target = STEPS[step]
        fitting = [extent_id for extent_id, state in enumerate(self.states) if state in sources]
        ids = data.draw(st.lists(st.sampled_from(fitting), unique=True, max_size=4)) if fitting else []
        if step == "retire" and self.pinned.intersection(ids):
            with pytest.raises(InvariantError, match="never retire"):
                self.pool.retire(ids)
            return
        getattr(self.pool, step)(ids)
        for extent_id in ids:
            if step == "quarantine":
                self.before[extent_id] = self.states[extent_id]
            self.states[extent_id] = self.before.pop(extent_id) if target is None else target

    @rule(step=st.sampled_from(sorted(STEPS)), data=st.data())
    def wrong_step(self, step: str, data: st.DataObject) -> None:
        sources, _ = STEPS[step]
        ids = data.draw(st.lists(st.integers(0, len(self.states) - 1), unique=True, min_size=1, max_size=3))
        if all(self.states[extent_id] in sources for extent_id in ids):
            return
        with pytest.raises(InvariantError):
            getattr(self.pool, step)(ids)

    @precondition(lambda self: Residency.MAPPING in self.states)
    @rule()
    def the_same_extent_twice(self) -> None:
        extent_id = self.states.index(Residency.MAPPING)
        with pytest.raises(InvariantError, match="twice"):
            self.pool.arrived([extent_id, extent_id])

    @invariant()
    def agrees(self) -> None:
        count = self.states.count
        assert [self.pool.state(extent_id) for extent_id in range(len(self.states))] == self.states
        assert self.pool.num_absent == count(Residency.ABSENT)
        assert self.pool.num_resident == count(Residency.RESIDENT)
        assert self.pool.num_moving == count(Residency.MAPPING) + count(Residency.RETIRING)
        assert self.pool.num_quarantined == count(Residency.QUARANTINED)
        held = len(self.states) - self.pool.num_absent
        assert self.pool.room == max(0, min(self.pool.num_absent, self.pool.ceiling - held))


TestPoolBesideModel = PoolBesideModel.TestCase


def test_an_extent_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(InvariantError, match="Extent 4 is unknown, not MAPPING"):
        ExtentPool(4).arrived([4])


def test_a_ceiling_below_use_leaves_no_room_until_enough_has_departed() -> None:
    pool = ExtentPool(8)
    pool.arrived(pool.take_absent(6))
    pool.ceiling = 4
    assert pool.room == 0
    pool.retire([1, 2, 3])
    assert pool.room == 0  # they still hold their memory
    pool.departed([1, 2, 3])
    assert pool.room == 1


def test_a_quarantined_extent_counts_against_the_ceiling() -> None:
    pool = ExtentPool(8)
    pool.ceiling = 2
    pool.quarantine(pool.take_absent(1))
    assert pool.room == 1


class ListsBesideModel(RuleBasedStateMachine):
    """Extents in lists, beside Python's own lists."""

    NUM_EXTENTS, NUM_LISTS = 6, 5

    @initialize()
    def start(self) -> None:
        self.lists = ExtentLists(self.NUM_EXTENTS, self.NUM_LISTS)
        self.model: list[list[int]] = [[] for _ in range(self.NUM_LISTS)]

    @rule(extent_id=st.integers(0, NUM_EXTENTS - 1), list_id=st.integers(0, NUM_LISTS - 1))
    def put(self, extent_id: int, list_id: int) -> None:
        self.lists.put(extent_id, list_id)
        if extent_id not in self.model[list_id]:
            self._forget(extent_id)
            self.model[list_id].append(extent_id)

    @rule(extent_id=st.integers(0, NUM_EXTENTS - 1))
    def discard(self, extent_id: int) -> None:
        self.lists.discard(extent_id)
        self._forget(extent_id)

    def _forget(self, extent_id: int) -> None:
        for members in self.model:
            if extent_id in members:
                members.remove(extent_id)

    @invariant()
    def agrees(self) -> None:
        for list_id, members in enumerate(self.model):
            assert list(self.lists.walk(list_id)) == members
            assert self.lists.length(list_id) == len(members)
            if members:
                assert self.lists.first(list_id) == members[0]
        occupied = [list_id for list_id, members in enumerate(self.model) if members]
        assert self.lists.highest() == max(occupied, default=-1)


TestListsBesideModel = ListsBesideModel.TestCase


@given(st.integers(1, 1000))
def test_a_pool_of_many_extents_gives_the_lowest_first(n: int) -> None:
    pool = ExtentPool(1000)
    assert pool.take_absent(n) == list(range(n))
