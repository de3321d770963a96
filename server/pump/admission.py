"""Which binlogs a pump takes: refusals have the original Pump's text where it has one.

A heartbeat is taken even when the disk is low or the node not online, a prewrite only when neither
is so and there is memory to wait for its outcome; commits and rollbacks are taken as long as there
is disk.
"""

import grpc

from server.pump.disk import DiskWatch
from server.pump.node import ONLINE, Node
from server.rpc.errors import StatusError
from storage.model.errors import UnavailableError
from storage.pump.binlog import Binlog, Kind, parse
from storage.pump.storage import PumpStorage

WAITING_BYTES_MAX = 256 << 20


class PrewritesFullError(UnavailableError):
    """More prewrites wait for their outcome than the pump will hold."""

    code = "ErrPrewritesFull"


class Admission:
    """The door of one storage."""

    def __init__(
        self,
        storage: PumpStorage,
        cluster_id: int,
        node: Node,
        disk: DiskWatch,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
    ) -> None:
        self._storage = storage
        self._cluster_id = cluster_id
        self._node = node
        self._disk = disk
        self._waiting_bytes_max = waiting_bytes_max

    def check_cluster(self, cluster_id: int) -> None:
        """Raises: StatusError: the client believes that this is another cluster."""
        if cluster_id != self._cluster_id:
            raise StatusError(
                grpc.StatusCode.UNKNOWN,
                f"cluster ID are mismatch, {cluster_id} vs {self._cluster_id}",
            )

    def admit(self, payload: bytes) -> Binlog:
        """The binlog to be stored.

        Raises:
            BinlogInvalidError: it is none.
            StatusError: the node is not online, or its disk is low.
            PrewritesFullError: too many prewrites have no outcome.
        """
        binlog = parse(payload)
        if binlog.is_fake:
            return binlog
        if self._disk.is_low:
            raise StatusError(
                grpc.StatusCode.UNKNOWN,
                f"no available space, available: {self._disk.available_bytes}, "
                f"StopWriteAtAvailableSpace: {self._disk.stop_write_at_bytes}",
            )
        if binlog.kind == Kind.PREWRITE and not binlog.is_empty:
            self._check_prewrites()
        return binlog

    def _check_prewrites(self) -> None:
        if self._node.state != ONLINE:
            raise StatusError(grpc.StatusCode.UNKNOWN, f"no online: {self._node.state}")
        if self._storage.waiting_bytes > self._waiting_bytes_max:
            raise PrewritesFullError(
                f"prewrites without an outcome take {self._storage.waiting_bytes} bytes; write to "
                "another pump, and see whether this one reaches the store"
            )
