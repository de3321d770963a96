"""The store's identity: its cluster, its id and its regions, kept in its own database from before
its first call.

A store that finds no cluster makes its first regions, and is a founder until the coordinator has
taken them (Bootstrap). Of two founders one loses. It must never serve the regions that it made:
with two stores for the same keys, each would have a part of the rows. So it drops them at its next
start, and joins as a store without regions.
"""

import time
from dataclasses import dataclass

import structlog
from kvproto import metapb_pb2 as metapb

from server.rpc.pd import AlreadyBootstrappedError, PdClient
from storage.codec import encode_bytes
from storage.kv import KV, WriteBatch
from storage.model.errors import ConflictError, CorruptError
from storage.mvcc.engine import Draft
from storage.mvcc.record import META_COLUMN, encode_document, reading_document
from storage.mvcc.region import Region, RegionMap, decode_regions, encode_regions

VERSION = "8.5.0"
"""The TiKV version whose protocol we speak; TiCDC refuses stores below 7.5."""

REGIONS_KEY = META_COLUMN + b"regions"
_STORE_KEY = META_COLUMN + b"store"
_FOUNDING_KEY = META_COLUMN + b"founding"
"""The key that exists until the store's first regions are known to be the cluster's."""
_FORMAT = 1

_log = structlog.get_logger(__name__)


class ClusterMismatchError(ConflictError):
    """The data directory belongs to another cluster than the coordinator's."""

    code = "ErrClusterMismatch"


@dataclass(frozen=True, slots=True)
class Identity:
    """A store of a cluster, and the regions it opened with."""

    cluster_id: int
    store_id: int
    regions: RegionMap
    is_founder: bool = False
    """Whether it made these regions and the coordinator has yet to accept them."""


async def load_identity(kv: KV, pd: PdClient, split_keys: list[bytes]) -> Identity:
    """Read the identity; a new directory gets new ids,
    and the first regions when the cluster has none; durable. Regions that it made for a cluster
    which another store has founded are dropped.

    Raises:
        ClusterMismatchError: the directory was written for another cluster.
    """
    stored = kv.get(_STORE_KEY)
    if stored is not None:
        identity = _stored(kv, stored, pd)
        if identity.is_founder and await _has_lost(pd, identity.store_id):
            return _without_regions(kv, identity)
        return identity
    store_id = await pd.alloc_id()
    regions = [] if await pd.is_bootstrapped() else await _first_regions(pd, split_keys)
    batch = WriteBatch()
    document = encode_document(_FORMAT, cluster_id=pd.cluster_id, store_id=store_id)
    batch.put(_STORE_KEY, document)
    batch.put(REGIONS_KEY, encode_regions(regions))
    if regions:
        batch.put(_FOUNDING_KEY, b"")
    # Ids on disk before anybody is told: a store that came back with other ids would be a second
    # one.
    kv.write(batch, sync=True)
    return Identity(pd.cluster_id, store_id, RegionMap(regions), is_founder=bool(regions))


async def announce(pd: PdClient, identity: Identity, address: str) -> None:
    """Register the store and its regions with the coordinator;
    a new cluster is bootstrapped with them. Submit `founded` when it returns.

    Raises:
        ClusterMismatchError: another store has bootstrapped the cluster that this one was about to.
    """
    store = metapb.Store(
        id=identity.store_id,
        address=address,
        version=VERSION,
        state=metapb.Up,
        start_timestamp=int(time.time()),
    )
    regions = list(identity.regions)
    # A founder asks whether or not the cluster has one by now: only the coordinator's answer says
    # whose regions are the first.
    if identity.is_founder or (regions and not await pd.is_bootstrapped()):
        last = regions[-1]
        # Bootstrap takes one region: the last part, which has kept its id. The others are reported
        # after it, as splits of it.
        whole = Region(last.region_id, last.peer_id)
        try:
            await pd.bootstrap(store, region_message(whole, identity.store_id))
        except AlreadyBootstrappedError as err:
            # It may have been this store, whose answer was lost.
            if await _has_lost(pd, identity.store_id):
                raise ClusterMismatchError(
                    f"another store bootstrapped cluster {identity.cluster_id} first; "
                    "start this one again: it joins without regions"
                ) from err
    await pd.put_store(store)
    await report_regions(pd, identity.regions, identity.store_id)


def founded(draft: Draft) -> None:
    """The store is registered, and its regions are the cluster's."""
    draft.delete(_FOUNDING_KEY)


async def _has_lost(pd: PdClient, store_id: int) -> bool:
    """Whether another store bootstrapped the cluster, and the cluster does not know this store."""
    if not await pd.is_bootstrapped():
        return False
    return all(store.id != store_id for store in await pd.stores())


def _without_regions(kv: KV, identity: Identity) -> Identity:
    """Drop the regions, which were never announced and so are empty."""
    _log.info("another store founded the cluster; joining without regions")
    batch = WriteBatch()
    batch.put(REGIONS_KEY, encode_regions([]))
    batch.delete(_FOUNDING_KEY)
    kv.write(batch, sync=True)
    return Identity(identity.cluster_id, identity.store_id, RegionMap([]))


async def report_regions(pd: PdClient, regions: RegionMap, store_id: int) -> None:
    """Tell the coordinator all regions of this store."""
    if len(regions):
        await pd.region_heartbeat([region_message(region, store_id) for region in regions])


def region_message(region: Region, store_id: int) -> metapb.Region:
    """A region as the protocol has it; its only peer is this store's."""
    return metapb.Region(
        id=region.region_id,
        start_key=region.start_key,
        end_key=region.end_key,
        region_epoch=metapb.RegionEpoch(conf_ver=region.conf_ver, version=region.version),
        peers=[metapb.Peer(id=region.peer_id, store_id=store_id)],
    )


async def _first_regions(pd: PdClient, split_keys: list[bytes]) -> list[Region]:
    whole = Region(await pd.alloc_id(), await pd.alloc_id())
    ids = [(await pd.alloc_id(), await pd.alloc_id()) for _ in split_keys]
    return whole.split([encode_bytes(key) for key in split_keys], ids)


def _stored(kv: KV, data: bytes, pd: PdClient) -> Identity:
    regions = kv.get(REGIONS_KEY)
    with reading_document(data, _FORMAT, "the store's identity") as document:
        cluster_id, store_id = int(document["cluster_id"]), int(document["store_id"])
    if regions is None:
        raise CorruptError("the store's region table is missing; restore the store from a backup")
    if cluster_id != pd.cluster_id:
        raise ClusterMismatchError(
            f"the data directory belongs to cluster {cluster_id}, the coordinator at {pd.address} "
            f"to {pd.cluster_id}; correct --coordinator or --data-dir"
        )
    is_founder = kv.get(_FOUNDING_KEY) is not None
    return Identity(cluster_id, store_id, decode_regions(regions), is_founder=is_founder)
