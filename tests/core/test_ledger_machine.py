"""Many members beside a naive device: growth, shrinking, limits, outsiders, deaths and stops between any two writes."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvcached_core.account import Account
from kvcached_core.errors import LedgerError

from tests.core.stepped import Actor, World

TOTAL = 1000
HEADROOM = 50
amounts = st.integers(0, 400)
places = st.integers(0, 100)


class Device:
    """What really exists, as a driver would count it."""

    def __init__(self) -> None:
        self.pid_to_pages: dict[int, int] = {}
        self.pid_to_static: dict[int, int] = {}
        self.outsiders = 0
        self.had_outsiders = False

    @property
    def free(self) -> int:
        return TOTAL - self.outsiders - sum(self.pid_to_pages.values()) - sum(self.pid_to_static.values())

    def exit(self, pid: int) -> None:
        """A process ended, however it did."""
        self.pid_to_pages.pop(pid, None)
        self.pid_to_static.pop(pid, None)


class Member:
    """One engine's process: its account, and what it does with it."""

    def __init__(self, actor: Actor, device: Device) -> None:
        self.actor = actor
        self.device = device
        self.account: Account | None = None
        self.refused_by_driver = False

    def join(self, floor: int, ceiling: int | None, weight: float) -> None:
        self.account = self.actor.ledger.join(
            "m", engine="test", floor_bytes=floor, ceiling_bytes=ceiling, weight=weight
        )

    def grow(self, num_bytes: int) -> None:
        assert self.account is not None
        granted = self.account.lease(num_bytes)
        assert 0 <= granted <= num_bytes
        mapped = min(granted, max(0, self.device.free))
        self.refused_by_driver |= mapped < granted
        self.device.pid_to_pages[self.actor.pid] = self.device.pid_to_pages.get(self.actor.pid, 0) + mapped
        self.account.created(mapped)
        self.account.give_back(granted - mapped)

    def shrink(self, num_bytes: int) -> None:
        assert self.account is not None
        num_bytes = min(num_bytes, self.account.created_bytes)
        self.account.destroyed(num_bytes)
        self.device.pid_to_pages[self.actor.pid] = self.device.pid_to_pages.get(self.actor.pid, 0) - num_bytes
        self.account.give_back(num_bytes)

    def follow(self) -> None:
        assert self.account is not None
        allowance = self.account.allowance()
        assert 0 <= allowance.target_bytes <= allowance.ceiling_bytes
        assert allowance.may_hold_bytes >= self.account.lease_bytes
        self.shrink(max(0, self.account.lease_bytes - allowance.target_bytes))

    def load(self, num_bytes: int) -> None:
        assert self.account is not None
        if num_bytes < self.device.pid_to_static.get(self.actor.pid, 0):
            self.account.static_used(num_bytes)
            self.device.pid_to_static[self.actor.pid] = num_bytes
        try:
            self.account.static_lease(num_bytes, deadline_seconds=0.2)
        except LedgerError:
            return
        self.refused_by_driver |= num_bytes - self.device.pid_to_static.get(self.actor.pid, 0) > self.device.free
        self.device.pid_to_static[self.actor.pid] = num_bytes
        self.account.static_used(num_bytes)

    def report(self, demand: int, unmet: int, idle: int, busy: bool) -> None:
        assert self.account is not None
        free = min(idle, self.account.created_bytes)
        self.account.report(
            demand_bytes=demand, unmet_bytes=unmet, free_bytes=free // 2, cached_bytes=free - free // 2, busy=busy
        )


