"""One region subscription of one feed connection."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from storage.mvcc.engine import Change
from storage.mvcc.region import Region

MAX_EVENT_BYTES = 1 << 20
MAX_EVENT_ROWS = 1024
_ROW_BYTES = 64
# these bits of a txn_source are set by a changefeed that writes here (TiKV's TxnSource)
_CDC_SOURCE = 0xFF


@dataclass(slots=True, eq=False, kw_only=True)
class Subscription:
    """What is sent for `region`, within the encoded range `[lower, upper)`,
    under the client's `request_id`.
    """

    region: Region
    request_id: int
    checkpoint_ts: int
    lower: bytes
    upper: bytes
    old_values: bool
    filter_loop: bool = False
    initialized: bool = False
    ended: bool = False
    resolved_ts: int = field(default=0)

    def covers(self, change: Change) -> bool:
        """Whether the client asked for this key, and for this writer."""
        if self.filter_loop and change.txn_source & _CDC_SOURCE:
            return False
        return self.lower <= change.encoded and (not self.upper or change.encoded < self.upper)


def chunks(changes: Iterable[Change]) -> Iterator[tuple[list[Change], int]]:
    """Changes in pieces of at most 1024 and about 1 MiB, with their sizes in bytes;
    takes one piece at a time.
    """
    piece: list[Change] = []
    size = 0
    for change in changes:
        piece.append(change)
        size += len(change.key) + len(change.value) + len(change.old_value) + _ROW_BYTES
        if size >= MAX_EVENT_BYTES or len(piece) >= MAX_EVENT_ROWS:
            yield piece, size
            piece, size = [], 0
    if piece:
        yield piece, size
