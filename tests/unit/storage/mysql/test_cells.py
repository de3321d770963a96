"""Cells of both row formats: numbers and moments against plain Python,
and binary rows against images.
"""

import struct
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sink.mysql_mounter import MysqlMounter
from storage.model.errors import CorruptError
from storage.model.event import DELETE, INSERT, raw_batch
from storage.mysql.arrow import arrow_columns
from storage.mysql.charset import charset_of, codec_of, decode_text, is_exact
from storage.mysql.schema import Column, ColumnUnsupportedError, Table, Type
from storage.tidb.number import encode_decimal

SHAPES = st.integers(1, 65).flatmap(lambda p: st.tuples(st.just(p), st.integers(0, min(p, 30))))


def column(kind: Type, meta: int = 0, **more: Any) -> Column:
    return Column(name="c", type=kind, meta=meta, **more)


def values(of: Column, cells: list[bytes | None]) -> list[Any]:
    """One column's cells as images: a bitmap, then the cell."""
    rows = [b"\0\xff" if cell is None else b"\0\xfe" + cell for cell in cells]
    (found,) = arrow_columns(Table(1, "t", (of,), ("c",)), pa.array(rows, pa.binary()))
    found.validate(full=True)
    return list(found.to_pylist())


def binary_values(of: Column, cells: list[bytes | None]) -> list[Any]:
    rows = [b"\1\0\4" if cell is None else b"\1\0\0" + cell for cell in cells]
    (found,) = arrow_columns(Table(1, "t", (of,), ("c",)), pa.array(rows, pa.binary()))
    return list(found.to_pylist())


@given(SHAPES, st.lists(st.none() | st.integers(-(10**65) + 1, 10**65 - 1), min_size=1, max_size=5))
def test_decimals_of_every_shape_are_exact(
    shape: tuple[int, int], numbers: list[int | None]
) -> None:
    precision, scale = shape
    texts = [None if number is None else fixed(number, precision, scale) for number in numbers]
    exact = [None if text is None else Decimal(text) for text in texts]
    cells = [None if each is None else encode_decimal(each, precision, scale)[2:] for each in exact]
    of = column(Type.NEWDECIMAL, precision << 8 | scale)
    found = values(of, cells)
    assert [None if each is None else Decimal(each) for each in found] == exact
    rows = [None if text is None else bytes((len(text),)) + text.encode() for text in texts]
    assert binary_values(of, rows) == found


def fixed(number: int, precision: int, scale: int) -> str:
    """The last digits of a number as a DECIMAL(precision, scale)."""
    digits = f"{abs(number) % 10**precision:0{scale + 1}d}"
    return "-" * (number < 0) + (f"{digits[:-scale]}.{digits[-scale:]}" if scale else digits)


MOMENTS = st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31))  # noqa: DTZ001 - DATETIME has no zone