class LedgerMachine(RuleBasedStateMachine):
    """Members of the host budget: what they do not hold is free."""

    asks_driver = False

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvcached-test-", dir="/dev/shm"))
        self.world = World(self.directory, TOTAL, headroom_bytes=HEADROOM)
        self.device = Device()
        self.members: list[Member] = []
        self.onlooker = self._actor()
        self.operator = self._actor()
        self.lowered: set[str] = set()

    def _actor(self) -> Actor:
        return self.world.actor((lambda: self.device.free) if self.asks_driver else None)

    @property
    def ready(self) -> list[Member]:
        return [member for member in self.members if member.account is not None and not member.actor.at_work]

    @property
    def at_work(self) -> list[Member]:
        return [member for member in self.members if member.actor.at_work]

    # --- what happens ----------------------------------------------------------------------------------------

    @initialize(num_members=st.integers(1, 4))
    def some_members(self, num_members: int) -> None:
        for _ in range(num_members):
            self.a_member_joins(0, None, 1.0, done=True)

    @precondition(lambda self: len(self.members) < 8)
    @rule(
        floor=st.integers(0, 100),
        ceiling=st.none() | st.integers(100, TOTAL),
        weight=st.floats(0.1, 10),
        done=st.booleans(),
    )
    def a_member_joins(self, floor: int, ceiling: int | None, weight: float, done: bool) -> None:
        member = Member(self._actor(), self.device)
        self.members.append(member)
        member.actor.start(lambda: member.join(floor, ceiling, weight))
        if done:
            member.actor.finish()

    @precondition(lambda self: self.ready)
    @rule(place=places, num_bytes=amounts)
    def grows(self, place: int, num_bytes: int) -> None:
        member = self.ready[place % len(self.ready)]
        member.actor.start(lambda: member.grow(num_bytes))

    @precondition(lambda self: self.ready)
    @rule(place=places, num_bytes=amounts)
    def shrinks(self, place: int, num_bytes: int) -> None:
        member = self.ready[place % len(self.ready)]
        member.actor.start(lambda: member.shrink(num_bytes))

    @precondition(lambda self: self.ready)
    @rule(place=places)
    def follows_its_allowance(self, place: int) -> None:
        member = self.ready[place % len(self.ready)]
        member.actor.start(member.follow)

    @precondition(lambda self: self.ready)
    @rule(place=places, num_bytes=amounts)
    def loads(self, place: int, num_bytes: int) -> None:
        member = self.ready[place % len(self.ready)]
        member.actor.start(lambda: member.load(num_bytes))

    @precondition(lambda self: self.ready)
    @rule(place=places, demand=amounts, unmet=amounts, idle=amounts, busy=st.booleans())
    def reports(self, place: int, demand: int, unmet: int, idle: int, busy: bool) -> None:
        member = self.ready[place % len(self.ready)]
        member.actor.start(lambda: member.report(demand, unmet, idle, busy))

    @precondition(lambda self: self.at_work)
    @rule(place=places, num_writes=st.integers(1, 8))
    def goes_on_for_a_while(self, place: int, num_writes: int) -> None:
        member = self.at_work[place % len(self.at_work)]
        for _ in range(num_writes):
            member.actor.step()

    @precondition(lambda self: self.at_work)
    @rule(place=places)
    def finishes(self, place: int) -> None:
        self.at_work[place % len(self.at_work)].actor.finish()

    @precondition(lambda self: self.members)
    @rule(place=places)
    def is_killed(self, place: int) -> None:
        member = self.members[place % len(self.members)]
        member.actor.kill()
        self.members.remove(member)
        self.device.exit(member.actor.pid)

    @precondition(lambda self: self.ready)
    @rule(place=places, ceiling=st.integers(100, TOTAL), weight=st.floats(0.1, 10), num_writes=st.integers(1, 12))
    def an_operator_changes_limits(self, place: int, ceiling: int, weight: float, num_writes: int) -> None:
        member = self.ready[place % len(self.ready)]
        assert member.account is not None
        name = member.account.name
        self.lowered.add(name)
        self.operator.start(lambda: self.operator.ledger.set_limits(name, ceiling_bytes=ceiling, weight=weight))
        for _ in range(num_writes):
            self.operator.step()
        if self.operator.at_work:
            self.operator.kill()
            self.operator = self._actor()

    @precondition(lambda self: self.ready)
    @rule(place=places, num_bytes=amounts)
    def an_operator_asks_for_a_trim(self, place: int, num_bytes: int) -> None:
        member = self.ready[place % len(self.ready)]
        assert member.account is not None
        name = member.account.name
        self.operator.do(lambda: self.operator.ledger.request_trim(name, num_bytes))

    @rule(seconds=st.floats(0.1, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.world.clock.now_seconds += seconds

    # --- what always holds -----------------------------------------------------------------------------------

    @invariant()
    def identities_hold(self) -> None:
        device = self.onlooker.ledger.snapshot()
        for member in device.members:
            assert member.resident_bytes <= member.lease_bytes
            if member.name not in self.lowered:
                assert member.lease_bytes <= member.ceiling_bytes
            assert all(value >= 0 for value in asdict(member).values() if not isinstance(value, str))
        assert len({member.name for member in device.members}) == len(device.members)
        assert sum(member.lease_bytes + member.static_lease_bytes for member in device.members) <= TOTAL - HEADROOM
        assert 0 <= device.unleased_bytes <= max(0, TOTAL - HEADROOM)

    @invariant()
    def what_exists_is_leased(self) -> None:
        seen = {member.slot: member for member in self.onlooker.ledger.snapshot().members}
        for member in self.members:
            if member.account is not None:
                pid, statistics = member.actor.pid, seen[member.account.slot]
                assert self.device.pid_to_pages.get(pid, 0) <= statistics.lease_bytes
                assert self.device.pid_to_static.get(pid, 0) <= statistics.static_lease_bytes

    @invariant()
    def what_is_granted_is_there(self) -> None:
        if not self.device.had_outsiders:
            assert not any(member.refused_by_driver for member in self.members)

    # --- in the end ------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            for member in self.members:
                if member.actor.at_work:
                    member.actor.finish()
            self.identities_hold()
            for member in self.members:
                member.actor.kill()
                self.device.exit(member.actor.pid)
            newcomer = self._actor().ledger.join("newcomer", engine="test")
            assert newcomer.lease(TOTAL) == max(0, TOTAL - HEADROOM - self.device.outsiders)
            assert [member.name for member in self.onlooker.ledger.snapshot().members] == ["newcomer"]
        finally:
            self.world.close()
            shutil.rmtree(self.directory)


class DeviceMachine(LedgerMachine):
    """Members of a device with a driver to ask, and processes that no ledger knows."""

    asks_driver = True

    @rule(num_bytes=amounts)
    def outsiders_take_and_free(self, num_bytes: int) -> None:
        self.device.outsiders = min(num_bytes, self.device.outsiders + max(0, self.device.free))
        self.device.had_outsiders = True


budget = settings(max_examples=40, stateful_step_count=40)
TestHostLedger = LedgerMachine.TestCase
TestHostLedger.settings = budget
TestDeviceLedger = DeviceMachine.TestCase
TestDeviceLedger.settings = budget
