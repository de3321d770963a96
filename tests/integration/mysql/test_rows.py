"""Rows of a real MariaDB: what the log holds, what a prepared SELECT gives,
and what the server prints are the same.
"""

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from server.changefeed.source import SourceUri
from server.dump.mysql.chunk import selected as as_dumped
from server.dump.mysql.statement import Statement
from server.puller.mysql.session.connection import Session, log_in
from server.puller.mysql.session.options import MySqlOptions
from sink.mysql_mounter import MysqlMounter
from storage.model.event import DELETE, INSERT, RAW_SCHEMA, UPDATE
from storage.mysql.binary_row import binary_keys
from storage.mysql.buffer import Bytes
from storage.mysql.changes import Plan, read_changes
from storage.mysql.compressed import expanded
from storage.mysql.control import Query
from storage.mysql.event import Events, EventType, check_events, split_events
from storage.mysql.rows import RowImageError, TableMaps, find_images
from storage.mysql.schema import Table
from tests.integration.mysql.every_type import COLUMNS, ROWS
from tests.mariadb import MYSQLD, MariaDb, mariadb_only, running_mariadb

DATES = {"dt0", "dt3", "dt6", "ts0", "ts1", "ts6", "da"}


@pytest.fixture
def session(mariadb: MariaDb) -> Any:
    options = MySqlOptions.of(SourceUri.parse(mariadb.uri))
    with log_in(options) as session:
        session.execute("SET character_set_results = NULL, sql_mode = 'NO_ENGINE_SUBSTITUTION'")
        yield session


def plain_log(mariadb: MariaDb, file: str, position: int) -> Events:
    """The events in the server's file from `position` on, and in those after it."""
    files = sorted(
        path for path in (mariadb.directory / "data").glob("binlog.[0-9]*") if path.name >= file
    )
    parts: list[bytes] = []
    for path in files:
        data = path.read_bytes()
        begin = position if path.name == file else 4
        events, end = split_events(data + bytes(8), checksums=True, begin=begin, end=len(data))
        assert end == len(data)
        check_events(events)
        parts.append(data[begin:])
    joined = b"".join(parts)
    return split_events(joined + bytes(8), checksums=True, end=len(joined))[0]


def whole(events: Events) -> Events:
    """Nothing in them compressed, in one piece."""
    (piece,) = expanded(events, 1 << 40)
    return piece


def log_since(mariadb: MariaDb, file: str, position: int) -> Events:
    """The same, nothing in them compressed."""
    return whole(plain_log(mariadb, file, position))


def place(mariadb: MariaDb) -> tuple[str, int]:
    ((file, position, *_),) = mariadb.execute("SHOW MASTER STATUS")
    return Path(file).name, int(position)


def changes_of(
    events: Events, name: str, *, one_commit: bool = False
) -> tuple[Table, list[pa.RecordBatch]]:
    maps = TableMaps(mariadb=not MYSQLD)
    commit_ts = np.arange(len(events), dtype=np.uint64) * np.uint64(not one_commit) + np.uint64(10)
    (rows,) = [group for group in maps.group(events) if group.table.name == name]
    table = rows.table.to_table(1, ["id"] if not rows.table.primary_key else None)
    plan = Plan.of(table)
    for least in (1, 1 << 30):
        one, other = (
            find_images(events, rows, plan.shape),
            find_images(events, rows, plan.shape, wave_rows_min=least),
        )
        assert all(
            np.array_equal(getattr(one, part), getattr(other, part))
            for part in ("begin", "end", "event")
        )
    return table, [read_changes(events, rows, plan, commit_ts).batch]


def selected(session: Session, name: str, table: Table, order: str) -> pa.Array:
    columns = ", ".join(map(as_dumped, table.columns))
    return Statement(session, f"SELECT {columns} FROM {name} ORDER BY {order}").rows()


def inserts(rows: pa.Array) -> pa.RecordBatch:
    count = len(rows)
    ts = pa.array(range(10, 10 + count), pa.uint64())
    starts = pa.array(range(9, 9 + count), pa.uint64())
    op, key = pa.array([INSERT] * count, pa.uint8()), pa.array([b""] * count, pa.binary())
    columns = [ts, starts, op, key, rows, pa.nulls(count, pa.binary())]
    return pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA)


