"""Counting: one number out of two counters."""

from __future__ import annotations

import pytest

from settlement.attempts import RETRY_HEADER, attempt, copied_headers, header_count


def test_the_header_is_the_familys() -> None:
    """DESIGN 6, Counting: services of the RustStream family on the same queue count alike."""
    assert RETRY_HEADER == "x-ruststream-retry-count"


@pytest.mark.parametrize(
    ("value", "count"),
    [(b"0", 0), (b"1", 1), (b"17", 17), (b"007", 7), (b"999999999999999999", 999_999_999_999_999_999)],
)
def test_a_decimal_header_counts(value: bytes, count: int) -> None:
    """C-2.3: a decimal ASCII integer in bytes."""
    assert count == header_count({"x-ruststream-retry-count": value})


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"-1",
        b"+1",
        b" 1",
        b"1 ",
        b"1\n",
        b"1.0",
        b"1e3",
        b"0x1",
        b"1_000",
        b"one",
        "٣".encode(),
        b"\xff",
        b"9" * 5000,
    ],
)
def test_anything_else_counts_as_absent(value: bytes) -> None:
    """C-2.3: not a decimal ASCII integer (or one that nobody has counted up to)."""
    assert header_count({"x-ruststream-retry-count": value}) == 0


def test_a_missing_header_counts_as_zero() -> None:
    """C-2.2: a missing header counts as 0."""
    assert header_count({"x-other": b"3"}) == 0


def test_the_header_has_the_name_that_it_was_given() -> None:
    """DESIGN 6, Counting: configurable per broker."""
    assert header_count({"x-tries": b"3", "x-ruststream-retry-count": b"5"}, "x-tries") == 3


@pytest.mark.parametrize(
    ("copies", "redeliveries", "number"),
    [
        (0, None, 1),  # C-2.1: the first delivery, nobody counts
        (0, 0, 1),  # a header section that says 0
        (0, 1, 2),  # redelivered once
        (1, None, 2),  # OQ-1: the first copy is the second delivery
        (3, 0, 4),  # a copy with a header section
        (3, 1, 5),  # OQ-2: a copy that was redelivered has both, and does not fall back to 2
    ],
)
def test_the_attempt_is_the_sum(copies: int, redeliveries: int | None, number: int) -> None:
    """DESIGN 6, Counting: header (0 if absent) + the broker's count (0 if absent) + 1."""
    assert number == attempt(copies, redeliveries)


def test_a_copys_header_is_the_attempt_that_it_copies() -> None:
    """DESIGN 6, Counting: not the old header + 1, so that the broker's share of the count is not lost."""
    headers = {"a": b"1", "x-ruststream-retry-count": b"1", "b": b"2"}

    assert copied_headers(headers, 5) == {"a": b"1", "x-ruststream-retry-count": b"5", "b": b"2"}
    assert headers["x-ruststream-retry-count"] == b"1"


def test_a_copys_header_is_added_where_there_was_none() -> None:
    """C-4.11, C-10.2: the other headers stay, byte for byte."""
    assert copied_headers({"raw": b"\xff"}, 1, "x-tries") == {"raw": b"\xff", "x-tries": b"1"}
