from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcached_core.errors import ConfigError
from kvcached_core.sizes import Size, format_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1048576", 2**20),
        ("1KiB", 2**10),
        ("512MiB", 512 * 2**20),
        ("20GiB", 20 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("2TiB", 2**41),
        ("0.3MiB", 314572),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_bytes_are_read_in_binary_units(text: str, num_bytes: int) -> None:
    assert parse_size(text) == Size(num_bytes=num_bytes)
    assert parse_size(text).resolve(7) == num_bytes


@pytest.mark.parametrize(
    ("text", "of_80_gib"), [("25%", 20 * 2**30), ("0%", 0), ("100%", 80 * 2**30), ("12.5%", 10 * 2**30)]
)
def test_a_share_is_of_the_total(text: str, of_80_gib: int) -> None:
    assert parse_size(text).resolve(80 * 2**30) == of_80_gib


@pytest.mark.parametrize(
    "text",
    [
        *("12G", "12g", "12GB", "12gib", "12 GiB", " 12GiB", "12GiB\n", "80 %", "%", "", "GiB"),
        *("-1", "+1", "-1GiB", "1e3", "0x10", "1_000", "1,5GiB", ".5GiB", "5.GiB", "1.5", "nan", "inf"),
        *("100.1%", "1000%", "9223372036854775808", "99999999TiB", "١GiB", "12GiBMiB"),
    ],
)
def test_anything_else_is_refused_with_the_value_and_the_accepted_form(text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_size(text)
    assert repr(text) in str(refusal.value)
    assert "bytes" in str(refusal.value)


@given(st.integers(0, 2**63 - 1))
def test_a_size_in_bytes_reads_back_as_itself(num_bytes: int) -> None:
    assert parse_size(str(Size(num_bytes=num_bytes))) == Size(num_bytes=num_bytes)


@given(st.integers(0, 1000), st.integers(0, 2**50))
def test_a_share_reads_back_as_itself_and_never_exceeds_the_total(tenths: int, total_bytes: int) -> None:
    size = Size(share=Fraction(tenths, 1000))
    assert parse_size(str(size)) == size
    assert 0 <= size.resolve(total_bytes) <= total_bytes


@pytest.mark.parametrize("fields", [{}, {"num_bytes": 1, "share": Fraction(1, 2)}])
def test_a_size_is_bytes_or_a_share(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Size(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (9 * 2**30 + 2**28, "9.25 GiB"),
        (2**41, "2.00 TiB"),
        (-(2**21), "-2.00 MiB"),
    ],
)
def test_bytes_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
