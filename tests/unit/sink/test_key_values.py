"""Keys that a lake cannot hold as values of their own stop by name, or are text;
equal ones stay one.
"""

import json
import struct
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from server.capture.source.mysql import mysql_table
from server.changefeed.table import TableRecord
from server.puller.mysql.ddl.stored_values import change_of_values
from server.puller.mysql.ddl.tokens import Dialect
from sink.mounter import DEFAULT
from sink.mysql_mounter import MysqlMounter
from sink.tidb_mounter import TidbMounter
from storage.model.errors import KeyValueError
from storage.model.event import DELETE, INSERT, raw_batch
from storage.mysql.charset import decode_text, is_exact, is_one_to_one
from storage.mysql.schema import Column, Table, Type
from storage.tidb.cell import encode_cell
from storage.tidb.datum import encode_key_datum
from storage.tidb.field_type import Flag
from storage.tidb.field_type import Type as TidbType
from storage.tidb.record import record_key, record_prefix
from storage.tidb.row import encode_row
from storage.tidb.schema import Column as TidbColumn
from storage.tidb.schema import Index, TableInfo
from storage.tidb.time import CoreTime

REQUIRED = Flag.NOT_NULL | Flag.PRIMARY_KEY
IMPOSSIBLE = ["0000-00-00", "0000-01-01", "2024-00-01", "2024-02-31", "2023-02-29"]
SJIS, UTF8MB4 = 13, 45


def mysql(kind: Type, meta: int = 0, zero_dates: str = "null", **more: Any) -> MysqlMounter:
    columns = (
        Column(name="k", type=kind, meta=meta, nullable=False, id=1, **more),
        Column(name="id", type=Type.LONG, nullable=False, id=2),
        Column(name="d", type=Type.DATE, id=3),
    )
    record = TableRecord("shop", Table(1, "t", columns, ("k", "id")).to_doc()).showing(zero_dates)
    mounter = mysql_table(record).mounter
    assert isinstance(mounter, MysqlMounter)
    return mounter


def rows(cells: list[bytes], d: bytes = b"\0\0\0", op: int = INSERT) -> pa.RecordBatch:
    """A row image for each cell of `k`, with the ids 1, 2, …"""
    images = [
        b"\0\xf8" + cell + struct.pack("<I", number) + d for number, cell in enumerate(cells, 1)
    ]
    values, old = (images, [None] * len(images)) if op == INSERT else ([None] * len(images), images)
    return raw_batch(
        [7] * len(images), [6] * len(images), [op] * len(images), [b"k"] * len(images), values, old
    )


def day(text: str) -> bytes:
    year, month, number = map(int, text.split("-"))
    return (year << 9 | month << 5 | number).to_bytes(3, "little")


def moment(text: str) -> bytes:
    return (0x8000000000 + (CoreTime.parse(text).pack() >> 24)).to_bytes(5, "big")


@pytest.mark.parametrize("op", [INSERT, DELETE])
@pytest.mark.parametrize("text", IMPOSSIBLE)
def test_a_date_of_no_calendar_in_a_key_stops_by_table_column_and_row(text: str, op: int) -> None:
    with pytest.raises(
        KeyValueError,
        match=r"shop\.t \(id = 2\) has a date in its key column k .*--zero-dates key-text",
    ):
        mysql(Type.DATE).mount(rows([day("2024-02-29"), day(text)], op=op))
    with pytest.raises(KeyValueError, match=r"id = 1"):
        mysql(Type.DATETIME2).mount(rows([moment(text)], op=op))


def test_a_timestamp_of_zero_in_a_key_stops_and_real_ones_do_not() -> None:
    assert mysql(Type.TIMESTAMP2).mount(rows([b"\0\0\0\1"])).num_rows == 1
    with pytest.raises(KeyValueError):
        mysql(Type.TIMESTAMP2).mount(rows([bytes(4)]))


def test_dates_beside_the_key_are_null_as_ever() -> None:
    out = mysql(Type.DATE).mount(rows([day("2024-02-29")], d=day("2024-02-31")))
    assert out["d"].to_pylist() == [None]


