"""The same row has the same values by a dump and by the log, in every type,
whatever the server's settings are.
"""

from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest

from server.capture.source.mysql import mysql_table
from server.dump.progress import TableState
from storage.meta.client import EtcdMeta
from storage.model.event import INSERT, UPDATE
from tests.integration.dump.dumping import over, start, until
from tests.integration.dump.more_types import MORE, MORE_ROWS
from tests.integration.mysql.every_type import COLUMNS, ROWS
from tests.integration.mysql.replica import following
from tests.mariadb import MYSQLD, MariaDb, running_mariadb
from tests.mysqld import in_mysql_syntax

SERVERS = {
    "usual": [],
    "odd": [
        "--sql-mode=PAD_CHAR_TO_FULL_LENGTH,ANSI_QUOTES,PIPES_AS_CONCAT,NO_BACKSLASH_ESCAPES,REAL_AS_FLOAT,IGNORE_SPACE",
        "--default-time-zone=-07:30",
        "--character-set-server=latin1",
        "--collation-server=latin1_german2_ci",
        "--div-precision-increment=0",
        "--explicit-defaults-for-timestamp=OFF",
    ],
}
KEYED = """k1 DATE, k2 DATETIME(3), k3 TIMESTAMP(2) NOT NULL DEFAULT 0, k4 TIME(6), k5 YEAR, k6 BIT(9),
  k7 ENUM('a','b'), k8 SET('x','y'), k9 UUID, k10 INET6, k11 INET4, k12 BINARY(4), k13 CHAR(4) CHARACTER SET utf8mb4,
  k14 DECIMAL(30,10)"""
KEYED_ROWS = [
    ["'0000-00-00'", "'0000-00-00'", "0", "'-838:59:59.999999'", "0", "b'0'", "0", "''"],
    [
        "'2024-02-31'",
        "'2024-00-31 23:59:59.999'",
        "'2000-01-01'",
        "'0'",
        "2155",
        "b'111111111'",
        "'b'",
        "'x,y'",
    ],
]
KEYED_ENDS = [
    ["'00000000-0000-0000-0000-000000000000'", "'::'", "'0.0.0.0'", "''", "''", "'0'"],
    [
        "'018f0000-0000-7000-8000-0000000000ff'",
        "'fe80::'",
        "'1.2.3.0'",
        "'a '",
        "'é '",
        "'-0.0000000001'",
    ],
]


LACKED = 3 if MYSQLD else 0
"""MySQL has no UUID, INET6 and INET4, which these rows begin with."""


def write(server: MariaDb) -> None:
    server.execute(f"CREATE TABLE d.t (id INT PRIMARY KEY, {COLUMNS}{MORE}) CHARACTER SET utf8mb4")
    keyed = in_mysql_syntax(KEYED) if MYSQLD else KEYED
    names = ", ".join(
        column.split()[0] for column in keyed.split(",") if column.split()[0].startswith("k")
    )
    server.execute(f"CREATE TABLE d.keyed ({keyed}, PRIMARY KEY ({names}))")
    known = {column for column, *_ in server.execute("SHOW COLUMNS FROM d.t")}
    with closing(server.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SET SESSION sql_mode = 'ALLOW_INVALID_DATES', time_zone = '+09:00'")
        for number, each in enumerate([*ROWS, *MORE_ROWS]):
            row = {
                column: value
                for column, value in each.items()
                if column in known or column.startswith("`")
            }
            values = ", ".join(["%s"] * (len(row) + 1))
            cursor.execute(
                f"INSERT INTO d.t ({', '.join(['id', *row])}) VALUES ({values})",
                [number, *row.values()],
            )
        shapes = "ST_GeomFromText('LINESTRING(1 2, 3 4)', 4326), POINT(0.5, -1)"
        cursor.execute(f"INSERT INTO d.t (id, g, p) VALUES (100, {shapes})")
        for first, last in zip(KEYED_ROWS, KEYED_ENDS, strict=True):
            cursor.execute(f"INSERT INTO d.keyed VALUES ({', '.join([*first, *last[LACKED:]])})")


@pytest.mark.parametrize("flags", SERVERS.values(), ids=SERVERS)
async def test_a_row_is_the_same_by_dump_and_by_log(flags: list[str], meta: EtcdMeta) -> None:
    with running_mariadb(*flags) as server:
        server.execute("CREATE DATABASE d")
        async with following(server.uri, meta, "d.*") as feed:
            write(server)
            for name, count in (
                ("d.t", len(ROWS) + len(MORE_ROWS) + 1),
                ("d.keyed", len(KEYED_ROWS)),
            ):
                await feed.until(
                    lambda name=name, count=count: rows_of(feed, name, INSERT).num_rows == count
                )
            await start(meta, verify=True)
            found = await until(meta, feed, over)
            assert {each.state for each in found.values()} == {TableState.DONE}, found
            for name in ("d.t", "d.keyed"):
                logged, dumped = rows_of(feed, name, INSERT), rows_of(feed, name, UPDATE)
                for zero_dates in ("text", "key-text") if name == "d.keyed" else ("null", "text"):
                    one, other = (values(feed, name, rows, zero_dates) for rows in (logged, dumped))
                    assert one.num_rows == other.num_rows == logged.num_rows
                    assert one["key"].to_pylist() == other["key"].to_pylist()
                    for column in one.column_names:
                        assert one[column].equals(other[column]), (
                            column,
                            one[column],
                            other[column],
                        )


def span_of(feed: Any, name: str) -> Any:
    spans = [
        span for span, versions in feed.target.versions.items() if versions[-1][1].name == name
    ]
    return spans[0] if spans else None


def rows_of(feed: Any, name: str, op: int) -> pa.Table:
    batches = [batch for span, batch in list(feed.target.batches) if span == span_of(feed, name)]
    if not batches:
        return pa.table({"op": pa.array([], pa.uint8())})
    table = pa.Table.from_batches(batches)
    return table.filter(pa.compute.equal(table["op"], op))


def values(feed: Any, name: str, rows: pa.Table, zero_dates: str) -> pa.Table:
    """The rows mounted, in the order of their keys."""
    record = feed.target.versions[span_of(feed, name)][-1][1].record.showing(zero_dates)
    ordered = rows.sort_by("key").combine_chunks()
    out = mysql_table(record).mounter.mount(ordered.to_batches()[0])
    out.validate(full=True)
    columns = [column for column in out.schema.names if not column.startswith("_")]
    return pa.Table.from_batches([out.select(columns)]).append_column("key", ordered["key"])
