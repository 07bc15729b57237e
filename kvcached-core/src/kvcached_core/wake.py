"""When a background thread wakes up, at the least cost to the engine's thread beside it.

Both want the interpreter's lock. A thread that wakes up asks for it again and again, up to 5 ms long, while an engine
that launches a model lets go of it and takes it back all the time; then it has it for as long as it works. A look
around of 0.35 ms made the engine's thread a millisecond late, which at 50 looks a second was 4 to 8 % of the steps of
one that sets the pace for its device (``benchmarks/turns.py``). So a thread is woken where there is something to do,
and not to find out that there is nothing: the engine's thread, which comes by at every step, sees that at less cost.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

# ``os.eventfd_write`` lets go of the interpreter's lock for the call. The thread that it wakes takes the lock at once
# and keeps it for all that it has to do: an engine's thread waited 0.3 to 2 ms at each kick of its agent. A call
# through PyDLL keeps the lock, so the woken thread runs when this one next blocks.
_libc = ctypes.PyDLL(None, use_errno=True)


class _TimerSpec(ctypes.Structure):
    """``struct itimerspec`` (timerfd_settime(2))."""

    _fields_ = (
        ("interval_seconds", ctypes.c_long),
        ("interval_nanoseconds", ctypes.c_long),
        ("value_seconds", ctypes.c_long),
        ("value_nanoseconds", ctypes.c_long),
    )


_libc.eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)
_libc.timerfd_create.argtypes = (ctypes.c_int, ctypes.c_int)
_libc.timerfd_settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_TimerSpec), ctypes.c_void_p)


def wake(eventfd: int) -> None:
    """Make an eventfd readable."""
    _libc.eventfd_write(eventfd, 1)


def drain(eventfd: int) -> None:
    """Make an eventfd unreadable."""
    with suppress(BlockingIOError):
        os.eventfd_read(eventfd)


class Alarm:
    """What a background thread sleeps by: it rings when somebody wants the thread, and every so often.

    The engine's thread comes by at every step, and once in a period looks for itself: as long as all is calm, it
    snoozes the alarm. When its steps end, or one takes long, the alarm rings two periods after it looked.
    """

    def __init__(self, period_seconds: float, *, now: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            period_seconds: How long the thread sleeps at most, unless snoozed.
            now: A monotonic clock.

        Raises:
            OSError: The process has no descriptors left.
        """
        self._period_seconds = period_seconds
        self._now = now
        self._rung = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._timer = _made(_libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        self._once, self._twice = _spec(period_seconds), _spec(2 * period_seconds)
        self._asleep = False
        self._look_at = 0.0
        # Not at exit: a daemon thread may still sleep by them.
        weakref.finalize(self, _close, self._rung, self._timer).atexit = False

    def ring(self) -> None:
        """Wake the thread, or keep it from falling asleep. Any thread."""
        wake(self._rung)

    def sleep(self, also: Sequence[int] = ()) -> list[int]:
        """Until it rings, or one of these descriptors is readable. The background thread.

        Returns:
            Those of ``also`` that are readable.
        """
        waiting = select.poll()  # takes descriptors of any number, which select does not
        for descriptor in (self._rung, self._timer, *also):
            waiting.register(descriptor, select.POLLIN)
        self._set(self._once)
        self._asleep = True
        ready = {descriptor for descriptor, _ in waiting.poll()}
        self._asleep = False
        drain(self._rung)
        return [descriptor for descriptor in also if descriptor in ready]

    def snooze(self, is_calm: Callable[[], bool]) -> None:
        """Let the thread sleep on if that is so. It asks once in a period at most. The engine's thread."""
        if not self._asleep or (now := self._now()) < self._look_at:
            return
        self._look_at = now + self._period_seconds
        if is_calm():
            self._set(self._twice)

    def _set(self, spec: _TimerSpec) -> None:
        _made(_libc.timerfd_settime(self._timer, 0, ctypes.byref(spec), None))


def _spec(seconds: float) -> _TimerSpec:
    """Once, after so long."""
    whole, fraction = divmod(seconds, 1)
    return _TimerSpec(0, 0, int(whole), int(fraction * 1e9))


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _made(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