@pytest.mark.parametrize("text", [*IMPOSSIBLE, "2024-02-29", "9999-12-31"])
def test_dates_of_keys_are_text_where_the_changefeed_says_so(text: str) -> None:
    for zero_dates, beside in (("key-text", None), ("text", "2024-02-31")):
        out = mysql(Type.DATE, zero_dates=zero_dates).mount(rows([day(text)], d=day("2024-02-31")))
        assert (out["k"].to_pylist(), out["d"].to_pylist()) == ([text], [beside])
        out.validate(full=True)
    out = mysql(Type.DATETIME2, 3, "key-text").mount(rows([moment(f"{text} 01:02:03") + b"\4\xd2"]))
    assert out["k"].to_pylist() == [f"{text} 01:02:03.123"]


@pytest.mark.parametrize(
    ("held", "null", "text"),
    [
        ("0000-00-00T00:00:00", None, "0000-00-00 00:00:00.00"),
        ("2024-02-29T01:02:03.450000", "2024-02-29T01:02:03.450000", "2024-02-29 01:02:03.45"),
        (None, None, None),
    ],
)
def test_what_older_rows_hold_is_shown_as_the_column_is_shown(
    held: str | None, null: str | None, text: str | None
) -> None:
    column = Column(name="k", type=Type.DATETIME2, meta=2, initial_default=held)
    for zero_dates, expected in (("null", null), ("text", text)):
        record = TableRecord(
            "shop", Table(1, "t", (column, Column(name="i", type=Type.LONG)), ("i",)).to_doc()
        )
        field = mysql_table(record.showing(zero_dates)).mounter.schema.field("k")
        assert (field.metadata or {}).get(DEFAULT) == (
            None if expected is None else json.dumps(expected).encode()
        )


def test_texts_with_more_digits_of_a_second_are_read_again() -> None:
    for as_text in (True, False):
        old = Column(name="k", type=Type.DATETIME2, meta=0, as_text=as_text)
        reason = change_of_values(old, replace(old, meta=3), Dialect(), ignores=False)
        assert bool(reason) == as_text


def test_timestamps_as_text_are_in_utc_and_zero_is_zero() -> None:
    mounter = mysql(Type.TIMESTAMP2, 1, "text")
    cells = [bytes(5), struct.pack(">I", 1) + b"\0", struct.pack(">I", (1 << 31) - 1) + b"\x5a"]
    assert mounter.mount(rows(cells))["k"].to_pylist() == [
        "0000-00-00 00:00:00.0",
        "1970-01-01 00:00:01.0",
        "2038-01-19 03:14:07.9",
    ]


@pytest.mark.parametrize(("kind", "pattern"), [(Type.FLOAT, "<f"), (Type.DOUBLE, "<d")])
def test_the_two_zeros_are_one_key_as_at_the_source(kind: Type, pattern: str) -> None:
    meta = struct.calcsize(pattern)
    out = mysql(kind, meta).mount(rows([struct.pack(pattern, -0.0), struct.pack(pattern, -1.5)]))
    assert [str(value) for value in out["k"].to_pylist()] == ["0.0", "-1.5"]


def test_characters_that_several_bytes_stand_for_stop_in_a_key() -> None:
    mounter = mysql(Type.VARCHAR, 10, collation=SJIS)
    assert mounter.mount(rows([b"\2\x82\xa0", b"\1\\"]))["k"].to_pylist() == ["あ", "\\"]
    with pytest.raises(KeyValueError, match=r"shop\.t \(id = 2\) has the bytes x'815f', for whose"):
        mounter.mount(rows([b"\1\\", b"\2\x81\x5f"]))


def test_halves_of_surrogate_pairs_stop_in_a_key() -> None:
    """MariaDB 10.11 takes them in utf8mb3 and utf8mb4; all of them are U+FFFD to readers."""
    mounter = mysql(Type.VARCHAR, 20, collation=UTF8MB4)
    replacement, first, second = b"\3\xef\xbf\xbd", b"\3\xed\xa0\x80", b"\3\xed\xa0\x81"
    assert mounter.mount(rows([replacement, b"\1a"]))["k"].to_pylist() == ["\ufffd", "a"]
    with pytest.raises(KeyValueError, match=r"id = 2\) has the bytes x'eda080', for whose"):
        mounter.mount(rows([replacement, first]))
    with pytest.raises(KeyValueError, match=r"id = 1\) has the bytes x'eda081', for whose"):
        mounter.mount(rows([second, b"\1a"]))


