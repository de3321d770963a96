"""How long the owner's event loop is held when it divides very many tables among captures:
`python -m tests.bench.owner --tables 1000000 --nodes 10 --seconds 30`.

The owner is the product's: its changefeed, catalog, placement, mover, combined sink, checkpoint
saver, gauges, and an embedded metadata server. The captures are simulated: each reports the
positions of all its tables as often as a real one does, and one more joins after half of the time,
so that tables move. A reader acknowledges everything once a second, and the gauges are scraped
every five seconds.

Every turn of the event loop is timed: the CPU time of its thread, and the wall clock beside it,
which others on the machine lengthen. Prints one JSON line: the longest turn is the owner's tick.
Tables are alike but for their names; `--alike` lets them share all of their schemas in memory.
"""

import argparse
import asyncio
import copy
import gc
import json
import logging
import statistics
import time
from asyncio.events import Handle
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog
from tidemarkpb.v1 import worker_pb2 as pb

from server.capture import metrics
from server.capture.catalog import TablesRead
from server.capture.feed import Feed, FeedFactory
from server.capture.fence import Fence
from server.capture.owner import Owner
from server.capture.processor import ProcessorStats
from server.capture.records import Records
from server.capture.source.registry import sources
from server.capture.worker import wire
from server.capture.worker.processor import WorkersProcessor
from server.capture.worker.remote import ShareStatus
from server.capture.worker.service import report_interval_s
from server.capture.worker.share import ShareStart
from server.changefeed import keys
from server.changefeed.history import SchemaChange
from server.changefeed.info import ChangefeedInfo
from server.changefeed.table import SourceTable, TableRecord
from server.puller.source import SourceContext, TableChange
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from storage.model.span import Span
from storage.model.ts import compose
from storage.tidb.document import read_document
from storage.tidb.record import table_span
from storage.tidb.schema import Column, TableInfo
from tests.memory_kv import MemoryKV

FEED, SCHEMA, SINK = "many", "shop", "delta:///lake"
COLUMNS = 8
SCRAPE_EVERY_S, READ_EVERY_S, RESOLVE_EVERY_S = 5.0, 1.0, 0.2
SHOWN = 6
REPORTS = ThreadPoolExecutor(16)
"""Other processes make them: they keep no thread of the owner."""


def ts_now() -> int:
    """The wall clock as a timestamp."""
    return compose(int(time.time() * 1000))


class Coordinator:
    """Stands in for `PdClient`: time, and a place for the changefeed's safepoint."""

    cluster_id = 7

    async def tso(self, count: int = 1) -> int:
        return ts_now() + count

    async def gc_safe_point(self) -> int:
        return 0

    async def update_service_gc_safe_point(self, service_id: str, ttl_s: int, ts: int) -> Any:
        del ttl_s
        return MinimumOf(service_id, ts)


@dataclass(frozen=True)
class MinimumOf:
    """What the coordinator answers."""

    service_id: str
    safe_point: int


class Node:
    """Implements `Worker`: a capture that does nothing but report."""

    location = ""

    def __init__(self, number: int) -> None:
        self.id = self.name = f"capture {number}"
        self.shares: list[NodeShare] = []

    def share(self, start: ShareStart) -> "NodeShare":
        self.shares.append(NodeShare(start))
        return self.shares[-1]


class NodeShare:
    """Implements `WorkerShare`: tables that are resolved when the clock says so."""

    local_sink, repairing, damage, ends, stats = None, (), None, 0, ProcessorStats()

    def __init__(self, start: ShareStart) -> None:
        self.start_ts = start.start_ts
        self.tables = {table.span: table for table in start.tables}
        self.status, self.running = ShareStatus(start.start_ts), asyncio.Event()
        self._barrier_ts = self._acked_ts = start.start_ts

    async def run(
        self, target_ts: int, moved: Callable[[], None], *, limited: bool = False
    ) -> None:
        del target_ts, limited
        loop = asyncio.get_running_loop()
        while True:
            # Made by a thread, as it is another process that makes it.
            report = await loop.run_in_executor(REPORTS, self._report)
            await self.status.take(pb.ShareProgress.FromString(report))
            self.running.set()
            moved()
            await asyncio.sleep(report_interval_s(len(self.tables)))

    def _report(self) -> bytes:
        ts = min(ts_now(), self._barrier_ts)
        spans = [
            pb.SpanProgress(
                span=wire.span_message(span), resolved_ts=ts, checkpoint_ts=self._acked_ts
            )
            for span in list(self.tables)
        ]
        report = pb.ShareProgress(resolved_ts=ts, checkpoint_ts=self._acked_ts, spans=spans)
        return report.SerializeToString()

    def resolved_ts(self, span: Span | None = None) -> int:
        return self.status.resolved_ts if span is None else self.status.table(span)[0]

    def checkpoint_ts(self, span: Span | None = None) -> int:
        return self.status.checkpoint_ts if span is None else self.status.table(span)[1]

    def kept_ts(self) -> int:
        return self.start_ts

    def traffic(self) -> Mapping[Span, Any]:
        return self.status.traffic

    def ack(self, ts: int, span: Span | None = None) -> int:
        del span
        self._acked_ts = max(self._acked_ts, ts)
        self.status.acknowledged(self._acked_ts)
        return self._acked_ts

    def add(self, tables: Sequence[tuple[SourceTable, int]], start_ts: int) -> None:
        del start_ts
        for table, _ in tables:
            self.tables[table.span] = table
            self.status.removed(table.span)

    def count(self, positions: Mapping[Span, int]) -> None:
        """They are reported with the others from the next report on."""

    def remove(self, spans: Sequence[Span], timeout_s: float = 0.0) -> None:
        del timeout_s
        for span in spans:
            self.tables.pop(span, None)
            self.status.removed(span)

    def limit(self, barrier_ts: int) -> None:
        self._barrier_ts = max(barrier_ts, self._barrier_ts)

    def change(self, change: TableChange) -> None:
        raise NotImplementedError("no schema changes here")


