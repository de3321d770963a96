"""keyspacepb.Keyspace: the keyspaces that PD recorded, and DEFAULT, which every cluster has.

None is made here.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import DecodeError
from kvproto import keyspacepb_pb2, pdpb_pb2

from gcsafepoint.state.errors import KeyspaceNotFoundError
from gcsafepoint.state.records import GcKeys
from gcsafepoint.state.states import DEFAULT, Keyspace
from server.coordinator.errors import RefusedError
from server.coordinator.header import Headers
from server.coordinator.leadership.leadership import FencedMetadata

_GC_OF_ITS_OWN = ("gc_management_type", "keyspace_level")


def keyspace_of(record: bytes) -> Keyspace:
    """The facts of a stored KeyspaceMeta that GC needs. Raises: ValueError: it is none."""
    try:
        meta = keyspacepb_pb2.KeyspaceMeta.FromString(record)
    except DecodeError as err:
        raise ValueError("not a KeyspaceMeta") from err
    key, level = _GC_OF_ITS_OWN
    return Keyspace(
        meta.id, meta.name, meta.config.get(key) == level, meta.state == keyspacepb_pb2.ENABLED
    )


class KeyspaceService:
    """LoadKeyspace, LoadKeyspaceByID, GetAllKeyspaces; read from the metadata by each call."""

    def __init__(self, headers: Headers, metadata: FencedMetadata, keys: GcKeys) -> None:
        self._headers = headers
        self._metadata = metadata
        self._keys = keys

    def calls(self) -> Mapping[str, Any]:
        """The handlers by the names of their RPCs."""
        return self._headers.calls(self.LoadKeyspace, self.LoadKeyspaceByID, self.GetAllKeyspaces)

    async def LoadKeyspace(
        self, request: keyspacepb_pb2.LoadKeyspaceRequest
    ) -> keyspacepb_pb2.LoadKeyspaceResponse:
        """The keyspace of a name."""
        return _found(meta for meta in await self._metas() if meta.name == request.name)

    async def LoadKeyspaceByID(
        self, request: keyspacepb_pb2.LoadKeyspaceByIDRequest
    ) -> keyspacepb_pb2.LoadKeyspaceResponse:
        """The keyspace of an id."""
        return _found(meta for meta in await self._metas() if meta.id == request.id)

    async def GetAllKeyspaces(
        self, request: keyspacepb_pb2.GetAllKeyspacesRequest
    ) -> keyspacepb_pb2.GetAllKeyspacesResponse:
        """All keyspaces by id from `start_id`, at most `limit` (0: all)."""
        metas = [meta for meta in await self._metas() if meta.id >= request.start_id]
        return keyspacepb_pb2.GetAllKeyspacesResponse(keyspaces=metas[: request.limit or None])

    async def _metas(self) -> list[keyspacepb_pb2.KeyspaceMeta]:
        pairs = await self._metadata.get_prefix(self._keys.keyspace_metas)
        metas = [keyspacepb_pb2.KeyspaceMeta.FromString(pair.value) for pair in pairs]
        # PD makes DEFAULT's record at its first start; here nobody does, and clients still ask for
        # it.
        if all(meta.id != DEFAULT.id for meta in metas):
            metas.insert(0, keyspacepb_pb2.KeyspaceMeta(id=DEFAULT.id, name=DEFAULT.name))
        return metas


def _found(metas: Any) -> keyspacepb_pb2.LoadKeyspaceResponse:
    meta = next(metas, None)
    if meta is None:
        raise RefusedError(pdpb_pb2.ENTRY_NOT_FOUND, KeyspaceNotFoundError().message)
    return keyspacepb_pb2.LoadKeyspaceResponse(keyspace=meta)
