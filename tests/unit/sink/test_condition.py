"""Conditions of event filters: what holds, what is refused, and SQL's logic of three values."""

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sink.row_filter import CHARACTERS_MAX, Condition, ConditionError

ROWS = pa.RecordBatch.from_pydict(
    {
        "id": pa.array([1, 2, None], pa.int32()),
        "big": pa.array([2**64 - 1, 0, 5], pa.uint64()),
        "c": ["a", "B", None],
        "f": [1.5, 2.5, None],
        "d": pa.array([Decimal("1.10"), Decimal("2.00"), None], pa.decimal128(12, 2)),
        "wide": pa.array([Decimal("1.5"), Decimal(2), None], pa.decimal128(38, 30)),
        "at": pa.array([dt.datetime(2024, 1, 1), dt.datetime(2024, 5, 1, 10), None]),  # noqa: DTZ001 - as columns are
        "stamp": pa.array(
            [
                dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
                dt.datetime(2024, 5, 1, 10, tzinfo=dt.UTC),
                None,
            ],
            pa.timestamp("us", tz="UTC"),
        ),
        "day": pa.array([dt.date(2024, 1, 1), None, None]),
        "b": pa.array([b"a", b"\xff", None]),
        "a`b": [7, 8, 9],
    }
)


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("id = 1", "x.."),
        ("ID > 1.5", ".x."),
        ("1000 > id", None),
        ("id IN (1, 3, NULL)", "x.."),
        ("id NOT IN (1)", ".x."),
        ("id not in (1, NULL)", "..."),
        ("NOT id IN (1)", ".x."),
        ("big = 18446744073709551615", "x.."),
        ("big > 4e0 AND id IS NULL", "..x"),
        ("id = -1 OR big = -0", ".x."),
        ("id = 99999999999999999999999999999999999999999", "..."),
        ("c = 'a' || c = \"B\"", "xx."),
        ("c LIKE 'b%' OR c LIKE '_'", "xx."),
        ("c NOT LIKE 'a'", ".x."),
        ("f >= 2 && !(f = 9)", ".x."),
        ("d = 1.1", "x.."),
        ("d BETWEEN 1 AND 1.999", "x.."),
        ("wide < 100000000000000000000", "xx."),
        ("wide = 1.5 AND wide > d", "x.."),
        ("wide = id", ".x."),
        ("id < 1.00000000000000000000000000000000000001", "x.."),
        ("d NOT BETWEEN 1 AND 1.999", ".x."),
        ("at > '2024-02-01'", ".x."),
        ("at = '2024-01-01 00:00:00'", "x.."),
        ("stamp = '2024-01-01'", "x.."),
        ("stamp > '2024-05-01 09:59:59.999999'", ".x."),
        ("stamp = '2024-05-01 12:00:00+02:00'", ".x."),
        ("stamp BETWEEN '2024-05-01T10:00:00Z' AND '2024-05-01 10:00:00'", ".x."),
        ("day = '2024-01-01'", "x.."),
        ("b = 'a'", "x.."),
        ("`a``b` = 8", ".x."),
        ("TRUE", "xxx"),
        ("not false", "xxx"),
        ("id = TRUE", "x.."),
        ("id = NULL", "..."),
        ("id IS NOT NULL AND c <> 'a'", ".x."),
        ("big = id", "..."),
        ("c = 'it''s' or c = 'it\\'s'", "..."),
    ],
)
def test_what_holds_of_rows(text: str, held: str | None) -> None:
    if held is None:
        with pytest.raises(ConditionError, match="a column is expected"):
            Condition(text)
        return
    assert "".join(".x"[each] for each in Condition(text).mask(ROWS).to_pylist()) == held


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "at character 1: a column is expected, not its end"),
        ("id =", "at character 5: a number, a text, TRUE, FALSE or NULL is expected, not its end"),
        ("id = 1 2", "at character 8: an end, AND or OR is expected, not '2'"),
        ("(id = 1", "at character 8: \\) is expected"),
        ("id ~ 1", "'~ 1' cannot be read"),
        ("id LIKE 5", "a text is expected"),
        ("id", "a comparison, IS, IN, BETWEEN or LIKE is expected"),
        ("c = 'open", "cannot be read"),
        ("(" * 5000, "at most"),
        ("(" * 200, "too deep"),
        ("SLEEP(9) = 0", "is expected, not '\\('"),
    ],
)
def test_what_is_no_condition_is_refused_with_its_place(text: str, why: str) -> None:
    with pytest.raises(ConditionError, match=why):
        Condition(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nope = 1", "there is no column 'nope'; there are id, big"),
        ("c = 5", "a column of the type string is compared with a number"),
        ("id = 'x'", "a column of the type int32 is compared with a text"),
        ("day < 'x'", "as a scalar of type date32"),
        ("id LIKE '1'", "cannot be asked of these rows"),
    ],
)
def test_what_a_table_cannot_be_asked_is_refused_before_there_are_rows(text: str, why: str) -> None:
    with pytest.raises(ConditionError, match=why):
        Condition(text).check(ROWS.schema)


@given(st.text(max_size=40) | st.text("ab1'\"`()<>=!&|, %\\.", max_size=40))
def test_any_text_is_a_condition_or_a_named_error(text: str) -> None:
    try:
        Condition(text).mask(ROWS)
    except ConditionError as err:
        assert len(err.message) < 4 * CHARACTERS_MAX  # noqa: PT017 - both outcomes are right


@given(st.integers(-(2**70), 2**70), st.integers(-(2**63), 2**63 - 1))
def test_whole_numbers_are_compared_exactly(number: int, value: int) -> None:
    rows = pa.RecordBatch.from_pydict({"n": pa.array([value], pa.int64())})
    assert Condition(f"n < {number}").mask(rows).to_pylist() == [value < number]
    assert Condition(f"n = {number}").mask(rows).to_pylist() == [value == number]
