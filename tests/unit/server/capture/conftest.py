"""An upstream in memory: one region, a coordinator that keeps safepoints,
and the real embedded metadata.
"""

import asyncio
import json
from functools import partial
from types import SimpleNamespace

import pytest
from kvproto import cdcpb_pb2 as cdcpb
from kvproto import metapb_pb2 as metapb

from server.capture.creation import NewChangefeed
from server.capture.feed import FeedFactory
from server.capture.fence import Fence
from server.capture.local import LocalProcessor, Resources
from server.capture.owner import Owner
from server.capture.records import Records
from server.capture.source.registry import sources
from server.changefeed import keys
from server.puller.source import SourceContext
from server.puller.tikv.feed import Fault
from server.rpc.pd import MinSafePoint
from server.rpc.region_cache import RegionRoute
from storage.tidb.record import encode_record
from storage.tidb.schema import Column, TableInfo
from tests.unit.server.capture.flight_feed import Feed

TABLE = TableInfo.build(101, "accounts", [Column.bigint("id"), Column.bigint("balance")])
Row = cdcpb.Event.Row


class Upstream:
    """Stands in for PdClient and EventFeeds."""

    cluster_id = 7

    def __init__(self):
        self.now_ts, self.gc_ts = 1000, 0
        self.safepoints = {"gc_worker": 0}
        self.meta = None
        """Where the coordinator's keys of safepoints are, once there is one."""
        self.rows = []
        self.resolved_ts = 0
        self.subscriptions = []
        self.log = None
        """The source of changefeeds with the URI log://."""

    async def tso(self, count=1):
        self.now_ts += count
        return self.now_ts

    async def gc_safe_point(self):
        return self.gc_ts

    async def update_service_gc_safe_point(self, service_id, ttl_s, safe_point):
        key = f"/pd/{self.cluster_id}/gc/safe_point/service/{service_id}".encode()
        if ttl_s <= 0:
            await self.meta.delete(key)
            self.safepoints.pop(service_id, None)
        elif safe_point >= min(self.safepoints.values()):
            record = {"service_id": service_id, "expired_at": 1 << 40, "safe_point": safe_point}
            await self.meta.put(key, json.dumps(record).encode())
            self.safepoints[service_id] = safe_point
        least = min(self.safepoints, key=self.safepoints.get)
        return MinSafePoint(least, ttl_s, self.safepoints[least])

    async def scan_regions(self, start, end, limit):
        return [RegionRoute(metapb.Region(id=1), metapb.Peer(id=1, store_id=1), "store")]

    def subscribe(self, subscription):
        self.subscriptions.append(subscription)
        self._send(
            subscription,
            [row for row in self.rows if row.commit_ts > subscription.matcher.start_ts],
        )
        self._send(subscription, [Row(type=cdcpb.Event.INITIALIZED)])
        subscription.inbox.put_now((subscription, self.resolved_ts))

    def unsubscribe(self, subscription):
        if subscription in self.subscriptions:
            self.subscriptions.remove(subscription)

    def commit_all(self, timestamps):
        """A row each."""
        for ts in timestamps:
            self.rows.append(self._row(ts, ts, ts))
        for subscription in self.subscriptions:
            for begin in range(0, len(self.rows), 1000):
                self._send(subscription, self.rows[begin : begin + 1000])

    def commit(self, commit_ts, identity, balance):
        self.rows.append(self._row(commit_ts, identity, balance))
        for subscription in self.subscriptions:
            self._send(subscription, self.rows[-1:])

    def _row(self, commit_ts, identity, balance):
        key, value = encode_record(TABLE, {"id": identity, "balance": balance})
        return Row(
            type=cdcpb.Event.COMMITTED,
            op_type=Row.PUT,
            start_ts=commit_ts - 1,
            commit_ts=commit_ts,
            key=key,
            value=value,
        )

    def resolve(self, ts):
        self.resolved_ts = ts
        for subscription in self.subscriptions:
            subscription.inbox.put_now((subscription, ts))

    def fail(self, error):
        for subscription in list(self.subscriptions):
            subscription.inbox.put_now((subscription, Fault("scripted", fatal=error)))

    @staticmethod
    def _send(subscription, rows):
        subscription.inbox.put_now(
            (subscription, cdcpb.Event(entries=cdcpb.Event.Entries(entries=rows)))
        )


def new(changefeed="feed", sink_uri="delta:///lake", start_ts=0, target_ts=0, tables=(), **members):
    """What is asked for when a changefeed is made."""
    return NewChangefeed(
        id=changefeed,
        sink_uri=sink_uri,
        start_ts=start_ts,
        target_ts=target_ts,
        tables=tables,
        **members,
    )


@pytest.fixture
def opened(tmp_path):
    """Opens a `Feed` of tables that have these shapes."""
    feeds = []

    def make(*shapes):
        feeds.append(Feed(tmp_path, *shapes))
        return feeds[-1]

    yield make
    for feed in feeds:
        feed.close()


@pytest.fixture
def upstream():
    return Upstream()


@pytest.fixture
async def capture(upstream, meta, tmp_path):
    """Runs owners one after the other, as restarts of a capture do."""
    upstream.meta = meta
    context = SourceContext(upstream, upstream, None)
    resources = Resources(context, tmp_path / "sorter", 64 << 20)
    running = []

    def make_source(changefeed, source_uri):
        return upstream.log if source_uri == "log://" else sources(context)(changefeed, source_uri)

    async def start():
        lease = await meta.grant_lease(60)
        fence = Fence(keys.OWNER, await meta.campaign(keys.OWNER, b"me", lease.id))
        factory = FeedFactory(Records(meta, fence), make_source, partial(LocalProcessor, resources))
        owner, started = Owner(factory, upstream), asyncio.Event()
        running.append(asyncio.get_running_loop().create_task(owner.run(started.set)))
        await started.wait()
        return owner

    async def stop():
        task = running.pop()
        task.cancel()
        await asyncio.wait([task])
        await meta.delete(keys.OWNER)

    yield SimpleNamespace(
        start=start, stop=stop, records=Records(meta, Fence()), table=("bank", TABLE.to_json())
    )
    while running:
        await stop()
