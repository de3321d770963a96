"""A store and regions, as a store would tell a coordinator of them."""

from kvproto import metapb_pb2


def a_store() -> metapb_pb2.Store:
    return metapb_pb2.Store(id=1, address="127.0.0.1:20160", version="8.5.0")


def a_region(
    region_id: int = 2, start: bytes = b"", end: bytes = b"", version: int = 1
) -> metapb_pb2.Region:
    epoch = metapb_pb2.RegionEpoch(conf_ver=1, version=version)
    peers = [metapb_pb2.Peer(id=region_id + 100, store_id=1)]
    return metapb_pb2.Region(
        id=region_id, start_key=start, end_key=end, region_epoch=epoch, peers=peers
    )
