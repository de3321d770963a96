"""Go durations and mysql.tidb instants."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcsafepoint.worker.config import (
    DurationError,
    format_duration_ns,
    format_instant,
    parse_duration_ns,
    parse_instant_ms,
)

SECOND = 10**9


@given(st.integers(-(2**63) + 1, 2**63 - 1))
def test_what_is_printed_reads_back_the_same(ns: int) -> None:
    assert parse_duration_ns(format_duration_ns(ns)) == ns


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("10m0s", 600 * SECOND),
        ("1h30m", 5400 * SECOND),
        ("24h", 86_400 * SECOND),
        ("1.5s", 3 * SECOND // 2),
        (".5h", 1800 * SECOND),
        ("1.m", 60 * SECOND),
        ("100ms", SECOND // 10),
        ("3us", 3000),
        ("3µs", 3000),
        ("-2m", -120 * SECOND),
        ("+2m", 120 * SECOND),
        ("0", 0),
        ("1m1m", 120 * SECOND),
    ],
)
def test_gos_durations_are_understood(text: str, ns: int) -> None:
    assert parse_duration_ns(text) == ns


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10",
        "m",
        "10x",
        "10m ",
        " 10m",
        "1h-30m",
        "1e3s",
        "--1s",
        ".s",
        "10m5",
        "³s",
        "\u0661s",
        "9" * 5000 + "s",
    ],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(DurationError, match="write it like 10m, 1h30m or"):
        parse_duration_ns(text)


def test_durations_beyond_go_are_refused() -> None:
    with pytest.raises(DurationError, match="292 years"):
        parse_duration_ns("9999999h")


@given(st.text(max_size=12))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        parse_duration_ns(text)
    except DurationError:
        return


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0s"),
        (600 * SECOND, "10m0s"),
        (5400 * SECOND, "1h30m0s"),
        (86_400 * SECOND, "24h0m0s"),
        (1_500_000, "1.5ms"),
        (999, "999ns"),
        (1500, "1.5µs"),
        (90 * SECOND + 1, "1m30.000000001s"),
    ],
)
def test_durations_are_printed_as_go_does(ns: int, text: str) -> None:
    assert format_duration_ns(ns) == text


@given(st.integers(0, 4_000_000_000))
def test_instants_read_back_to_the_second(unix_s: int) -> None:
    assert parse_instant_ms(format_instant(unix_s * 1000 + 999)) == unix_s * 1000


def test_instants_look_as_in_mysql_tidb() -> None:
    assert format_instant(1_563_192_854_000) == "20190715-12:14:14 +0000"


def test_a_bad_instant_shows_a_good_one() -> None:
    with pytest.raises(DurationError, match="20190715-12:12:14"):
        parse_instant_ms("yesterday")
