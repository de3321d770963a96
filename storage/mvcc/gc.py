"""Garbage collection of old versions. Pure over a frozen `Reader`: it says what to delete, batch by batch.

After GC at `safe_point`, every read at a timestamp >= safe_point gives what it gave before. Of each key that means: the
newest version with commit_ts <= safe_point stays if it is a Put, and goes if it is a Delete; all older ones go, and so
do the Lock and Rollback records up to the safepoint. A Delete goes last of its key, in the same batch as what it hid.
"""

from collections.abc import Generator

from storage.kv import Reader
from storage.mvcc.layout import WRITE, column_range, split_version, value_key
from storage.mvcc.record import DELETE, PUT, decode_write

BATCH_KEYS = 1024


def garbage(reader: Reader, lower: bytes, upper: bytes, safe_point: int) -> Generator[list[bytes], None, None]:
    """Store keys to delete in the encoded range, in batches of about 1024 that end between two user keys."""
    batch: list[bytes] = []
    current, kept_newest = b"", False
    for column_key, data in reader.scan(*column_range(WRITE, lower, upper)):
        encoded, commit_ts = split_version(column_key)
        if encoded != current:
            if len(batch) >= BATCH_KEYS:
                yield batch
                batch = []
            current, kept_newest = encoded, False
        if commit_ts > safe_point:
            continue
        write = decode_write(data)
        if write.kind in (PUT, DELETE) and not kept_newest:
            kept_newest = True
            if write.kind == PUT:
                continue
        batch.append(column_key)
        if write.kind == PUT and write.short_value is None:
            batch.append(value_key(encoded, write.start_ts))
    if batch:
        yield batch
