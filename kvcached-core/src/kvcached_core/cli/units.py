"""One unit for all the numbers of a device, so that a column can be read downwards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """What byte counts of one device are shown in."""

    name: str
    num_bytes: int

    def bare(self, num_bytes: int) -> str:
        """``9.2``"""
        return f"{num_bytes / self.num_bytes:.1f}"

    def full(self, num_bytes: int) -> str:
        """``9.2 GiB``"""
        return f"{self.bare(num_bytes)} {self.name}"

    @classmethod
    def of(cls, capacity_bytes: int) -> Unit:
        """GiB, or MiB on a device so small (the host's budget in a test or a demo) that tenths of a GiB are coarse."""
        return GIB if capacity_bytes >= 16 * GIB.num_bytes else MIB


MIB = Unit("MiB", 1 << 20)
GIB = Unit("GiB", 1 << 30)
