"""The embedded metadata on disk: keys and values in LevelDB (docs/format/metadata.md).

One batch carries a revision's events, the pairs they leave, and the head; so what is read back is
always a whole state.
"""

import struct
from collections.abc import Iterable

from etcdpb import kv_pb2, rpc_pb2
from google.protobuf.message import DecodeError

from storage.kv import Reader, WriteBatch, scan_prefix
from storage.meta.store.state import State
from storage.model.errors import CorruptError

VERSION = 1
_VERSION_KEY, _HEAD_KEY = b"v", b"h"
_PAIR, _EVENTS, _LEASE, _ALARMS = b"k", b"e", b"l", b"a"
_HEAD = struct.Struct(">qq")
_NUMBER = struct.Struct(">q")


class MetadataVersionError(CorruptError):
    """The directory was written by a program that is newer than this one."""

    code = "ErrMetadataVersion"


def load(reader: Reader) -> tuple[State, dict[int, int]]:
    """Read the state and the leases' TTLs in seconds; an empty directory is a new state.

    Raises:
        MetadataVersionError: the format is not ours.
        CorruptError: a record cannot be read.
    """
    state = State()
    version = reader.get(_VERSION_KEY)
    if version is None:
        return state, {}
    if version != bytes([VERSION]):
        raise MetadataVersionError(
            f"the metadata has format {version.hex()}, this program reads {VERSION}; upgrade it"
        )
    try:
        revision, compact_revision = _HEAD.unpack(reader.get(_HEAD_KEY) or b"")
        ttls = {
            _number(key): _NUMBER.unpack(value)[0] for key, value in scan_prefix(reader, _LEASE)
        }
        pairs = (kv_pb2.KeyValue.FromString(value) for _, value in scan_prefix(reader, _PAIR))
        state.restore(revision, compact_revision, ttls, pairs)
        for key, value in scan_prefix(reader, _EVENTS):
            # older ones were being removed when the server ended
            if _number(key) >= compact_revision:
                state.restore_events(
                    _number(key), list(rpc_pb2.WatchResponse.FromString(value).events)
                )
    except (struct.error, KeyError, DecodeError) as err:
        raise CorruptError(
            f"the metadata cannot be read: {err}; restore the directory from a backup"
        ) from err
    return state, ttls


def save_revisions(batch: WriteBatch, state: State, revisions: Iterable[int]) -> None:
    """Write the changes in `revisions`, and the head."""
    for revision in revisions:
        events = state.events(revision)
        batch.put(
            _EVENTS + _NUMBER.pack(revision),
            rpc_pb2.WatchResponse(events=events).SerializeToString(),
        )
        for event in events:
            if event.type == kv_pb2.Event.PUT:
                batch.put(_PAIR + event.kv.key, event.kv.SerializeToString())
            else:
                batch.delete(_PAIR + event.kv.key)
    save_head(batch, state)


def save_head(batch: WriteBatch, state: State) -> None:
    """Write the format version and the revisions."""
    batch.put(_VERSION_KEY, bytes([VERSION]))
    batch.put(_HEAD_KEY, _HEAD.pack(state.revision, state.compact_revision))


def save_lease(batch: WriteBatch, lease: int, ttl_s: int) -> None:
    """Write a granted lease."""
    batch.put(_LEASE + _NUMBER.pack(lease), _NUMBER.pack(ttl_s))


def delete_lease(batch: WriteBatch, lease: int) -> None:
    """Remove a lease."""
    batch.delete(_LEASE + _NUMBER.pack(lease))


def load_alarms(reader: Reader) -> set[int]:
    """The raised alarms, by etcd's numbers."""
    return set(reader.get(_ALARMS) or b"")


def save_alarms(batch: WriteBatch, alarms: Iterable[int]) -> None:
    """Write the raised alarms."""
    batch.put(_ALARMS, bytes(sorted(alarms)))


def events_before(revision: int) -> tuple[bytes, bytes]:
    """The keys `[lower, upper)` of the changes that a compaction at `revision` drops."""
    return _EVENTS, _EVENTS + _NUMBER.pack(revision)


def _number(key: bytes) -> int:
    return int(_NUMBER.unpack(key[1:])[0])
