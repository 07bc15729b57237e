"""Sizes as people write them: ``512MiB``, ``20GiB``, ``25%``, or a bare number of bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from kvcached_core.errors import ConfigError

ACCEPTED_FORM = "512MiB, 20GiB, 25% (at most 100%) or a whole number of bytes"

_UNIT_BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_WRITTEN = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>[KMGT]iB|%)?")
_MAX_BYTES = 2**63 - 1


@dataclass(frozen=True)
class Size:
    """A number of bytes, or a share of a total that is known later.

    Attributes:
        num_bytes: Bytes; None when this is a share.
        share: Part of a total, 0 to 1; None when this is a number of bytes.
    """

    num_bytes: int | None = None
    share: Fraction | None = None

    def __post_init__(self) -> None:
        if (self.num_bytes is None) == (self.share is None):
            raise ConfigError(f"a size is bytes or a share of a total, not both or neither: {self!r}")

    def resolve(self, total_bytes: int) -> int:
        """Bytes, rounded down, when the total is ``total_bytes``."""
        if self.num_bytes is not None:
            return self.num_bytes
        assert self.share is not None
        return int(self.share * total_bytes)

    def __str__(self) -> str:
        """In the form that :func:`parse_size` accepts; a share to six digits."""
        if self.share is not None:
            return f"{float(self.share * 100):g}%"
        assert self.num_bytes is not None
        for unit, unit_bytes in reversed(_UNIT_BYTES.items()):
            if self.num_bytes and self.num_bytes % unit_bytes == 0:
                return f"{self.num_bytes // unit_bytes}{unit}"
        return str(self.num_bytes)


def parse_size(text: str) -> Size:
    """Read a size.

    Strict, because the same letters mean different things to different programs: ``12G`` is 2**30 to vLLM and
    10**9 to others, and pydantic's ``ByteSize`` reads ``80%`` as 80 bytes.

    Args:
        text: ``512MiB``, ``1.5GiB``, ``25%``, ``1048576``. Units are KiB, MiB, GiB, TiB and % of a total, at most
            100%. No spaces, no sign, no other unit.

    Raises:
        ConfigError: Anything else, with the value and the accepted form.
    """
    written = _WRITTEN.fullmatch(text)
    if written is None:
        raise ConfigError(f"{text!r} is not a size: write {ACCEPTED_FORM}")
    number, unit = Fraction(written["number"]), written["unit"]
    if unit == "%":
        if number > 100:
            raise ConfigError(f"{text!r} is more than all there is: write {ACCEPTED_FORM}")
        return Size(share=number / 100)
    if unit is None and number.denominator != 1:
        raise ConfigError(f"{text!r} has a fraction of a byte: write {ACCEPTED_FORM}")
    num_bytes = int(number * _UNIT_BYTES.get(unit, 1))
    if num_bytes > _MAX_BYTES:
        raise ConfigError(f"{text!r} is more than {_MAX_BYTES} bytes")
    return Size(num_bytes=num_bytes)


def format_bytes(num_bytes: int) -> str:
    """Bytes for people: ``"9.20 GiB"``, ``"512.00 MiB"``, ``"17 B"``; the sign is kept."""
    for unit, unit_bytes in reversed(_UNIT_BYTES.items()):
        if abs(num_bytes) >= unit_bytes:
            return f"{num_bytes / unit_bytes:.2f} {unit}"
    return f"{num_bytes} B"
