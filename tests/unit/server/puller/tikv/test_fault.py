import pytest
from kvproto import cdcpb_pb2 as cdcpb

from server.puller.tikv.feed import (
    ClusterIdMismatchError,
    FeedRefusedError,
    HistoryLostError,
    fault_of,
)


@pytest.mark.parametrize("name", ["not_leader", "epoch_not_match", "region_not_found"])
def test_a_region_that_moved_is_located_at_once(name):
    fault = fault_of(cdcpb.Error(**{name: {}}))
    assert (fault.reason, fault.wait_ms, fault.fatal) == (name, 0, None)


def test_a_busy_store_is_given_the_time_it_asks_for():
    assert fault_of(cdcpb.Error(server_is_busy={"backoff_ms": 700})).wait_ms == 700
    assert fault_of(cdcpb.Error(server_is_busy={})).wait_ms > 0
    assert fault_of(cdcpb.Error(congested={})).wait_ms > 0


def test_an_error_of_a_newer_store_is_waited_out():
    fault = fault_of(cdcpb.Error())
    assert fault.fatal is None
    assert fault.wait_ms > 0


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (
            cdcpb.Error(cluster_id_mismatch={"current": 7, "request": 8}),
            ClusterIdMismatchError,
            "cluster 7",
        ),
        (cdcpb.Error(compatibility={"required_version": "9.9.9"}), FeedRefusedError, "9.9.9"),
        (cdcpb.Error(duplicate_request={"region_id": 5}), FeedRefusedError, "region 5"),
        (
            cdcpb.Error(
                server_is_busy={
                    "reason": "[TM:ErrSnapshotLostByGC] GC has passed 7",
                    "backoff_ms": 5000,
                }
            ),
            HistoryLostError,
            "GC has passed 7",
        ),
    ],
)
def test_what_can_never_succeed_is_fatal_and_says_why(error, kind, told):
    fatal = fault_of(error).fatal
    assert isinstance(fatal, kind)
    assert told in fatal.message
