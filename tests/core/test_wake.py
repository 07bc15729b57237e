"""Claims of wake.py."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import resource
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from kvcached_core.wake import Alarm, drain, wake


@pytest.fixture
def eventfd() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    yield fd
    os.close(fd)


@contextmanager
def no_switching() -> Iterator[None]:
    """A thread keeps the interpreter's lock until it blocks by itself."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def test_it_makes_an_eventfd_readable(eventfd: int) -> None:
    wake(eventfd)
    wake(eventfd)
    assert select.select([eventfd], [], [], 0)[0] == [eventfd]
    assert os.eventfd_read(eventfd) == 2


def test_a_drained_eventfd_is_not_readable(eventfd: int) -> None:
    drain(eventfd)
    wake(eventfd)
    drain(eventfd)
    assert select.select([eventfd], [], [], 0)[0] == []


def test_the_woken_thread_runs_only_when_this_one_blocks(eventfd: int) -> None:
    woken = threading.Event()

    def wait() -> None:
        select.select([eventfd], [], [], 10.0)
        woken.set()

    thread = threading.Thread(target=wait)
    with no_switching():
        thread.start()
        ran_before_we_blocked = []
        for _ in range(200):
            wake(eventfd)
            ran_before_we_blocked.append(woken.is_set())
        thread.join(10.0)
    assert not any(ran_before_we_blocked)
    assert woken.is_set()


# --- alarms -----------------------------------------------------------------------------------------------------------

NEVER = 3600.0


class Sleeper(threading.Thread):
    """Sleeps by an alarm until it is told to stop.

    Attributes:
        wakes: How often it woke up.
    """

    def __init__(self, alarm: Alarm) -> None:
        super().__init__(daemon=True)
        self.wakes = 0
        self._alarm = alarm
        self._stopping = False

    def run(self) -> None:
        while not self._stopping:
            self._alarm.sleep()
            self.wakes += 1

    def stop(self) -> None:
        self._stopping = True
        self._alarm.ring()
        self.join(10.0)
        assert not self.is_alive()


@contextmanager
def sleeping_by(alarm: Alarm) -> Iterator[Sleeper]:
    sleeper = Sleeper(alarm)
    sleeper.start()
    until(lambda: alarm._asleep)
    try:
        yield sleeper
    finally:
        sleeper.stop()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_an_alarm_rings_after_its_period_again_and_again() -> None:
    with sleeping_by(Alarm(0.01)) as sleeper:
        until(lambda: sleeper.wakes >= 3)


def test_an_alarm_that_is_rung_wakes_at_once_also_a_thread_that_was_about_to_sleep() -> None:
    alarm = Alarm(NEVER)
    alarm.ring()
    alarm.ring()
    assert alarm.sleep() == []
    with sleeping_by(alarm) as sleeper:
        assert sleeper.wakes == 0
        alarm.ring()
        until(lambda: sleeper.wakes == 1)


def test_it_names_the_descriptors_that_woke_it(eventfd: int) -> None:
    other = os.eventfd(0)
    wake(eventfd)
    assert Alarm(NEVER).sleep([other, eventfd]) == [eventfd]
    os.close(other)


def test_a_descriptor_may_have_any_number(eventfd: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= 1500:
        pytest.skip(f"a process may have {hard} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, hard))
    try:
        high = fcntl.fcntl(eventfd, fcntl.F_DUPFD_CLOEXEC, 1500)
        wake(high)
        assert Alarm(NEVER).sleep([high]) == [high]
        os.close(high)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_snoozed_alarm_does_not_ring_and_rings_when_nobody_comes_by_any_more() -> None:
    period, passes = 0.1, 40
    for _ in range(10):
        alarm = Alarm(period)
        with sleeping_by(alarm) as sleeper:
            longest, before = 0.0, time.monotonic()
            for _ in range(passes):
                alarm.snooze(lambda: True)
                time.sleep(period / 10)
                longest, before = max(longest, time.monotonic() - before), time.monotonic()
            if longest < period / 2:  # else this thread got no processor: that says nothing
                assert sleeper.wakes == 0
                until(lambda: sleeper.wakes > 0)
                return
    pytest.fail("no turn of this thread without a pause of half a period in ten tries")


def test_an_alarm_rings_as_ever_while_there_is_something_to_do() -> None:
    alarm = Alarm(0.01)
    with sleeping_by(alarm) as sleeper:
        deadline = time.monotonic() + 10
        while sleeper.wakes < 3:
            alarm.snooze(lambda: False)
            time.sleep(0.001)
            assert time.monotonic() < deadline


def test_whether_all_is_calm_is_asked_once_in_a_period_and_only_while_the_thread_sleeps() -> None:
    seconds, asked = 0.0, []

    def is_calm() -> bool:
        asked.append(seconds)
        return True

    alarm = Alarm(NEVER, now=lambda: seconds)
    alarm.snooze(is_calm)
    assert asked == []  # it is awake
    with sleeping_by(alarm):
        for _ in range(10):
            alarm.snooze(is_calm)
            seconds += NEVER / 4
    assert asked == [0.0, NEVER, 2 * NEVER]


def test_a_timer_that_cannot_be_set_is_an_error(eventfd: int) -> None:
    alarm = Alarm(NEVER)
    alarm._timer = eventfd
    with pytest.raises(OSError) as raised:
        alarm.sleep()
    assert raised.value.errno == errno.EINVAL


def test_an_alarm_that_nobody_has_any_more_leaves_no_descriptors() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    alarm = Alarm(NEVER)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    del alarm
    assert len(os.listdir("/proc/self/fd")) == before
