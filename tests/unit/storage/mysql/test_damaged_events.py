"""What servers really sent, damaged: read as something else, or refused by an error of ours.

A log without checksums (binlog_checksum=NONE) brings such events to the parsers.
"""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from storage.model.errors import CorruptError, InvalidError
from storage.mysql.arrow import ambiguous_key, arrow_columns
from storage.mysql.binary_row import binary_keys
from storage.mysql.buffer import PAD_BYTES, Bytes
from storage.mysql.changes import Plan, read_changes
from storage.mysql.compressed import expanded
from storage.mysql.control import (
    FormatDescription,
    MariaGtid,
    MariaGtidList,
    MysqlGtid,
    Query,
    Rotate,
    XaPrepare,
)
from storage.mysql.event import HEADER_BYTES, check_events, split_events, split_packets
from storage.mysql.gtid import MysqlGtidSet
from storage.mysql.image import Shape
from storage.mysql.json import decode_json
from storage.mysql.rows import TableMaps
from storage.mysql.schema import Column, Table, Type
from storage.mysql.table_map import TableMap
from tests.unit.storage.mysql.encode import event, events, payload

ROUNDS = 300
_GOLDEN = Path(__file__).parents[3] / "golden"
EVENTS: list[dict[str, Any]] = json.loads((_GOLDEN / "mysql_events.json").read_text("utf-8"))
TABLE: dict[str, Any] = json.loads((_GOLDEN / "mysql_table.json").read_text("utf-8"))
RECORD = Table.parse(TABLE["record"])


KINDS: list[tuple[Type, int]] = [
    *((kind, meta) for kind in (Type.DATETIME2, Type.TIMESTAMP2, Type.TIME2) for meta in (0, 3, 6)),
    *((kind, 0) for kind in (Type.TINY, Type.INT24, Type.LONGLONG, Type.DATE, Type.TIME)),
    *((kind, 0) for kind in (Type.DATETIME, Type.TIMESTAMP, Type.YEAR, Type.FLOAT, Type.DOUBLE)),
    *((kind, 4) for kind in (Type.JSON, Type.GEOMETRY, Type.VECTOR, Type.BLOB)),
    *(
        (Type.NEWDECIMAL, precision << 8 | scale)
        for precision, scale in ((9, 2), (30, 9), (65, 30))
    ),
    (Type.BIT, 10),
    (Type.ENUM, 1),
    (Type.SET, 2),
    (Type.STRING, 40),
    (Type.VARCHAR, 300),
]


