"""The entry that pumps know a changefeed by lives exactly as long as the changefeed,
whoever still runs at its end.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from server.capture.fence import Fence
from server.capture.records import Records
from server.changefeed import keys
from server.changefeed.info import ChangefeedInfo, status_json
from server.puller.pump.registry import PUMPS, Registration, read_membership
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from storage.model.errors import CorruptError
from storage.model.ts import compose


class Clock:
    """A coordinator's timestamps; 20 s pass between two of them."""

    def __init__(self) -> None:
        self._now_ms = 0

    async def tso(self) -> int:
        self._now_ms += 20_000
        return compose(self._now_ms)


@pytest.fixture
async def meta(tmp_path: Path) -> AsyncIterator[EtcdMeta]:
    async with EmbeddedEtcd.open(tmp_path) as etcd:
        yield EtcdMeta(etcd)


@pytest.fixture
async def records(meta: EtcdMeta) -> Records:
    lease = await meta.grant_lease(60)
    return Records(meta, Fence(keys.OWNER, await meta.campaign(keys.OWNER, b"me", lease.id)))


async def test_the_entry_has_the_checkpoint_and_goes_with_the_changefeed_for_good(
    meta: EtcdMeta, records: Records
) -> None:
    clock: Any = Clock()
    info = ChangefeedInfo(
        id="feed",
        sink_uri="flight://",
        source_uri="pump://",
        start_ts=5,
        target_ts=0,
        create_time="",
    )
    await records.create(info, [])
    registration = Registration("feed", clock, meta, 5)
    await registration.renew()
    await meta.put(keys.status("feed"), status_json(7))
    await registration.renew()
    found = await meta.get(keys.drainer("feed"))
    assert found is not None
    assert (json.loads(found.value)["nodeId"], json.loads(found.value)["maxCommitTS"]) == (
        "tidemark-feed",
        7,
    )
    await records.remove("feed")
    assert await meta.get(keys.drainer("feed")) is None
    await registration.renew()  # its puller has not ended yet
    assert await meta.get(keys.drainer("feed")) is None


async def test_a_creation_clears_what_an_older_version_left(
    meta: EtcdMeta, records: Records
) -> None:
    await meta.put(keys.drainer("feed"), b"{}")
    await meta.put(keys.drainer("other"), b"{}")
    await records.clear("feed")
    assert await meta.get(keys.drainer("feed")) is None
    assert await meta.get(keys.drainer("other")) is not None


@pytest.mark.parametrize(
    "value",
    [b"", b"[]", b"{}", b"\xff", b"[" * 99_999, b'{"host":"","state":"","maxCommitTS":Infinity}'],
)
async def test_a_pump_whose_entry_cannot_be_read_is_no_pump_to_be_passed_by(
    meta: EtcdMeta, value: bytes
) -> None:
    """Its binlogs would be missed."""
    clock: Any = Clock()
    await meta.put(PUMPS + b"bad\xff", value)
    with pytest.raises(CorruptError, match="registry entry of pump bad"):
        await read_membership(clock, meta)
