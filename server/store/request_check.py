"""What is wrong with a request whatever the state of its keys: key lengths, its size,
and timestamps of the future.

Limits are TiKV's: `storage.max-key-size` (of the encoded key) and `raftstore.raft-entry-max-size`.

A timestamp is refused that the oracle cannot have given out yet: one read at a timestamp of next
year would lift every later commit_ts that the store computes to next year as well (see
`storage.mvcc.read_fence`). So a request may be at most a minute ahead of what the store knows of
the oracle; before the store refuses one, it asks the oracle. Timestamps up to that need nobody: old
snapshots stay readable without a coordinator.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from kvproto import errorpb_pb2 as errorpb

from storage.model.errors import InvalidError
from storage.model.ts import MAX_TS, compose
from storage.mvcc.errors import MvccError

MAX_KEY_BYTES = 8 << 10
MAX_ENTRY_BYTES = 8 << 20
_GROUP, _ENCODED_GROUP = 8, 9
_AHEAD = compose(60_000)


class KeyTooLargeError(MvccError, InvalidError):
    """A key is longer than the store takes."""

    code = "ErrKeyTooLarge"

    def __init__(self, size: int) -> None:
        super().__init__(
            f"a key of {size} encoded bytes is over the limit of {MAX_KEY_BYTES}; shorten it"
        )


class KeyEmptyError(MvccError, InvalidError):
    """A key has no bytes."""

    code = "ErrKeyEmpty"

    def __init__(self) -> None:
        super().__init__(
            "an empty key cannot be written; it stands for the end of the key space in ranges"
        )


def key_fault(keys: Sequence[bytes], *, raw: bool) -> MvccError | None:
    """Why these keys cannot be written, or None."""
    if not keys:
        return None
    if not all(keys):
        return KeyEmptyError()
    longest = max(map(len, keys))
    size = longest if raw else (longest // _GROUP + 1) * _ENCODED_GROUP
    return KeyTooLargeError(size) if size > MAX_KEY_BYTES else None


def entry_fault(size: int, region_id: int) -> errorpb.Error | None:
    """The error of a write of `size` bytes, or None."""
    if size <= MAX_ENTRY_BYTES:
        return None
    too_large = errorpb.RaftEntryTooLarge(region_id=region_id, entry_size=size)
    return errorpb.Error(
        message=(
            f"a write of {size} bytes is over the limit of {MAX_ENTRY_BYTES}; split the "
            "transaction's request"
        ),
        raft_entry_too_large=too_large,
    )


class TimestampAheadError(MvccError, InvalidError):
    """A request's timestamp is of the future."""

    code = "ErrTimestampAhead"

    def __init__(self, ts: int, now_ts: int) -> None:
        super().__init__(
            f"timestamp {ts} is more than a minute ahead of the oracle's {now_ts}; take it from "
            "the TSO"
        )


class TimestampCheck:
    """How far timestamps may go."""

    def __init__(self, clock: Callable[[], Awaitable[int]], now_ts: int) -> None:
        """`clock` is the oracle; `now_ts` one of its timestamps."""
        self._clock = clock
        self._now_ts = now_ts
        self._asking = asyncio.Lock()

    async def reach(self, ts: int) -> None:
        """Learn the oracle's time if `ts` is beyond what is known of it; `fault` knows it then.

        Raises:
            UnavailableError: no coordinator answers.
        """
        if self.fault(ts) is None:
            return
        async with self._asking:
            if self.fault(ts) is not None:
                self._now_ts = max(self._now_ts, await self._clock())

    def fault(self, ts: int) -> TimestampAheadError | None:
        """Why `ts` is not taken, or None; MAX_TS stands for "the newest" and is no time."""
        return (
            TimestampAheadError(ts, self._now_ts) if self._now_ts + _AHEAD < ts < MAX_TS else None
        )
