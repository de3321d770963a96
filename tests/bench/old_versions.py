"""A store's directory full of old versions, written past the store:
loading them through it would take hours.
"""

from collections.abc import Iterator
from pathlib import Path

from storage.codec import encode_bytes
from storage.kv import WriteBatch
from storage.leveldb import LevelDB
from storage.mvcc.record import PUT, Write, write_key
from tests.integration.store.daemons import Cluster
from tests.integration.store.stubs import row_key

_BATCH = 10_000


def fill(
    cluster: Cluster, directory: Path, *, rows: int, versions: int, value_bytes: int, first_ts: int
) -> int:
    """Stop the store, write `rows` times `versions` committed puts with ascending timestamps,
    start it again.

    Returns the last commit_ts. Row n of table 101 has handle 2 n.
    """
    cluster.store.stop()
    kv = LevelDB(directory / "store" / "mvcc")
    batch = WriteBatch()
    for key, value in _records(rows, versions, bytes(value_bytes), first_ts):
        batch.put(key, value)
        if len(batch) >= _BATCH:
            kv.write(batch, sync=False)
            batch = WriteBatch()
    kv.write(batch, sync=True)
    kv.close()
    cluster.restart_store()
    return first_ts + 2 * versions + 1


def _records(
    rows: int, versions: int, value: bytes, first_ts: int
) -> Iterator[tuple[bytes, bytes]]:
    writes = [
        (first_ts + 2 * at + 1, Write(PUT, first_ts + 2 * at, value).encode())
        for at in range(versions)
    ]
    for row in range(rows):
        encoded = encode_bytes(row_key(101, 2 * row))
        for commit_ts, record in writes:
            yield write_key(encoded, commit_ts), record