def keys_of(table: Table, rows: pa.Array) -> pa.Array:
    offsets = np.frombuffer(rows.buffers()[1], np.int32)[
        rows.offset : rows.offset + len(rows)
    ].astype(np.int64)
    data = Bytes(
        np.concatenate([np.frombuffer(rows.buffers()[2], np.uint8), np.zeros(8, np.uint8)])
    )
    return binary_keys(data, offsets + 1, table.columns, Plan.of(table).key)


def test_every_column_type_is_the_same_from_the_log_from_select_and_as_the_server_prints_it(
    mariadb: MariaDb, session: Session
) -> None:
    database = mariadb.database()
    name = f"{database}.everything"
    mariadb.execute(f"CREATE TABLE {name} (id INT PRIMARY KEY, {COLUMNS})")
    known = {column for column, *_ in session.execute(f"SHOW COLUMNS FROM {name}")}
    begin = place(mariadb)
    for number, values in enumerate(ROWS):
        row = {column: value for column, value in values.items() if column in known}
        columns = ", ".join(["id", *row])
        session.execute(
            f"INSERT INTO {name} ({columns}) VALUES ({', '.join(['%s'] * (len(row) + 1))})",
            [number, *row.values()],
        )
    session.execute(
        f"UPDATE {name} SET g = LINESTRING(POINT(1, 2), POINT(3, 4)), p = POINT(0.5, -1) WHERE id "
        "= 1"
    )

    table, (logged, *_) = changes_of(log_since(mariadb, *begin), name)
    mounter = MysqlMounter(table, database)
    from_log = mounter.mount(logged.take(pa.array([0, 3, 2])))
    from_select = mounter.mount(inserts(selected(session, name, table, "id")))
    for field in mounter.schema.names[4:]:
        assert from_log[field].equals(from_select[field]), (
            field,
            from_log[field],
            from_select[field],
        )
    from_select.validate(full=True)
    printed = session.execute(
        f"SELECT {', '.join(printing(column.name) for column in table.columns)} FROM {name}"
    )
    for number, row in enumerate(printed):
        for field, text in zip(mounter.schema.names[4:], row, strict=True):
            value = from_log[field][number].as_py()
            assert same(field, value, text), (field, value, text)


def printing(name: str) -> str:
    if name in {"f32"}:
        return f"CAST({name} AS DOUBLE)"
    if name in {"g", "p"}:
        return f"ST_AsBinary({name})"
    if size := {"uu": 16, "in6": 16, "b16": 16, "in4": 4, "b4": 4}.get(name):
        return f"CAST({name} AS BINARY({size}))"
    if name in {"bit1", "bit12", "bit64", "bi", "vb", "tb", "bl", "lb"}:
        return f"CAST({name} AS BINARY)"
    return f"CONVERT(CAST({name} AS CHAR) USING utf8mb4)"


def same(field: str, value: Any, printed: Any) -> bool:
    if isinstance(printed, bytes) and not isinstance(value, bytes):
        printed = printed.decode()
    if field in DATES and value is None:
        return printed is None or "-00" in printed
    if value is None or printed is None:
        return value is printed
    if isinstance(value, datetime):
        value = value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value
        return value == datetime.fromisoformat(printed)
    if isinstance(value, date):
        return value == date.fromisoformat(printed)
    if isinstance(value, Decimal):
        return value == Decimal(printed)
    if isinstance(value, float):
        return value == float(printed)
    if field == "y":
        return value == int(printed)
    return value == printed or str(value) == printed