def body(text: str) -> bytes:
    """The body of a golden event; the header says the size that it had with a checksum."""
    return bytes.fromhex(text)[HEADER_BYTES:]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Some bits flipped, bytes replaced, the end cut off, or something behind it."""
    content = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(content))
        if rng.random() < 0.5:
            content[at] ^= 1 << rng.randrange(8)
        else:
            content[at] = rng.choice((0, 1, 0x7F, 0x80, 250, 251, 252, 253, 254, 255))
    if rng.random() < 0.3:
        del content[rng.randrange(len(content)) :]
    if rng.random() < 0.1:
        content += rng.randbytes(rng.randint(1, 9))
    return bytes(content)


def read_table_map(data: bytes, *, mariadb: bool) -> None:
    found = TableMap.parse(data, mariadb=mariadb)
    TableMap.names(data)
    Plan.of(found.to_table(1))
    assert Table.parse(found.to_table(1).to_doc()).columns


def read_rows(table_map: bytes, kind: int, data: bytes) -> None:
    log = events([event(19, table_map), *[event(kind, data)] * 30])
    for group in TableMaps(mariadb=False).group(log):
        table = group.table.to_table(1)
        changes = read_changes(log, group, Plan.of(table), np.full(len(log), 9, np.uint64))
        arrow_columns(table, changes.batch.column("value"))


def read_rows_of(rows: bytes, table_map: bytes) -> None:
    read_rows(table_map, 30, rows)


def read_row(data: bytes) -> None:
    arrow_columns(RECORD, pa.array([data, data], pa.binary()))


def read_keys(data: bytes) -> None:
    plan = Plan.of(RECORD)
    binary_keys(Bytes.padded(data), np.ones(1, np.int64), RECORD.columns, plan.key)


def read_compressed(kind: int, data: bytes) -> None:
    list(expanded(events([event(kind, data)])))


def cells_of(golden: dict[str, str]) -> list[bytes]:
    """The binary JSON of a golden row event, as its cells have it."""
    log = events([event(19, body(golden["table_map"])), event(30, body(golden["rows"]))])
    (group,) = TableMaps(mariadb=False).group(log)
    table = group.table.to_table(1)
    batch = read_changes(log, group, Plan.of(table), np.full(len(log), 9, np.uint64)).batch
    shape = Shape.of(table.columns)
    cells = (shape.cells(memoryview(row.as_py()), 1)[1] for row in batch.column("value"))
    return [cell for cell in cells if cell]


def read_packets(data: bytes) -> None:
    for checksums in (False, True):
        padded = data + bytes(PAD_BYTES)
        for split in (split_packets, split_events):
            found, _ = split(padded, checksums=checksums, end=len(data))
            with suppress(CorruptError):
                TableMaps(mariadb=True).group(found)
            if checksums:
                check_events(found)


def read_cells(kind: Type, meta: int, data: bytes, *, text: bool) -> None:
    column = Column(
        name="c",
        type=kind,
        meta=meta,
        nullable=False,
        elems=("a", "b"),
        collation=45 if text else 63,
        as_text=text,
        unsigned=text,
    )
    table = Table(1, "t", (column,), ("c",))
    for row in (b"\0\xfe", b"\1\0\0"):
        with suppress(CorruptError):
            arrow_columns(table, pa.array([row + data] * 2, pa.binary()))
        with suppress(CorruptError):
            ambiguous_key(table, pa.array([row + data] * 2, pa.binary()))
    with suppress(CorruptError):
        binary_keys(
            Bytes.padded(b"\0\0" + data), np.zeros(1, np.int64), table.columns, Plan.of(table).key
        )


def description(version: bytes, end: bytes) -> bytes:
    return b"\4\0" + version.ljust(50, b"\0") + bytes(4) + b"\x13" + bytes(40) + end


def packets(*sizes: int) -> bytes:
    """Packets with events of which so many bytes are sent."""
    sent = [event(19, bytes(25))[:size] for size in sizes]
    return b"".join((len(each) + 1).to_bytes(3, "little") + b"\1\0" + each for each in sent)


Sample = tuple[str, Callable[[bytes], object], bytes]


def control_samples() -> Iterator[Sample]:
    yield "Query", Query.parse, body(EVENTS[0]["ddl"])
    yield "tagged GTID", MysqlGtid.parse_tagged, body(EVENTS[0]["tagged"]["primary"])
    for split in (False, True):
        parse = partial(FormatDescription.parse, split_with_checksums=split)
        yield "FORMAT_DESCRIPTION", parse, description(b"11.4.2-MariaDB", b"\1\0\0\0\0")
    yield "ROTATE", Rotate.parse, bytes(8) + b"binlog.000002"
    xid = bytes(4) + b"\2\1abc"
    gtid = (7).to_bytes(8, "little") + bytes(4) + b"\xc2" + bytes(8) + xid + b"\1"
    yield "MariaDB's GTID", partial(MariaGtid.parse, bytes(HEADER_BYTES)), gtid
    yield "GTID_LIST", MariaGtidList.parse, b"\2\0\0\0" + bytes(32)
    yield "XA_PREPARE", XaPrepare.parse, bytes(5) + b"\2\0\0\0\1\0\0\0abc"
    for golden in EVENTS:
        yield "GTID", MysqlGtid.parse, body(golden["gtid"]["replica"])
        yield "PREVIOUS_GTIDS", MysqlGtidSet.decode, body(golden["previous"])


def framing_samples() -> Iterator[Sample]:
    for sizes in ((44, 44), (3,), (44, 19, 22), (13, 44)):
        yield "packets", read_packets, packets(*sizes)
    plain = event(16, bytes(8)) * 3
    payloads = [payload(plain, zstd=zstd)[HEADER_BYTES:] for zstd in (False, True)]
    for each in (*payloads, *(body(golden["payload"]) for golden in EVENTS)):
        yield "TRANSACTION_PAYLOAD", partial(read_compressed, 40), each


def row_samples() -> Iterator[Sample]:
    parse = partial(read_table_map, mariadb=True)
    yield "MariaDB's TABLE_MAP", parse, bytes.fromhex(TABLE["table_map"])
    for golden in (EVENTS[0]["json"], *(each["types"] for each in EVENTS)):
        table_map, rows = body(golden["table_map"]), body(golden["rows"])
        yield "TABLE_MAP", partial(read_table_map, mariadb=False), table_map
        yield "TABLE_MAP before rows", partial(read_rows_of, rows), table_map
        yield "rows", partial(read_rows, table_map, 30), rows
        yield "rows as updates", partial(read_rows, table_map, 31), rows
    for row in TABLE["rows"]:
        image, binary = (bytes.fromhex(row[form]) for form in ("image", "binary"))
        yield "image", read_row, b"\0" + image[1:]
        yield "binary row", read_row, b"\1" + binary[1:]
        yield "key of a binary row", read_keys, binary
    for cell in cells_of(EVENTS[0]["json"]):
        yield "JSON", decode_json, cell


SAMPLES = [*control_samples(), *framing_samples(), *row_samples()]


@pytest.mark.parametrize("number", range(len(SAMPLES)), ids=lambda at: f"{SAMPLES[at][0]}-{at}")
def test_a_damaged_event_is_something_else_or_refused_by_an_error_of_ours(number: int) -> None:
    _, parse, data = SAMPLES[number]
    rng = random.Random(number)
    for _ in range(ROUNDS):
        each = damaged(data, rng)
        try:
            with suppress(CorruptError, InvalidError):
                parse(each)
        except Exception as err:
            raise AssertionError(f"{each.hex()} of seed {number}") from err


CELLS = [
    b"\x05-12.5",
    b"\3nan",
    b"\x041e99",
    b"\4\xe8\7\1\1",
    b"\7\xe8\7\1\1\1\2\3",
    b"\x0c" + bytes(12),
    b"\3\0\0\0abc",
    b"\xff" * 12,
    bytes(30),
]


@pytest.mark.parametrize(("kind", "meta"), KINDS)
def test_a_damaged_cell_is_another_value_or_refused_by_an_error_of_ours(
    kind: Type, meta: int
) -> None:
    rng = random.Random(meta)
    for _ in range(ROUNDS // 4):
        data = damaged(rng.choice(CELLS), rng)
        for text in (False, True):
            try:
                read_cells(kind, meta, data, text=text)
            except Exception as err:
                raise AssertionError(data.hex()) from err


@pytest.mark.parametrize(
    ("kind", "meta"),
    [
        (Type.NEWDECIMAL, b"\x05\x09"),
        (Type.NEWDECIMAL, b"\x42\x00"),
        (Type.BLOB, b"\0"),
        (Type.BLOB, b"\5"),
        (Type.JSON, b"\xff"),
        (Type.DATETIME2, b"\7"),
        (Type.BIT, b"\xff\xff"),
        (Type.STRING, b"\xf7\x09"),
    ],
)
def test_a_table_map_with_impossible_metadata_is_damaged(kind: Type, meta: bytes) -> None:
    told = bytes(8) + b"\1a\0\1t\0" + bytes((1, kind, len(meta))) + meta + b"\0"
    with pytest.raises(CorruptError, match=r"column of a\.t cannot have the metadata"):
        TableMap.parse(told, mariadb=True)


@pytest.mark.parametrize("collations", [b"", b"\x2d\1"])
def test_a_table_map_with_half_a_pair_of_collations_is_damaged(collations: bytes) -> None:
    table = b"\1a\0\1t\0" + bytes((2, Type.LONG, Type.VARCHAR, 2)) + b"\xff\0\0"
    told = bytes(8) + table + b"\2" + bytes((len(collations),)) + collations
    with pytest.raises(CorruptError, match="numbers for a collation and pairs"):
        TableMap.parse(told, mariadb=True)
