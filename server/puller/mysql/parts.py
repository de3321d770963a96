"""The events of transactions that have not ended, part by part: in memory,
or on disk beyond the changefeed's share.
"""

import itertools
import struct
from collections.abc import Iterator
from typing import Final

import numpy as np

from server.puller.mysql.commits import size_of
from server.puller.mysql.errors import XaTooLargeError
from server.puller.tikv.open_transactions import Format, OpenRows, OpenTransactions, TxnKey
from storage.mysql.buffer import Bytes
from storage.mysql.event import Events

_BYTES_MAX: Final = 512 << 20
_COUNT: Final = struct.Struct("<Q")
_PLACE: Final = struct.Struct(">I")


class Parts:
    """Those of one transaction, in the order of the log;
    each is in a buffer of its own (`commits.joined`).
    """

    def __init__(self, rows: OpenRows[Events], number: int) -> None:
        self.size = 0
        """Bytes of all of them."""
        self._rows = rows
        self._number = number
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Events]:
        """Read them, one at a time; raises as `take`."""
        for place in range(self._count):
            yield _there(self._rows.get(self._at(place)))

    def append(self, part: Events) -> None:
        """Put one behind the others."""
        self._rows.put(self._at(self._count), part)
        self._count += 1
        self.size += size_of(part)

    def pop(self) -> Events:
        """Take out the last one; raises as `take`."""
        self._count -= 1
        part = _there(self._rows.pop(self._at(self._count)))
        self.size -= size_of(part)
        return part

    def take(self) -> Iterator[Events]:
        """Take out all of them, one at a time; to be used up.

        Raises:
            CorruptDatabaseError: what is on disk is damaged.
        """
        count, self._count, self.size = self._count, 0, 0
        for place in range(count):
            yield _there(self._rows.pop(self._at(place)))
        self._rows.settle()

    def clear(self) -> None:
        """Drop all of them, unread."""
        for place in range(self._count):
            self._rows.discard(self._at(place))
        self._rows.settle()
        self._count, self.size = 0, 0

    def _at(self, place: int) -> TxnKey:
        return self._number, _PLACE.pack(place)


class HeldParts:
    """Of all transactions of a log that have not ended; used by one thread at a time."""

    def __init__(self, shared: OpenTransactions) -> None:
        self._shared = shared
        self._rows = OpenRows(shared, Format(_encode, _decode, size_of))
        self._numbers = itertools.count(1)

    def begin(self) -> Parts:
        """Those of one more transaction, none so far."""
        return Parts(self._rows, next(self._numbers))

    def spill_if_short(self) -> None:
        """Write all to disk if the changefeed holds too much in memory;
        waits while the disk refuses.

        Raises:
            OpenTransactionsClosedError: `end` was called while the disk took nothing.
            XaTooLargeError: there is no directory to spill into, and no room in memory.
        """
        if self._shared.is_short:
            self._rows.spill()
        if self._shared.used_bytes > _BYTES_MAX:
            raise XaTooLargeError(
                f"prepared XA transactions hold more than {_BYTES_MAX >> 20} MiB of rows, which "
                "are kept in memory "
                "here: commit or roll back the oldest (XA RECOVER on the server), then try again"
            )

    def end(self) -> None:
        """Let nobody wait for the disk any more; may be called from any thread."""
        self._rows.end()


def _there(part: Events | None) -> Events:
    assert part is not None, "each place has a part"
    return part


def _encode(part: Events) -> bytes:
    """The number of events, where each one ends, and all of them one behind the other."""
    ends = part.end.astype("<i8")
    return b"".join((_COUNT.pack(len(part)), ends.data, part.data.u8s[: ends[-1]].data))


def _decode(data: bytes) -> Events:
    (count,) = _COUNT.unpack_from(data)
    end = np.frombuffer(data, "<i8", count, _COUNT.size).astype(np.int64)
    events = memoryview(data)[_COUNT.size + 8 * count :]
    return Events(Bytes.padded(events), np.concatenate([[0], end[:-1]]), end)
