"""Rows that a DDL changed although nobody wrote them."""

import json
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

import pytest

from server.changefeed.table import SourceTable, TableRecord
from server.puller import metrics
from server.puller.tidb.cluster import unwritten_rows
from server.puller.tidb.table import tidb_table
from server.rpc.tikv import Pairs
from storage.model.event import DELETE, UPDATE
from storage.tidb.record import record_key
from storage.tidb.schema import Column, TableInfo
from storage.tidb.schema_history import REMOVED

DOC = json.loads(TableInfo.build(7, "t", [Column.bigint("id"), Column.bigint("v")]).to_json())
PARTS = {
    "enable": True,
    "definitions": [
        {"id": 8, "name": {"O": "p", "L": "p"}},
        {"id": 9, "name": {"O": "q", "L": "q"}},
    ],
}


class FakeSchemas:
    """A store whose tables and partitions have two rows each, in two pages;
    it notes when they are read.
    """

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []

    async def rows(self, table_id: int, ts: int) -> AsyncIterator[Pairs]:
        self.read.append((table_id, ts))
        for number in (1, 2):
            yield [(record_key(table_id, number), b"row %d" % number)]

    async def present(self, keys: Sequence[bytes], ts: int) -> Collection[bytes]:
        """Users have written the second row of any partition to the first one that stays."""
        assert ts == 100
        return {record_key(8, 2)} & set(keys)


def table(**members: Any) -> SourceTable:
    return tidb_table(TableRecord("a", DOC | members))


async def rows(
    source: SourceTable, start_ts: int, *, own_keys: bool = False
) -> list[dict[str, Any]]:
    schemas: Any = FakeSchemas()
    batches = [each async for each in unwritten_rows(schemas, source, start_ts, own_keys=own_keys)]
    assert all(ts == 101 or source.record.table_info.get(REMOVED) for _, ts in schemas.read)
    return [row for batch in batches for row in batch.to_pylist()]


async def test_a_table_that_is_read_again_has_all_its_rows_as_updates_right_behind_the_ddl() -> (
    None
):
    reread = table(tidemark_reread={"ts": 100, "emptied": False})
    counted = metrics.UNWRITTEN_ROWS._value.get()
    found = await rows(reread, 100)
    assert metrics.UNWRITTEN_ROWS._value.get() == counted + 2
    assert [row["key"] for row in found] == [record_key(7, 1), record_key(7, 2)]
    assert [row["value"] for row in found] == [b"row 1", b"row 2"]
    assert {(row["commit_ts"], row["start_ts"], row["op"], row["old_value"]) for row in found} == {
        (101, 100, UPDATE, None)
    }
    assert await rows(reread, 99) == found, "from a checkpoint in front of the DDL"
    assert await rows(reread, 101) == [], "the reader has them"


@pytest.mark.parametrize(("own_keys", "tables"), [(False, (8, 8, 9, 9)), (True, (7, 7, 7, 7))])
async def test_so_have_its_partitions(own_keys: bool, tables: tuple[int, ...]) -> None:
    reread = table(tidemark_reread={"ts": 100, "emptied": True}, partition=PARTS)
    found = await rows(reread, 100, own_keys=own_keys)
    assert [row["key"] for row in found] == [
        record_key(each, 1 + place % 2) for place, each in enumerate(tables)
    ]


async def test_rows_of_removed_partitions_are_deleted() -> None:
    removed = table(partition=PARTS, **{REMOVED: {"ts": 100, "partition_ids": [5]}})
    found = await rows(removed, 100)
    assert [(row["key"], row["op"], row["commit_ts"]) for row in found] == [
        (record_key(5, 1), DELETE, 101),
        (record_key(5, 2), DELETE, 101),
    ]


async def test_keys_of_removed_partitions_that_users_have_written_to_others_by_then_stay_in_binlogs() -> (
    None
):
    removed = table(partition=PARTS, **{REMOVED: {"ts": 100, "partition_ids": [5]}})
    found = await rows(removed, 100, own_keys=True)
    assert [(row["key"], row["op"]) for row in found] == [(record_key(7, 1), DELETE)]


async def test_any_other_table_has_none() -> None:
    assert await rows(table(), 0) == []
