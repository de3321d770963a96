"""pdpb.PD: settings that all of a cluster's components share,
kept under `/global/config/` where PD keeps them.

These calls carry no cluster id, and no header but the watch's refusals: they work before bootstrap,
as PD's do.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
from kvproto import pdpb_pb2

from server.coordinator.errors import RefusedError
from server.coordinator.header import Headers, by_name
from server.coordinator.leadership.leadership import FencedMetadata
from server.rpc.errors import StatusError
from storage.codec import prefix_end
from storage.meta.errors import CompactedError
from storage.meta.meta import Delete, Get, KeyValue, Op, Put, WatchEvent

ROOT = "/global/config/"
RESOURCE_GROUP = "resource_group/"
"""The prefix of the settings of TiDB's resource control, which TiDB 7.0 reads through these calls;
nobody writes there.
"""


class ConfigPathError(StatusError):
    """The path leaves the shared settings; everything else in the metadata is not for these
    calls.
    """

    def __init__(self, path: str) -> None:
        text = f'global config path "{path}" is not allowed'
        super().__init__(grpc.StatusCode.INVALID_ARGUMENT, text)


class GlobalConfigService:
    """Store, load and watch; one store call is one transaction."""

    def __init__(self, headers: Headers, metadata: FencedMetadata) -> None:
        self._headers = headers
        self._metadata = metadata

    def calls(self) -> Mapping[str, Any]:
        """The handlers by the names of their RPCs."""
        return by_name(self.StoreGlobalConfig, self.LoadGlobalConfig, self.WatchGlobalConfig)

    async def StoreGlobalConfig(
        self, request: pdpb_pb2.StoreGlobalConfigRequest, _context: Any
    ) -> pdpb_pb2.StoreGlobalConfigResponse:
        """Put and delete items, all or none; durable when it returns."""
        path = _path(request.config_path)
        await self._metadata.txn((), [_change(path, item) for item in request.changes])
        return pdpb_pb2.StoreGlobalConfigResponse()

    async def LoadGlobalConfig(
        self, request: pdpb_pb2.LoadGlobalConfigRequest, _context: Any
    ) -> pdpb_pb2.LoadGlobalConfigResponse:
        """The named items, each with its own error if it does not exist;
        without names all under the path.
        """
        path = _readable(request.config_path)
        if request.names:
            items = [await self._named(path, name) for name in request.names]
            return pdpb_pb2.LoadGlobalConfigResponse(items=items)
        prefix = path.encode()
        result = await self._metadata.txn((), [Get(prefix, prefix_end(prefix) or b"\0")])
        return pdpb_pb2.LoadGlobalConfigResponse(
            items=[_item(pair) for pair in result.pairs[0]], revision=result.revision
        )

    async def WatchGlobalConfig(
        self, request: pdpb_pb2.WatchGlobalConfigRequest, _context: Any
    ) -> AsyncIterator[pdpb_pb2.WatchGlobalConfigResponse]:
        """Changes from `revision` on (0: from now), a message a batch;
        a deleted item comes without its value.
        """
        prefix = _readable(request.config_path).encode()
        try:
            async for events in self._metadata.watch(prefix, request.revision):
                yield pdpb_pb2.WatchGlobalConfigResponse(
                    changes=[_changed(event) for event in events],
                    revision=events[-1].pair.mod_revision,
                )
        except CompactedError:
            text = (
                f"required watch revision: {request.revision} is smaller than current compact/min "
                "revision"
            )
            refusal = self._headers.refused(RefusedError(pdpb_pb2.DATA_COMPACTED, text))
            yield pdpb_pb2.WatchGlobalConfigResponse(header=refusal)

    async def _named(self, path: str, name: str) -> pdpb_pb2.GlobalConfigItem:
        pair = await self._metadata.get(_key(path, name))
        if pair is None:
            error = pdpb_pb2.Error(
                type=pdpb_pb2.GLOBAL_CONFIG_NOT_FOUND, message=f"key {name} not found"
            )
            return pdpb_pb2.GlobalConfigItem(name=name, error=error)
        return pdpb_pb2.GlobalConfigItem(name=name, payload=pair.value)


def _path(config_path: str) -> str:
    if config_path in ("", ROOT.removesuffix("/")):
        return ROOT
    # These calls carry no cluster id and would otherwise reach every key of the metadata.
    if not config_path.startswith(ROOT):
        raise ConfigPathError(config_path)
    return config_path


def _readable(config_path: str) -> str:
    return config_path if config_path.startswith(RESOURCE_GROUP) else _path(config_path)


def _key(path: str, name: str) -> bytes:
    return (f"{path.removesuffix('/')}/{name}" if name else path.removesuffix("/")).encode()


def _change(path: str, item: pdpb_pb2.GlobalConfigItem) -> Op:
    key = _key(path, item.name)
    if item.kind == pdpb_pb2.DELETE:
        return Delete(key)
    return Put(key, item.value.encode() or item.payload)


def _item(pair: KeyValue) -> pdpb_pb2.GlobalConfigItem:
    return pdpb_pb2.GlobalConfigItem(name=pair.key.decode(errors="replace"), payload=pair.value)


def _changed(event: WatchEvent) -> pdpb_pb2.GlobalConfigItem:
    item = _item(event.pair)
    item.kind = pdpb_pb2.DELETE if event.deleted else pdpb_pb2.PUT
    return item
