"""Contracts and faults for tests, of this package and of backends that come from elsewhere."""

from kvcached_core.testing.arena import FailingBackend, check_arena

__all__ = ["FailingBackend", "check_arena"]
