"""What a pump may send, and what stops the feed."""

from typing import Any

import pytest
from tipb import binlog_pb2

from server.puller.pump.stream import PrewriteMissingError, transaction_of
from server.puller.pump.transactions import BinlogInvalidError, Transaction
from storage.pump.binlog import fake


def sent(**fields: Any) -> Transaction:
    return transaction_of("p", 7, binlog_pb2.Binlog(**fields).SerializeToString())


def test_a_commit_with_its_rows_is_a_transaction() -> None:
    found = sent(tp=binlog_pb2.Commit, start_ts=8, commit_ts=9, prewrite_value=b"rows")
    assert found == Transaction(9, 8, b"rows", 0, b"")


def test_a_schema_change_has_no_rows() -> None:
    found = sent(
        tp=binlog_pb2.Commit, start_ts=8, commit_ts=9, ddl_job_id=5, ddl_query=b"drop table t"
    )
    assert (found.ddl_job_id, found.ddl_query) == (5, b"drop table t")


def test_a_heartbeat_is_empty() -> None:
    assert transaction_of("p", 7, fake(9)) == Transaction(9, 9, b"", 0, b"")


@pytest.mark.parametrize(
    ("tp", "start_ts", "commit_ts"),
    [
        (binlog_pb2.Commit, 9, 8),
        (binlog_pb2.Commit, 9, 9),
        (binlog_pb2.Commit, 0, 9),
        (binlog_pb2.Prewrite, 8, 0),
        (binlog_pb2.Rollback, 8, 0),
    ],
)
def test_what_is_no_committed_transaction_is_refused(
    tp: int, start_ts: int, commit_ts: int
) -> None:
    with pytest.raises(
        BinlogInvalidError, match=f"start_ts {start_ts} and commit_ts {commit_ts} after 7"
    ):
        sent(tp=tp, start_ts=start_ts, commit_ts=commit_ts, prewrite_value=b"rows")


def test_a_commit_whose_rows_are_not_known_is_refused() -> None:
    with pytest.raises(PrewriteMissingError, match="transaction of 8 was committed at 9"):
        sent(tp=binlog_pb2.Commit, start_ts=8, commit_ts=9)


def test_garbage_is_refused_with_the_place_where_it_stood() -> None:
    with pytest.raises(BinlogInvalidError, match="pump p sent garbage after 7: ff"):
        transaction_of("p", 7, b"\xff\xff")