def test_an_empty_member_is_told_from_no_member() -> None:
    enum = mysql(Type.ENUM, 1, elems=("a", ""))
    assert enum.mount(rows([b"\1", b"\2"]))["k"].to_pylist() == ["a", ""]
    with pytest.raises(
        KeyValueError, match=r"id = 2\) has the invalid value 0, which reads as the member ''"
    ):
        enum.mount(rows([b"\2", b"\0"]))
    assert mysql(Type.ENUM, 1, elems=("a",)).mount(rows([b"\0", b"\1"]))["k"].to_pylist() == [
        "",
        "a",
    ]
    members = mysql(Type.SET, 1, elems=("", "a"))
    assert members.mount(rows([b"\0", b"\2", b"\3"]))["k"].to_pylist() == ["", "a", ",a"]
    with pytest.raises(KeyValueError, match=r"id = 1\) has the member '' alone"):
        members.mount(rows([b"\1"]))


@pytest.mark.parametrize(
    "charset", ["sjis", "ujis", "gbk", "big5", "cp932", "euckr", "gb2312", "gb18030", "utf16"]
)
def test_no_two_exact_values_of_a_character_set_have_one_text(charset: str) -> None:
    pairs = [bytes((first, second)) for first in range(256) for second in range(256)]
    exact = [
        data
        for data in [*(bytes((byte,)) for byte in range(256)), *pairs]
        if is_exact(charset, data)
    ]
    assert len(exact) > 1000
    assert len({decode_text(charset, data) for data in exact}) == len(exact)
    assert not is_one_to_one(charset)
    assert is_one_to_one("latin1")


def tidb(
    zero_dates: str = "null", kind: TidbType = TidbType.DATE, *, clustered: bool
) -> TidbMounter:
    columns = (
        TidbColumn(name="k", type=kind, id=1, offset=0, flags=REQUIRED, decimal=0),
        TidbColumn(
            name="id", type=TidbType.LONGLONG, id=2, offset=1, flags=REQUIRED, flen=20, decimal=0
        ),
        TidbColumn(name="d", type=kind, id=3, offset=2, decimal=0),
    )
    key = Index(
        id=1,
        name="PRIMARY",
        column_offsets=(0, 1),
        unique=True,
        primary=True,
        public=True,
        whole=True,
    )
    table = TableInfo(1, "t", columns, (key,), is_common_handle=clustered)
    return TidbMounter(table.showing_dates(zero_dates), "shop")


def tidb_rows(mounter: TidbMounter, text: str) -> pa.RecordBatch:
    table, date = mounter.table, CoreTime.parse(text)
    cells = {
        column.id: encode_cell(column, 5 if column.name == "id" else date)
        for column in table.columns
    }
    handle = b"".join(
        encode_key_datum(column, cells[column.id]) for column in table.common_handle_columns
    )
    key = record_prefix(1) + handle if handle else record_key(1, 77)
    value = encode_row(
        {number: cell for number, cell in cells.items() if number == 3 or not handle}
    )
    return raw_batch([7, 8], [6, 7], [INSERT, DELETE], [key, key], [value, None], [None, value])


@pytest.mark.parametrize("clustered", [True, False])
@pytest.mark.parametrize("kind", [TidbType.DATE, TidbType.DATETIME, TidbType.TIMESTAMP])
def test_the_same_of_tidb(kind: TidbType, clustered: bool) -> None:
    plain = tidb(kind=kind, clustered=clustered)
    assert plain.mount(tidb_rows(plain, "2024-02-29"))["k"].null_count == 0
    text = tidb("text", kind, clustered=clustered)
    for each in IMPOSSIBLE:
        with pytest.raises(
            KeyValueError, match=r"shop\.t \(id = 5\) has a date in its key column k"
        ):
            plain.mount(tidb_rows(plain, each))
        clock = "" if kind is TidbType.DATE else " 00:00:00"
        out = text.mount(tidb_rows(text, each))
        assert out["k"].to_pylist() == out["d"].to_pylist() == [each + clock] * 2
        assert tidb("key-text", kind, clustered=clustered).schema.field("d").type != pa.string()


def test_how_dates_are_shown_stays_when_columns_are_chosen_and_is_not_the_upstreams() -> None:
    whole = TableRecord("shop", {"id": 1, "name": "t"})
    shown = whole.showing("text").selecting(["k"], {"k": "l"})
    assert (shown.zero_dates, shown.selected, shown.renamed, shown.whole) == (
        "text",
        ["k"],
        {"k": "l"},
        whole,
    )
    assert shown.selecting(["m"]).renamed == {}
    assert shown.selecting(["m"]).zero_dates == "text"
    assert whole.showing("null") == whole