@dataclass
class Nodes:
    """Implements `Workers`."""

    executor: Executor
    there: list[Node]
    term: int = 1

    def workers(self) -> Sequence[Node]:
        return self.there

    async def wait_known(self) -> None:
        """They are known."""

    def wipe(self, changefeed: str) -> None:
        """There is nothing."""


class Schemas:
    """Implements `Puller`: no schema changes, known up to the clock."""

    table_pullers = ()

    def __init__(self, resolve: Callable[[int], None]) -> None:
        self._resolve = resolve

    async def run(self) -> None:
        while True:
            self._resolve(ts_now())
            await asyncio.sleep(RESOLVE_EVERY_S)


class ManySource:
    """Implements what is asked of a `Source`: the tables are read already."""

    keeps_history, per_table, warnings = True, True, ()

    def __init__(self, tables: Sequence[SourceTable], source: Any) -> None:
        self.table = TablesRead(tables, source).table
        self._resolve: Any = None

    def schema_puller(self, start_ts: int, catalog: Any, *, dumps: bool = True) -> Schemas:
        del start_ts, dumps
        return Schemas(catalog.resolve)


@dataclass
class Turns:
    """The turns of the event loop, while it is `on`."""

    on: bool = False
    cpu_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)
    names: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    collections_ms: list[float] = field(default_factory=list)
    _collecting_s: float = 0.0

    @asynccontextmanager
    async def timed(self) -> AsyncIterator[None]:
        turns: Turns = self
        run: Any = Handle._run

        def timed_run(handle: Handle) -> None:
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            run(handle)
            if turns.on:
                turns._note(handle, time.thread_time() - cpu_s, time.perf_counter() - wall_s)

        Handle._run = timed_run  # type: ignore[method-assign, assignment]
        gc.callbacks.append(self._collected)
        try:
            yield
        finally:
            gc.callbacks.remove(self._collected)
            Handle._run = run  # type: ignore[method-assign]

    def _note(self, handle: Any, cpu_s: float, wall_s: float) -> None:
        self.cpu_ms.append(cpu_s * 1e3)
        self.wall_ms.append(wall_s * 1e3)
        if cpu_s > 1e-3:
            owner = getattr(handle._callback, "__self__", None)
            coroutine = owner.get_coro() if isinstance(owner, asyncio.Task) else None
            name = getattr(coroutine, "__qualname__", "callback")
            self.names[name].append(cpu_s * 1e3)

    def _collected(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._collecting_s = time.thread_time()
        elif self.on and info["generation"] == 2:
            self.collections_ms.append((time.thread_time() - self._collecting_s) * 1e3)

    def document(self) -> dict[str, Any]:
        longest = sorted(self.names.items(), key=lambda item: -max(item[1]))[:SHOWN]
        return {
            "turns": len(self.cpu_ms),
            "tick_cpu_ms": _spread(self.cpu_ms),
            "tick_wall_ms": _spread(self.wall_ms),
            "full_collections_ms": [round(each) for each in self.collections_ms],
            "longest_cpu_ms": {name: round(max(each), 1) for name, each in longest},
        }


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 3),
        "p99": round(ordered[int(len(ordered) * 0.99)], 2),
        "p999": round(ordered[int(len(ordered) * 0.999)], 2),
        "max": round(ordered[-1], 1),
    }


def tables_of(count: int, source: Any, *, alike: bool) -> list[SourceTable]:
    """Tables that differ by their names."""
    columns = [Column.bigint("id"), *(Column.bigint(f"c{place}") for place in range(COLUMNS - 1))]

    def record(number: int) -> TableRecord:
        info = TableInfo.build(number, f"t{number}", columns)
        return TableRecord(SCHEMA, read_document(info.to_json()))

    if not alike:
        return [source.table(record(number)) for number in range(100, 100 + count)]
    first = source.table(record(100))
    return [_named(first, number) for number in range(100, 100 + count)]


