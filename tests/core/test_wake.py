"""Claims of wake.py."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kvcached_core.wake import wake


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