@given(st.lists(MOMENTS, min_size=1, max_size=5), st.integers(0, 6))
def test_datetimes_of_every_precision_are_exact(moments: list[datetime], digits: int) -> None:
    step = 10 ** (6 - digits)
    moments = [each.replace(microsecond=each.microsecond // step * step) for each in moments]
    width = (digits + 1) // 2
    cells = [
        (
            0x8000000000
            + (
                (each.year * 13 + each.month) << 22
                | each.day << 17
                | each.hour << 12
                | each.minute << 6
                | each.second
            )
        ).to_bytes(5, "big")
        + (each.microsecond // 100 ** (3 - width)).to_bytes(width, "big")
        for each in moments
    ]
    assert values(column(Type.DATETIME2, digits), cells) == moments
    rows = [
        b"\x0b"
        + struct.pack(
            "<HBBBBBI",
            each.year,
            each.month,
            each.day,
            each.hour,
            each.minute,
            each.second,
            each.microsecond,
        )
        for each in moments
    ]
    assert binary_values(column(Type.DATETIME2, digits), rows) == moments


@given(
    st.lists(st.integers(-(839 * 3600 * 10**6) + 1, 839 * 3600 * 10**6 - 1), min_size=1, max_size=5)
)
def test_times_are_the_same_in_both_forms(micros: list[int]) -> None:
    cells, rows, texts = [], [], []
    for number in micros:
        second, fraction = divmod(abs(number), 10**6)
        hour, minute, second = second // 3600, second // 60 % 60, second % 60
        whole = (hour << 12 | minute << 6 | second) << 24 | fraction
        cells.append((0x800000000000 + (whole if number >= 0 else -whole)).to_bytes(6, "big"))
        rows.append(
            b"\x0c"
            + struct.pack("<BIBBBI", number < 0, hour // 24, hour % 24, minute, second, fraction)
        )
        texts.append(f"{'-' * (number < 0)}{hour:02d}:{minute:02d}:{second:02d}.{fraction:06d}")
    assert values(column(Type.TIME2, 6), cells) == texts
    assert binary_values(column(Type.TIME2, 6), rows) == texts


def test_forms_before_mysql_5_6_are_read() -> None:
    assert values(column(Type.DATETIME), [struct.pack("<Q", 20240229123456)]) == [
        datetime(2024, 2, 29, 12, 34, 56)  # noqa: DTZ001 - DATETIME has no zone
    ]
    assert values(column(Type.TIME), [(-8385959).to_bytes(3, "little", signed=True)]) == [
        "-838:59:59"
    ]
    seconds = datetime(2024, 2, 29, 12, tzinfo=UTC)
    cell = struct.pack("<I", int(seconds.timestamp()))
    assert values(column(Type.TIMESTAMP), [cell, bytes(4)]) == [seconds, None]


def test_short_forms_of_binary_moments_are_read() -> None:
    of = column(Type.DATETIME2, 6)
    assert binary_values(of, [b"\0", struct.pack("<BHBB", 4, 2024, 2, 29)]) == [
        None,
        datetime(2024, 2, 29),  # noqa: DTZ001 - DATETIME has no zone
    ]
    assert binary_values(
        column(Type.TIME2, 0), [b"\0", b"\x08" + struct.pack("<BIBBB", 1, 1, 2, 3, 4)]
    ) == [
        "00:00:00",
        "-26:03:04",
    ]


@given(
    st.lists(st.none() | st.binary(max_size=300), min_size=1, max_size=4),
    st.sampled_from([1, 2, 3, 4]),
)
def test_blobs_are_as_they_were(cells: list[bytes | None], width: int) -> None:
    cells = [None if cell is None else cell[: (1 << 8 * width) - 1] for cell in cells]
    images = [
        None if cell is None else len(cell).to_bytes(width, "little") + cell for cell in cells
    ]
    assert values(column(Type.BLOB, width), images) == cells
    rows = [
        None
        if cell is None
        else (bytes((len(cell),)) if len(cell) < 251 else b"\xfc" + struct.pack("<H", len(cell)))
        + cell
        for cell in cells
    ]
    assert binary_values(column(Type.BLOB, width), rows) == cells


def test_a_geometry_is_its_wkb_and_nothing_where_a_column_was_added_not_null() -> None:
    of = column(Type.GEOMETRY, 4)
    cells = [b"\5\0\0\0\0\0\0\0\1", b"\0\0\0\0", None]
    assert values(of, cells) == [b"\1", b"", None]
    assert binary_values(of, [b"\5\0\0\0\0\1", b"\0", None]) == [b"\1", b"", None]
    with pytest.raises(CorruptError, match="without an SRID"):
        values(of, [b"\3\0\0\0\0\0\0"])


def test_text_that_is_not_utf8_gets_the_nearest_text() -> None:
    found = values(column(Type.VARCHAR, 20, collation=45), [b"\x02ok", b"\x02\xc3\x28"])
    assert found == ["ok", "\ufffd("]


@given(st.binary(max_size=20))
def test_every_byte_of_latin1_is_a_character_of_its_own(data: bytes) -> None:
    text = decode_text("latin1", data)
    assert len(text) == len(data)
    assert "\ufffd" not in text


def test_gb18030_is_that_of_2005_as_in_mysql() -> None:
    """The two characters that it has swapped since the one of 2000, which is Python's."""
    for data, text in ((b"\xa8\xbc", "\u1e3f"), (b"\x81\x35\xf4\x37", "\ue7c7")):
        assert decode_text("gb18030", data) == text
        assert is_exact("gb18030", data), "it may be a key"


def test_an_enum_or_set_without_such_a_member_is_damaged() -> None:
    with pytest.raises(CorruptError, match="ENUM"):
        values(column(Type.ENUM, 1, elems=("a",)), [b"\x02"])
    with pytest.raises(CorruptError, match="SET"):
        values(column(Type.SET, 1, elems=("a",)), [b"\x02"])


@pytest.mark.parametrize(
    ("charset", "data", "text"),
    [
        ("big5", b"\xa7\xbb\xf9\xd6", "宏碁"),
        ("big5", b"a\xf9\xdcb", "a嫺b"),
        ("ujis", b"\xf5\xa1x\x8f\xfe\xfe", "\ue000x\ue757"),
    ],
)
def test_characters_that_python_lacks_are_those_of_the_servers(
    charset: str, data: bytes, text: str
) -> None:
    assert decode_text(charset, data) == text
    assert is_exact(charset, data), "it may be a key"
    assert decode_text(charset, data[:-1] + b"\xff").endswith("\ufffd")
    assert not is_exact(charset, data + b"\xff")


def test_a_charset_nobody_can_read_is_refused_when_the_table_is() -> None:
    assert charset_of(69) == "dec8"
    assert codec_of("dec8") is None
    table = Table(1, "t", (column(Type.VARCHAR, 9, collation=69),), ("c",))
    with pytest.raises(ColumnUnsupportedError, match="dec8"):
        MysqlMounter(table, "s")


@given(
    st.lists(
        st.tuples(st.booleans(), st.none() | st.integers(-(1 << 31), (1 << 31) - 1)), max_size=8
    )
)
def test_images_and_binary_rows_mix_in_one_batch(mixed: list[tuple[bool, int | None]]) -> None:
    table = Table(1, "t", (column(Type.LONG),), ("c",))
    rows = []
    for binary, number in mixed:
        cell = b"" if number is None else struct.pack("<i", number)
        head = (
            (b"\1\0\4" if number is None else b"\1\0\0")
            if binary
            else (b"\0\xff" if number is None else b"\0\xfe")
        )
        rows.append(head + cell)
    ts = list(range(5, 5 + len(rows)))
    raw = raw_batch(
        ts,
        [each - 1 for each in ts],
        [INSERT] * len(rows),
        [b"k"] * len(rows),
        rows,
        [None] * len(rows),
    )
    mounted = MysqlMounter(table, "s").mount(raw)
    assert mounted["c"].to_pylist() == [number for _, number in mixed]
    assert mounted.schema.names == ["_op", "_commit_ts", "_start_ts", "_seq", "c"]


def test_a_delete_is_mounted_with_its_old_row() -> None:
    table = Table(1, "t", (column(Type.TINY),), ("c",))
    raw = raw_batch(
        [5, 6], [4, 5], [DELETE, INSERT], [b"k"] * 2, [None, b"\0\xfe\7"], [b"\0\xfe\5", None]
    )
    assert MysqlMounter(table, "s").mount(raw)["c"].to_pylist() == [5, 7]


@given(st.lists(st.binary(max_size=12), min_size=1, max_size=3))
def test_foreign_rows_are_read_or_refused_by_an_error_of_ours(rows: list[bytes]) -> None:
    columns = (column(Type.LONG), column(Type.VARCHAR, 300), column(Type.DATETIME2, 3))
    try:
        found = arrow_columns(Table(1, "t", columns, ("c",)), pa.array(rows, pa.binary()))
    except CorruptError:
        return
    assert all(len(each) == len(rows) for each in found)


def test_nothing_is_no_rows() -> None:
    table = Table(1, "t", (column(Type.LONG),), ("c",))
    assert [len(each) for each in arrow_columns(table, pa.array([], pa.binary()))] == [0]
    assert arrow_columns(table, pa.nulls(2, pa.binary()))[0].to_pylist() == [None, None]
