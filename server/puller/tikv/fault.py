"""Why a region subscription ended, and what follows: locate the range again, or stop the puller.

Pure.

The coordinator is asked for the place anew after any fault, so a leader hint is not needed.
Source: kvproto cdcpb.proto (Error), TiCDC's region request worker.
"""

from dataclasses import dataclass

from kvproto import cdcpb_pb2 as cdcpb

from storage.model.errors import InvalidError, TidemarkError

_BUSY_MS = 100


class ClusterIdMismatchError(InvalidError):
    """The store belongs to another cluster."""

    code = "ErrClusterIDMismatch"


class FeedRefusedError(InvalidError):
    """The store will never serve this subscription as it is."""

    code = "ErrEventFeedRefused"


class HistoryLostError(InvalidError):
    """The store has collected what was not pulled yet:
    going on would miss rows (TiCDC's code for it).
    """

    code = "ErrSnapshotLostByGC"


@dataclass(frozen=True, slots=True)
class Fault:
    """The end of one subscription; `fatal` set: of the puller."""

    reason: str
    wait_ms: int = 0
    fatal: TidemarkError | None = None


def fault_of(error: cdcpb.Error) -> Fault:
    """What a store's error means."""
    if error.HasField("cluster_id_mismatch"):
        ids = error.cluster_id_mismatch
        message = (
            f"the store is of cluster {ids.current}, we asked for {ids.request}; check "
            "--coordinator"
        )
        return Fault("cluster_id_mismatch", fatal=ClusterIdMismatchError(message))
    if error.HasField("compatibility"):
        message = (
            f"the store asks for version {error.compatibility.required_version} of its clients; "
            "upgrade tidemark"
        )
        return Fault("compatibility", fatal=FeedRefusedError(message))
    if error.HasField("duplicate_request"):
        message = (
            f"the store says region {error.duplicate_request.region_id} is subscribed twice under "
            "one request id"
        )
        return Fault("duplicate_request", fatal=FeedRefusedError(message))
    lost, _, why = error.server_is_busy.reason.partition(" ")
    # the protocol has no error for it; other clients wait, we know better
    if lost == f"[TM:{HistoryLostError.code}]":
        return Fault("snapshot_lost", fatal=HistoryLostError(why))
    if error.HasField("server_is_busy"):
        return Fault("server_is_busy", wait_ms=error.server_is_busy.backoff_ms or _BUSY_MS)
    if error.HasField("congested"):
        return Fault("congested", wait_ms=_BUSY_MS)
    for name in ("not_leader", "epoch_not_match", "region_not_found"):
        if error.HasField(name):
            return Fault(name)
    return Fault("unknown", wait_ms=_BUSY_MS)
