"""The incremental scan of a change feed, and all that is known of one key.

Pure over a frozen `Reader`.
"""

from collections.abc import Generator
from dataclasses import dataclass

from storage.codec import encode_bytes
from storage.kv import Reader
from storage.mvcc.draft import COMMITTED, PREWRITE, Change, Versions
from storage.mvcc.layout import (
    AFTER_VERSIONS,
    LOCK,
    VALUE,
    WRITE,
    column_range,
    split_version,
    user_key,
)
from storage.mvcc.record import DELETE, PUT, Lock, Write, decode_lock, decode_write


def changes_since(
    reader: Reader, lower: bytes, upper: bytes, checkpoint_ts: int, *, old_values: bool
) -> Generator[Change, None, None]:
    """Open data locks as PREWRITE, then every version after `checkpoint_ts` as COMMITTED,
    newest first per key.

    The range is encoded. With `old_values`, each change carries the value it replaced.
    """
    versions = Versions(reader)
    for column_key, data in reader.scan(*column_range(LOCK, lower, upper)):
        lock = decode_lock(data)
        if lock.changes_data:
            yield _prewritten(versions, column_key[1:], lock, old_values=old_values)
    pending: Change | None = None
    for column_key, data in reader.scan(*column_range(WRITE, lower, upper)):
        encoded, commit_ts = split_version(column_key)
        if pending is not None and pending.encoded != encoded:
            yield pending
            pending = None
        if pending is None and commit_ts <= checkpoint_ts:
            continue
        write = decode_write(data)
        if write.kind not in (PUT, DELETE):
            continue
        value = versions.written_value(encoded, write) if write.kind == PUT else b""
        if pending is not None:
            yield pending._replace(old_value=value) if old_values else pending
            pending = None
        if commit_ts > checkpoint_ts:
            key = user_key(encoded)
            pending = Change(
                COMMITTED,
                key,
                encoded,
                write.kind,
                write.start_ts,
                commit_ts,
                value,
                txn_source=write.txn_source,
            )
    if pending is not None:
        yield pending


def _prewritten(versions: Versions, encoded: bytes, lock: Lock, *, old_values: bool) -> Change:
    value = versions.written_value(encoded, lock) if lock.kind == PUT else b""
    old_value = (versions.value(encoded) or b"") if old_values else b""
    key = user_key(encoded)
    return Change(
        PREWRITE, key, encoded, lock.kind, lock.start_ts, 0, value, old_value, lock.txn_source
    )


@dataclass(frozen=True, slots=True)
class KeyHistory:
    """Everything stored for one key; `values` are (start_ts, value) of the value column."""

    lock: Lock | None
    writes: tuple[tuple[int, Write], ...]
    values: tuple[tuple[int, bytes], ...]


def key_history(reader: Reader, key: bytes) -> KeyHistory:
    """All records of one raw key, newest first."""
    encoded = encode_bytes(key)
    versions = Versions(reader)
    values = reader.scan(VALUE + encoded, VALUE + encoded + AFTER_VERSIONS)
    return KeyHistory(
        versions.lock(encoded),
        tuple(versions.writes(encoded)),
        tuple((split_version(column_key)[1], value) for column_key, value in values),
    )


def key_of_transaction(reader: Reader, lower: bytes, upper: bytes, start_ts: int) -> bytes | None:
    """The first raw key of the encoded range that the transaction locked,
    wrote or is rolled back on; walks it all.
    """
    for column_key, data in reader.scan(*column_range(LOCK, lower, upper)):
        if decode_lock(data).start_ts == start_ts:
            return user_key(column_key[1:])
    for column_key, data in reader.scan(*column_range(WRITE, lower, upper)):
        if decode_write(data).start_ts == start_ts:
            return user_key(split_version(column_key)[0])
    return None