def _named(like: SourceTable, number: int) -> SourceTable:
    name = f"t{number}"
    names = {"id": number, "name": {"O": name, "L": name}}
    mounter: Any = copy.copy(like.mounter)
    mounter.name = f"{SCHEMA}.{name}"
    record = TableRecord(SCHEMA, like.record.table_info | names)
    return replace(like, record=record, mounter=mounter, span=table_span(number))


def rss_mb() -> int:
    """What the process has in memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) >> 10


async def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run."""
    before_mb, turns = rss_mb(), Turns()
    server = EmbeddedEtcd(MemoryKV())
    nodes = [Node(number) for number in range(arguments.nodes)]
    context = SourceContext(Coordinator(), None, None)  # type: ignore[arg-type]
    read = sources(context)(FEED, "")
    tables = await asyncio.to_thread(tables_of, arguments.tables, read, alike=arguments.alike)
    tables_mb = rss_mb()
    with ThreadPoolExecutor(arguments.nodes + 1) as executor:
        workers = Nodes(executor, list(nodes))
        async with turns.timed(), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(server.run()), tasks.create_task(server.run_expiry())]
            meta = EtcdMeta(server)
            lease = await meta.grant_lease(3600)
            fence = Fence(keys.OWNER, await meta.campaign(keys.OWNER, b"bench", lease.id))
            factory = FeedFactory(
                Records(meta, fence),
                lambda *_: ManySource(tables, read),  # type: ignore[arg-type]
                lambda assignment: WorkersProcessor(workers, assignment),  # type: ignore[arg-type]
            )
            owner = Owner(factory, Coordinator())  # type: ignore[arg-type]
            started = asyncio.Event()
            running.append(tasks.create_task(owner.run(started.set)))
            await started.wait()
            began_s = time.process_time()
            turns.on = True
            feed = await _started(owner, factory, tables)
            loaded = turns.document() | {"cpu_s": round(time.process_time() - began_s, 1)}
            running.append(tasks.create_task(_reader(feed)))
            running.append(tasks.create_task(_scraper(owner)))
            steady = await _phase(turns, arguments.seconds / 2)
            workers.there = [*nodes, Node(arguments.nodes)]
            joined = await _phase(turns, arguments.seconds / 2)
            moved = len(workers.there[-1].shares[0].tables) if workers.there[-1].shares else 0
            for task in running:
                task.cancel()
        server.close()
    return {
        "tables": arguments.tables,
        "nodes": arguments.nodes,
        "alike": arguments.alike,
        "memory_mb": rss_mb() - before_mb,
        "of_schemas_mb": tables_mb - before_mb,
        "load": loaded,
        "steady": steady,
        "joined": joined | {"moved": moved},
    }


async def _started(owner: Owner, factory: FeedFactory, tables: Sequence[SourceTable]) -> Feed:
    """A changefeed of these tables, when it serves."""
    start_ts = ts_now()
    info = ChangefeedInfo(
        id=FEED, sink_uri=SINK, start_ts=start_ts, target_ts=0, create_time="", rules=("*.*",)
    )
    change = SchemaChange(start_ts, tables=tuple(table.record for table in tables))
    await factory.records.create(info, ())
    feed = await Feed.of(factory, info, start_ts, [change])
    owner.feeds[FEED] = feed
    owner._start(feed)
    while feed.processor.sink is None:  # noqa: ASYNC110 - the processor tells nobody
        await asyncio.sleep(0.1)
    return feed


async def _phase(turns: Turns, seconds: float) -> dict[str, Any]:
    for values in (turns.cpu_ms, turns.wall_ms, turns.names, turns.collections_ms):
        values.clear()
    cpu_s, began_s = time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - began_s
    return turns.document() | {"cpu_percent": round(100 * (time.process_time() - cpu_s) / took_s)}


async def _reader(feed: Feed) -> None:
    while True:
        await asyncio.sleep(READ_EVERY_S)
        if (sink := feed.processor.sink) is not None:
            await asyncio.to_thread(sink.ack, sink.resolved_ts())


async def _scraper(owner: Owner) -> None:
    collector = metrics.FeedCollector(lambda: list(owner.feeds.values()))
    while True:
        await asyncio.sleep(SCRAPE_EVERY_S)
        await asyncio.to_thread(lambda: list(collector.collect()))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=100_000)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--alike", action="store_true", help="tables share their schemas")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with suppress(KeyboardInterrupt):
        print(json.dumps({"bench": "owner"} | asyncio.run(measured(parser.parse_args()))))


if __name__ == "__main__":
    main()