KEYS = {
    "ci": ("k VARCHAR(20) COLLATE utf8mb4_general_ci", ["'Abc'", "'b '", "'ß'", "''"], "'aBC '"),
    "padded": ("k CHAR(8) CHARACTER SET latin1", ["'a'", "'b  '", "'é'"], "'A'"),
    "utf16": ("k CHAR(4) CHARACTER SET utf16", ["'a'", "'ü '"], "'A'"),
    "binary": ("k BINARY(4)", ["'a\\0\\0\\0'", "'a\\0b'", "''"], "'A'"),
    "varbinary": ("k VARBINARY(4)", ["'a'", "'a\\0'", "''"], "'A'"),
    "decimal": ("k DECIMAL(20,5)", ["-1.5", "0", "99999.99999", "-0.00001"], "7"),
    "unsigned": ("k BIGINT UNSIGNED", ["0", "18446744073709551615", "9223372036854775808"], "1"),
    "mediumint": ("k MEDIUMINT", ["-8388608", "-1", "8388607"], "0"),
    "timestamp": (
        "k TIMESTAMP(3)",
        ["'1970-01-01 00:00:01'", "'2024-10-27 02:30:00.123'"],
        "'2038-01-19 03:14:07.999'",
    ),
    "datetime": (
        "k DATETIME(5)",
        ["'0000-00-00'", "'2023-00-10 01:02:03.04567'", "'9999-12-31 23:59:59.99999'"],
        "'2000-01-01'",
    ),
    "time": ("k TIME(4)", ["'-838:59:59'", "'-00:00:00.0001'", "'12:13:14.5678'"], "'0'"),
    "date": ("k DATE", ["'0000-00-00'", "'2024-02-29'"], "'1000-01-01'"),
    "year": ("k YEAR", ["0", "1901", "2155"], "1999"),
    "enum": ("k ENUM('a','b','c')", ["'a'", "'c'"], "'b'"),
    "set": ("k SET('a','b','c')", ["''", "'a,c'"], "'b'"),
    "bit": ("k BIT(12)", ["0", "4095"], "1"),
    "double": ("k DOUBLE", ["0.1", "-1e300"], "1"),
    "float": ("k FLOAT", ["0.5", "0.1", "16777216"], "1"),
    "composite": (
        "k VARCHAR(5), a INT UNSIGNED DEFAULT 7, c CHAR(3) DEFAULT 'x'",
        ["'a'", "''", "'ab'"],
        "'A'",
    ),
}


@pytest.mark.parametrize("kind", KEYS)
def test_a_row_has_the_same_key_in_the_log_and_in_select(
    mariadb: MariaDb, session: Session, kind: str
) -> None:
    columns, values, other = KEYS[kind]
    key = "a, k, c" if kind == "composite" else "k"
    database = mariadb.database()
    name = f"{database}.`keys`"
    session.execute(
        f"CREATE TABLE {name} (before_it TEXT, {columns}, PRIMARY KEY ({key})) COLLATE "
        "utf8mb4_general_ci"
    )
    begin = place(mariadb)
    session.execute(f"INSERT INTO {name} (k) VALUES {', '.join(f'({value})' for value in values)}")
    session.execute(f"UPDATE {name} SET k = {other} WHERE k = {values[0]}")

    table, (logged, *_) = changes_of(log_since(mariadb, *begin), f"{database}.keys")
    inserted, changed = logged.slice(0, len(values)), logged.slice(len(values))
    assert changed["op"].to_pylist() == [DELETE, INSERT]
    assert changed["key"][0] == inserted["key"][0]
    now = {*inserted["key"].to_pylist()[1:], changed["key"][1].as_py()}
    rows = selected(session, name, table, "k")
    found = keys_of(table, rows)
    assert set(found.to_pylist()) == now
    assert len(now) == len(values)


@mariadb_only("compressed events; MySQL compresses transactions, as test_mysql.py has it")
def test_a_compressed_log_is_read_like_a_plain_one() -> None:
    with running_mariadb("--log-bin-compress=ON", "--log-bin-compress-min-len=10") as server:
        server.execute(
            "CREATE DATABASE shop",
            "CREATE TABLE shop.t (id INT PRIMARY KEY, v VARCHAR(100), w TEXT)",
        )
        begin = place(server)
        server.execute(
            "USE shop",
            "INSERT INTO shop.t SELECT seq, REPEAT('v', 90), REPEAT('w', 900) FROM seq_1_to_50",
            "UPDATE shop.t SET v = REPEAT('x', 80) WHERE id <= 20",
            "DELETE FROM shop.t WHERE id > 40",
            "CREATE TABLE shop.much_longer_than_ten_bytes (id INT PRIMARY KEY)",
        )
        raw = plain_log(server, *begin)
        kinds = set(raw.types.tolist())
        assert {165, 166, 167, 168} <= kinds
        events = whole(raw)
        queries = [
            Query.parse(events.body(int(number))).sql for number in events.of(EventType.QUERY)
        ]
        assert any(sql.startswith("CREATE TABLE shop.much_longer") for sql in queries)
        _, (batch, *_) = changes_of(events, "shop.t")
        assert pc.value_counts(batch["op"]).to_pylist() == [
            {"values": INSERT, "counts": 50},
            {"values": UPDATE, "counts": 20},
            {"values": DELETE, "counts": 10},
        ]


