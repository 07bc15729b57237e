"""Waking a thread that waits for an eventfd, without waiting for that thread."""

from __future__ import annotations

import ctypes

# ``os.eventfd_write`` lets go of the interpreter's lock for the call. The thread that it wakes takes the lock at once
# and keeps it for all that it has to do: an engine's thread waited 0.3 to 2 ms at each kick of its agent. A call
# through PyDLL keeps the lock, so the woken thread runs when this one next blocks.
_libc = ctypes.PyDLL(None)
_libc.eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)


def wake(eventfd: int) -> None:
    """Make an eventfd readable."""
    _libc.eventfd_write(eventfd, 1)
