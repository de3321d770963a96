"""The stores that may register, and the effects of a registration (pure; PD's server/cluster:
putStoreImpl).

Invariants:
1. No two stores that are not removed share an address, be it one for clients or one for peers.
2. A removed store never comes back; its address is free again.
3. A registration does not undo what the cluster decided about the store: its state stays.
"""

import re
from collections.abc import Iterable, Mapping

from kvproto import metapb_pb2, pdpb_pb2

from server.coordinator.cluster.regions import one_line
from server.coordinator.errors import RefusedError

_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)(?:[-+].*)?")
_KEPT = ("state", "node_state", "last_heartbeat", "physically_destroyed")

Version = tuple[int, int, int]


def is_removed(store: metapb_pb2.Store) -> bool:
    """Whether the store is tombstone."""
    return store.state == metapb_pb2.Tombstone or store.node_state == metapb_pb2.Removed


def version_of(store: metapb_pb2.Store) -> Version:
    """Return the version as numbers; 1.0.0 for a store without one.

    Raises:
        RefusedError: it is not three numbers with dots.
    """
    version = _parsed(store.version)
    if version is None:
        raise _refused(
            f"invalid put store {one_line(store)}, error: {store.version} is not in dotted-tri "
            "format"
        )
    return version


def cluster_version(stores: Iterable[metapb_pb2.Store]) -> str:
    """The oldest version among the stores that are not removed, as `8.5.0`;
    empty without stores.
    """
    versions = [_parsed(store.version) for store in stores if not is_removed(store)]
    oldest = min((version for version in versions if version), default=())
    return ".".join(map(str, oldest))


def registered(store: metapb_pb2.Store, stores: Mapping[int, metapb_pb2.Store]) -> metapb_pb2.Store:
    """Return the record to store for `store`, which registers among `stores`.

    Raises:
        RefusedError: it may not.
    """
    stored = stores.get(store.id)
    if stored is not None and is_removed(stored):
        raise RefusedError(pdpb_pb2.STORE_TOMBSTONE, "store is tombstone")
    if not store.id or not store.address:
        raise _refused(f"invalid put store {one_line(store)}: it needs an id and an address")
    version_of(store)  # refuses what is none
    for other in stores.values():
        if other.id != store.id and not is_removed(other):
            _check_addresses(store, other)
    return store if stored is None else _merged(store, stored)


def _parsed(version: str) -> Version | None:
    match = _VERSION.fullmatch(version or "1.0.0")
    if match is None:
        return None
    major, minor, patch = match.groups()
    return int(major), int(minor), int(patch)


def _check_addresses(store: metapb_pb2.Store, other: metapb_pb2.Store) -> None:
    taken = {other.address, other.peer_address} - {""}
    for address, kind in ((store.address, "address"), (store.peer_address, "peer address")):
        if address in taken:
            raise _refused(
                f"duplicated store {kind}: {one_line(store)}, already registered by "
                f"{one_line(other)}"
            )


def _merged(store: metapb_pb2.Store, stored: metapb_pb2.Store) -> metapb_pb2.Store:
    kept = metapb_pb2.Store()
    kept.CopyFrom(store)
    # A restarted store registers with defaults; what the cluster has decided about it, as being
    # offline, must stay.
    for field in _KEPT:
        setattr(kept, field, getattr(stored, field))
    labels = {label.key: label.value for label in (*stored.labels, *store.labels)}
    del kept.labels[:]
    kept.labels.extend(metapb_pb2.StoreLabel(key=key, value=value) for key, value in labels.items())
    return kept


def _refused(text: str) -> RefusedError:
    return RefusedError(pdpb_pb2.UNKNOWN, text)
