"""The services for operators: debugpb.Debug (TiKV's) changes settings while the store runs,
tidemarkpb.v1.StoreService shows and moves regions.

`OnlineConfig` keeps what was set, under TiKV's names; it goes before the flags. `tikv-ctl
modify-tikv-config -m server -n gc.max_write_bytes_per_sec -v 10MB` does it, as does grpcurl on
debugpb.Debug.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import structlog
from kvproto import debugpb_pb2 as debugpb
from tidemarkpb.v1 import store_pb2

from server.store.feed.hub import FeedHub
from server.store.gc import AutoGc, CollectorParts
from server.store.handover import Handover
from server.store.identity import Identity, region_message
from server.store.split_merge import Merger
from storage.kv import Reader
from storage.model.errors import InvalidError
from storage.mvcc.engine import Draft
from storage.mvcc.group_commit import GroupCommit
from storage.mvcc.record import META_COLUMN, encode_document, reading_document
from storage.mvcc.region import Region, region_bytes
from storage.tasks import Changes

SETTINGS_KEY: Final = META_COLUMN + b"settings"
_FORMAT: Final = 1
_UNITS: Final = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)

_log = structlog.get_logger(__name__)


class UnknownSettingError(InvalidError):
    """No such setting can be changed online."""

    code = "ErrUnknownSetting"


class BadSizeError(InvalidError):
    """The size cannot be parsed."""

    code = "ErrBadSize"


class OnlineConfig:
    """Settings that are sizes, by name, and the parts that follow each."""

    def __init__(
        self, reader: Reader, group: GroupCommit, followers: Mapping[str, Callable[[int], None]]
    ) -> None:
        """`followers` are called at once with the settings that were stored before this start."""
        self._group = group
        self._followers = followers
        self._set = _stored(reader)
        self._changes = Changes()
        for name, value in self._set.items():
            if name in followers:
                followers[name](value)

    async def set(self, name: str, text: str) -> int:
        """Change one setting; durable and in force when it returns.

        Raises:
            UnknownSettingError, BadSizeError: the request is wrong; nothing changed.
        """
        setting = name.strip().replace("_", "-")
        if setting not in self._followers:
            raise UnknownSettingError(
                f"{name!r} cannot be changed online; these can: "
                f"{', '.join(sorted(self._followers))}"
            )
        value = parse_size(text)
        await self._changes.make(lambda: self._change(setting, value))
        return value

    async def _change(self, setting: str, value: int) -> None:
        sizes = self._set | {setting: value}
        await self._group.submit([partial(_put, data=encode_document(_FORMAT, sizes=sizes))])
        self._set = sizes
        self._followers[setting](value)
        _log.info("setting changed", name=setting, value=value)


def parse_size(text: str) -> int:
    """Bytes of TiKV's readable sizes: `10MB` and `10MiB` are both 10 * 2^20.

    Raises:
        BadSizeError: anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BadSizeError(
            f"{text!r} is no size; write bytes, or a number with KB, MB or GB, such as 10MB"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _put(draft: Draft, data: bytes) -> None:
    draft.put(SETTINGS_KEY, data)


def _stored(reader: Reader) -> dict[str, int]:
    data = reader.get(SETTINGS_KEY)
    if data is None:
        return {}
    with reading_document(data, _FORMAT, "the record of settings") as document:
        return {str(name): int(value) for name, value in document["sizes"].items()}


class DebugService:
    """debugpb.Debug, as far as it changes settings."""

    def __init__(self, config: OnlineConfig) -> None:
        self._config = config

    async def ModifyTikvConfig(
        self, request: debugpb.ModifyTikvConfigRequest, _: Any
    ) -> debugpb.ModifyTikvConfigResponse:
        """Change one setting; the module is ignored, as in TiKV, names are whole."""
        await self._config.set(request.config_name, request.config_value)
        return debugpb.ModifyTikvConfigResponse()


@dataclass(slots=True)
class StoreService:
    """tidemarkpb.v1.StoreService."""

    identity: Identity
    parts: CollectorParts
    gc: AutoGc
    hub: FeedHub
    merger: Merger
    handover: Handover
    scanners: Executor

    async def GetStoreStatus(
        self, _request: store_pb2.GetStoreStatusRequest, _: Any
    ) -> store_pb2.GetStoreStatusResponse:
        """Regions with their sizes, GC's progress, and how far the store is resolved."""
        regions = list(self.parts.gate.regions)
        loop = asyncio.get_running_loop()
        sizes = await loop.run_in_executor(
            self.scanners, lambda: [region_bytes(self.parts.kv, r) for r in regions]
        )
        return store_pb2.GetStoreStatusResponse(
            cluster_id=self.identity.cluster_id,
            store_id=self.identity.store_id,
            regions=[
                self._region(region, size) for region, size in zip(regions, sizes, strict=True)
            ],
            gc=self._progress(),
            safe_ts=self.hub.safe_ts(b"", b""),
        )

    async def MergeRegions(
        self, request: store_pb2.MergeRegionsRequest, _: Any
    ) -> store_pb2.MergeRegionsResponse:
        """See `Merger.merge`."""
        merged = await self.merger.merge(request.source_region_id, request.target_region_id)
        return store_pb2.MergeRegionsResponse(region=region_message(merged, self.identity.store_id))

    async def AdoptRegion(
        self, request: store_pb2.AdoptRegionRequest, _: Any
    ) -> store_pb2.AdoptRegionResponse:
        """See `Handover.adopt`."""
        await self.handover.adopt(request.cluster_id, request.region, request.gc_safe_point)
        return store_pb2.AdoptRegionResponse()

    def _region(self, region: Region, size: int) -> store_pb2.RegionStatus:
        message = region_message(region, self.identity.store_id)
        counts = self.parts.versions.get(region.region_id)
        if counts is None:
            return store_pb2.RegionStatus(region=message, approximate_bytes=size)
        versions = store_pb2.VersionCounts(
            rows=counts.rows, puts=counts.puts, versions=counts.versions, min_ts=counts.min_ts
        )
        return store_pb2.RegionStatus(region=message, approximate_bytes=size, versions=versions)

    def _progress(self) -> store_pb2.GCProgress:
        walk = self.gc.collector.walk
        return store_pb2.GCProgress(
            safe_point=walk.safe_point,
            finished=walk.finished,
            next_key=walk.next_key,
            processed_regions=self.gc.processed_regions,
            max_write_bytes_per_sec=self.parts.rate.bytes_per_s,
        )
