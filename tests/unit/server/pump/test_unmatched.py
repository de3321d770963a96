import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.pump.unmatched import outcome_of

Write = kvrpcpb.MvccWrite


@pytest.mark.parametrize(
    ("writes", "outcome"),
    [
        ([], None),
        ([Write(type=kvrpcpb.Put, start_ts=5, commit_ts=9)], 9),
        (
            [
                Write(type=kvrpcpb.Lock, start_ts=8, commit_ts=12),
                Write(type=kvrpcpb.Del, start_ts=5, commit_ts=7),
            ],
            7,
        ),
        ([Write(type=kvrpcpb.Rollback, start_ts=5, commit_ts=5)], 0),
        ([Write(type=kvrpcpb.Put, start_ts=3, commit_ts=5, has_overlapped_rollback=True)], 0),
        ([Write(type=kvrpcpb.Put, start_ts=3, commit_ts=5)], None),
        ([Write(type=kvrpcpb.Put, start_ts=6, commit_ts=7)], None),
    ],
)
def test_the_records_of_the_primary_tell_the_outcome(
    writes: list[Write], outcome: int | None
) -> None:
    assert outcome_of(kvrpcpb.MvccInfo(writes=writes), 5) == outcome
