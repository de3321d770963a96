"""Transactions of pumps as changes of tables."""

import json
from typing import Any

import pytest
from tipb import binlog_pb2

from server.changefeed.table import TableRecord
from server.puller.pump.transactions import (
    BATCH_ROWS,
    BinlogInvalidError,
    Tables,
    TableUnknownError,
    Transaction,
    batches,
)
from server.puller.tidb.table import tidb_table
from storage.tidb.mutation import MutationError
from storage.tidb.number import encode_varint
from storage.tidb.schema import Column, TableInfo
from storage.tidb.schema_history import SchemaHistory, Table

INFO = TableInfo.build(7, "t", [Column.bigint("id"), Column.bigint("v")])


def tables() -> Tables:
    doc, other = json.loads(INFO.to_json()), json.loads(INFO.to_json()) | {"id": 8}
    history = SchemaHistory(5, {1: "a"}, [Table(1, "a", doc), Table(1, "a", other)])
    return Tables(history, [tidb_table(TableRecord("a", doc))])


def rows(table_id: int, *ids: int, **more: Any) -> binlog_pb2.TableMutation:
    inserted = [b"\x08" + encode_varint(number) + b"\x08\x04\x08\x0a" for number in ids]
    return binlog_pb2.TableMutation(
        table_id=table_id, inserted_rows=inserted, sequence=[binlog_pb2.Insert] * len(ids), **more
    )


def txn(commit_ts: int, *mutations: binlog_pb2.TableMutation) -> Transaction:
    value = binlog_pb2.PrewriteValue(schema_version=1, mutations=mutations).SerializeToString()
    return Transaction(commit_ts, commit_ts - 1, value, 0, b"")


def test_rows_of_many_transactions_go_out_together() -> None:
    ((span, batch),) = batches([txn(10, rows(7, 1, 2)), txn(12, rows(7, 3))], tables())
    assert (span.table_id, batch["commit_ts"].to_pylist()) == (7, [10, 10, 12])


def test_tables_that_nobody_wants_are_left_out() -> None:
    assert not list(batches([txn(10, rows(8, 1))], tables()))


def test_large_transactions_come_in_several_batches() -> None:
    found = list(batches([txn(10, rows(7, *range(BATCH_ROWS + 1)))], tables()))
    assert [batch.num_rows for _, batch in found] == [BATCH_ROWS, 1]


def test_rows_of_a_table_that_no_schema_change_brought_stop_the_feed() -> None:
    with pytest.raises(TableUnknownError, match="committed at 10 has rows of table 9"):
        list(batches([txn(10, rows(9, 1))], tables()))


def test_rows_that_cannot_be_read_stop_the_feed() -> None:
    with pytest.raises(BinlogInvalidError, match="committed at 10 cannot be read"):
        list(batches([Transaction(10, 9, b"\xff", 0, b"")], tables()))
    broken = binlog_pb2.TableMutation(
        table_id=7, inserted_rows=[b"\xff"], sequence=[binlog_pb2.Insert]
    )
    with pytest.raises(MutationError, match=r"table 7 .*commit_ts 10"):
        list(batches([txn(10, broken)], tables()))


def test_deletes_by_key_alone_stop_the_feed() -> None:
    with pytest.raises(BinlogInvalidError, match="deletes by key alone"):
        list(batches([txn(10, rows(7, deleted_ids=[1]))], tables()))


def test_a_table_in_a_new_form_takes_the_place_of_the_old_one() -> None:
    found = tables()
    new = tidb_table(TableRecord("a", json.loads(INFO.to_json()) | {"id": 8}))
    found.take(new)
    assert found.spans == [new.span]
    found.drop(["a.t"])
    assert found.spans == []
