"""A log tells of all tables of a server: a type that nobody knows stops only who wants its rows."""

import struct
from types import SimpleNamespace

import numpy as np
import pytest

from server.capture.source.mysql import mysql_table
from server.puller.mysql.ddl_changes import DdlChanges
from server.puller.mysql.rows import LogRows
from server.puller.mysql.tables import Tables, definition_of_table_map, record_of
from server.puller.mysql.transaction.commits import Commits
from storage.mysql.event import EventType
from storage.mysql.rows import TableMaps
from storage.mysql.schema import ColumnUnsupportedError
from storage.mysql.table_map import RowMetadataError, TableMap
from tests.unit.storage.mysql.encode import (
    LONG,
    VARCHAR,
    VARCHAR_COMPRESSED,
    event,
    events,
    rows,
    table_map,
)

OURS = [(LONG, 0), (VARCHAR, 20)]
UNKNOWN = 200
MAP, WRITE = int(EventType.TABLE_MAP), EventType.WRITE_ROWS_V1


def written(number):
    return event(WRITE, rows(WRITE, 7, OURS, [[struct.pack("<I", number), b"x"]]))


def foreign(described=None):
    """A row of `shop.other`, which has a column that no version here knows, or is so described."""
    body = (8).to_bytes(6, "little") + b"\0\0\1\xff\1\4abcd"
    other = described or table_map(8, "other", [(LONG, 0), (UNKNOWN, 0)])
    return [event(MAP, other), event(WRITE, body)]


def committed(*transactions):
    parts = [part for transaction in transactions for part in transaction]
    sizes = [len(transaction) for transaction in transactions]
    ts = np.repeat(np.arange(11, 11 + len(sizes)), sizes)
    return Commits(events(parts), ts, np.cumsum(sizes))


class Log:
    """The rows of `shop.t`, which is captured; `wanted` are further tables that would be."""

    def __init__(self, *wanted):
        ours = TableMap.parse(table_map(7, "t", OURS), mariadb=True)
        record = record_of(definition_of_table_map(ours, []).identified(None, 1), 1)
        tables = Tables([mysql_table(record)])
        self.added = []
        sink = SimpleNamespace(add=lambda _, batch: self.added.append(batch.num_rows))
        self.rows = LogRows(tables, 10, sink)
        catalog = SimpleNamespace(
            wants=lambda schema, table: (schema, table) in [("shop", "t"), *wanted]
        )
        self.changes = DdlChanges(tables, self.rows, catalog)
        self.passed = []

    def read(self, commits):
        for mismatch in self.rows.add(commits):
            for name, found in mismatch.table_maps.items():
                assert self.changes._mismatched(name, found, mismatch.commit_ts - 1, None) is None
                self.passed.append(name)


def test_a_table_of_an_unknown_type_that_nobody_wants_stops_nothing():
    log = Log()
    ours = event(MAP, table_map(7, "t", OURS))
    log.read(committed([ours, written(1)], foreign(), [ours, written(2)]))
    log.read(committed([*foreign(), ours, written(3)], foreign()))
    assert sum(log.added) == 3
    assert log.passed == [("shop", "other")]


COLLATIONS = b"\x03\x02\x2d\x2d"
COMPRESSED = table_map(8, "other", [(LONG, 0), (VARCHAR, 20), (VARCHAR_COMPRESSED, 40)])


def test_compressed_columns_have_a_collation_in_the_log_as_others_do():
    log = Log()
    log.read(committed(foreign(COMPRESSED + COLLATIONS)))
    assert log.passed == [("shop", "other")]
    other = TableMap.parse(COMPRESSED + COLLATIONS, mariadb=True)
    assert [column.collation for column in other.columns[1:]] == [0x2D, 0x2D]


def test_a_table_whose_columns_have_no_names_in_the_log_is_told_with_the_way_out():
    names = COMPRESSED.index(b"\x04\x09\x02c0")
    bare = TableMap.parse(COMPRESSED[:names], mariadb=True)
    with pytest.raises(RowMetadataError, match="binlog_row_metadata='FULL'"):
        definition_of_table_map(bare, [])


def test_whoever_wants_its_rows_is_told_which_type_it_is():
    log = Log(("shop", "other"))
    with pytest.raises(
        ColumnUnsupportedError, match=r"shop\.other is of type 200.*leave the table"
    ):
        log.read(committed(foreign()))


def test_nothing_can_be_made_of_it():
    log = events(foreign())
    (group,) = TableMaps(mariadb=True).group(log)
    assert group.table.name == "shop.other"
    assert not group.table.is_full
    for make in (
        lambda: group.table.to_table(1),
        lambda: definition_of_table_map(group.table, []),
    ):
        with pytest.raises(ColumnUnsupportedError, match="type 200"):
            make()