def test_images_without_all_columns_are_refused_by_name(mariadb: MariaDb) -> None:
    database = mariadb.database()
    begin = place(mariadb)
    mariadb.execute(
        "SET SESSION binlog_row_image = 'MINIMAL'",
        f"CREATE TABLE {database}.part (id INT PRIMARY KEY, v INT)",
        f"INSERT INTO {database}.part VALUES (1, 1)",
        f"UPDATE {database}.part SET v = 2",
    )
    with pytest.raises(RowImageError, match=r"binlog_row_image='FULL'"):
        changes_of(log_since(mariadb, *begin), f"{database}.part")


def test_events_beyond_16_mb_wide_tables_and_many_tables_of_one_transaction_are_read(
    mariadb: MariaDb,
) -> None:
    database = mariadb.database()
    columns = ", ".join(f"c{number} TINYINT" for number in range(300))
    begin = place(mariadb)
    mariadb.execute(
        f"CREATE TABLE {database}.wide (id INT PRIMARY KEY, {columns})",
        f"CREATE TABLE {database}.large (id INT PRIMARY KEY, b LONGBLOB)",
        "BEGIN",
        f"INSERT INTO {database}.wide (id, c7, c299) VALUES (1, 7, 9), (2, NULL, 1)",
        f"INSERT INTO {database}.large VALUES (1, REPEAT('x', 15000000)), (2, '')",
        f"UPDATE {database}.large, {database}.wide SET large.id = 3, wide.c0 = 5 WHERE large.id = "
        "1 AND wide.id = 1",
        "COMMIT",
    )
    events = log_since(mariadb, *begin)
    assert int((events.end - events.begin).max()) > 1 << 24
    table, (batch, *_) = changes_of(events, f"{database}.wide")
    mounted = MysqlMounter(table, database).mount(batch)
    assert mounted.select(["_op", "id", "c0", "c7", "c299"]).to_pylist() == [
        {"_op": "insert", "id": 1, "c0": None, "c7": 7, "c299": 9},
        {"_op": "insert", "id": 2, "c0": None, "c7": None, "c299": 1},
        {"_op": "update", "id": 1, "c0": 5, "c7": 7, "c299": 9},
    ]
    table, (batch, *_) = changes_of(events, f"{database}.large")
    mounted = MysqlMounter(table, database).mount(batch)
    assert mounted["_op"].to_pylist() == ["insert", "insert", "delete", "insert"]
    assert pc.binary_length(mounted["b"]).to_pylist() == [15000000, 0, 15000000, 15000000]


def test_what_a_transaction_does_to_a_row_is_one_change(mariadb: MariaDb) -> None:
    database = mariadb.database()
    name = f"{database}.folded"
    mariadb.execute(
        f"CREATE TABLE {name} (id INT PRIMARY KEY, v INT)",
        f"INSERT INTO {name} VALUES (1, 1), (2, 2), (3, 3)",
    )
    begin = place(mariadb)
    mariadb.execute(
        "BEGIN",
        f"INSERT INTO {name} VALUES (4, 4), (5, 5)",
        f"UPDATE {name} SET v = v + 10",
        f"DELETE FROM {name} WHERE id IN (2, 5)",
        f"INSERT INTO {name} VALUES (2, 22)",
        f"UPDATE {name} SET id = 9 WHERE id = 3",
        f"UPDATE {name} SET id = 3 WHERE id = 4",
        "COMMIT",
    )
    table, (batch, *_) = changes_of(log_since(mariadb, *begin), name, one_commit=True)
    mounted = MysqlMounter(table, database).mount(batch).select(["_op", "id", "v"]).to_pylist()
    assert sorted((row["id"], row["_op"], row["v"]) for row in mounted) == [
        (1, "update", 11),
        (2, "update", 22),
        (3, "update", 14),
        (9, "insert", 13),
    ]
