"""What a write did, as observers see it: prewrites, commits and rollbacks of Put and Delete, in the order applied."""

from typing import Final, NamedTuple

PREWRITE: Final = 1
COMMIT: Final = 2
ROLLBACK: Final = 3
COMMITTED: Final = 4


class Change(NamedTuple):
    """One event on one key; numbers of `event` as in cdcpb.Event.LogType. `op` is `record.PUT` or `record.DELETE`.

    Only a PREWRITE and a COMMITTED carry values; `old_value` is what the transaction replaced, b"" when nothing.
    `txn_source` is 0 for what users wrote.
    """

    event: int
    key: bytes
    encoded: bytes
    op: int
    start_ts: int
    commit_ts: int = 0
    value: bytes = b""
    old_value: bytes = b""
    txn_source: int = 0
