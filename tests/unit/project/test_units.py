"""Durations and sizes: what is read, what is written, what is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawk.errors import InvalidArgument
from hawk.units import (
    approximate_size,
    format_duration,
    format_rate,
    format_size,
    kind_of,
    parse_duration,
    parse_rate,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30.0),
        ("150ms", 0.15),
        ("2m", 120.0),
        ("1.5h", 5400.0),
        ("10us", 1e-5),
        ("1d", 86400.0),
        (" 5 s ", 5.0),
        ("0", 0.0),
        (3, 3.0),
        (0.25, 0.25),
    ],
)
def test_durations_are_read(text: object, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize(
    "bad",
    [
        "30",
        "",
        "s",
        "-3s",
        "3 parsecs",
        "1e3s",
        "nan",
        "inf",
        "3S",
        True,
        None,
        -1,
        math.nan,
        math.inf,
        10**400,
    ],
)
def test_what_is_no_duration_is_refused_with_its_field(bad: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_duration(bad, "jobs.lease")
    assert caught.value.field == "jobs.lease"
    assert "30s" in str(caught.value.expected)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64MiB", 64 << 20),
        ("1GB", 10**9),
        ("1.5KiB", 1536),
        ("4096", 4096),
        (4096, 4096),
        ("0", 0),
        ("10 kb", 10_000),
        ("2tib", 2 << 40),
        ("0.1GB", 10**8),
    ],
)
def test_sizes_are_read(text: object, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "bad", ["", "MiB", "-1", "1.5", "0.3KiB", "1QB", "1 0MB", True, None, 1.5, -1, 1 << 63, "9999999TiB"]
)
def test_what_is_no_size_is_refused_with_its_field(bad: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_size(bad, "arena.size")
    assert caught.value.field == "arena.size"
    assert "64MiB" in str(caught.value.expected)


@given(st.floats(min_value=0, max_value=1e9, allow_subnormal=False))
def test_a_written_duration_reads_back(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=1e-12, abs=1e-19)


@given(st.integers(min_value=0, max_value=1 << 62))
def test_a_written_size_reads_back(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes


def test_people_read_short_forms() -> None:
    assert format_duration(30) == "30s"
    assert format_duration(0.15) == "150ms"
    assert format_duration(120) == "2m"
    assert format_size(64 << 20) == "64MiB"
    assert format_size(10**9) == "1GB"
    assert approximate_size(1_234_567) == "1.18 MiB"
    assert approximate_size(1023 << 20) == "1023 MiB"


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("25GB/s", 25e9),
        ("25GB", 25e9),
        ("1.5 MiB/s", 1.5 * 2**20),
        ("25GiB/s", 25 * 2**30),
        ("25GBps", 25e9),
        ("200Gb/s", 25e9),
        ("200Gbps", 25e9),
        ("200 gbit/s", 25e9),
        ("200Gbits/s", 25e9),
        ("200 Gb /s", 25e9),
        ("8Kib/s", 1024.0),
        ("0", 0.0),
        (25e9, 25e9),
        (0, 0.0),
        ("0B/s", 0.0),
    ],
)
def test_rates_are_read(text: object, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "bad",
    [
        *("5s", "GB/s", "25GB/h", "25/s/s", "", -1, True, None, math.nan, math.inf, 10**400, "1000TB/s"),
        *("25", "25b", "25b/s", "25/s", "25G", "25G/s", "200Gb", "200gb/s", "200gbps", "25iB/s", "0/s"),
    ],
)
def test_what_is_no_rate_is_refused_with_its_field(bad: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_rate(bad, "pace")
    assert caught.value.field == "pace"
    assert "25GB/s" in str(caught.value.expected)
    assert "200Gb/s" in str(caught.value.expected)


@given(st.floats(min_value=0, max_value=1e14) | st.integers(min_value=0, max_value=10**14).map(float))
def test_rates_are_written_so_that_they_read_back(rate: float) -> None:
    assert parse_rate(format_rate(rate)) == pytest.approx(rate, rel=1e-12, abs=1e-15)


def test_small_durations_are_written_in_small_units() -> None:
    assert [format_duration(s) for s in (50e-6, 0.067, 0.3)] == ["50us", "67ms", "300ms"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("5s", "a duration"),
        ("10m", "a duration"),
        ("7KB", "a size"),
        ("7mib", "a size"),
        ("25GB/s", "a rate"),
        ("200Gb/s", "a rate"),
        ("200 Gbit/s", "a rate"),
        ("7", ""),
        ("abc", ""),
        ("5s/s", ""),
        (7, ""),
    ],
)
def test_text_with_a_unit_tells_what_it_is(text: object, kind: str) -> None:
    assert kind_of(text) == kind
