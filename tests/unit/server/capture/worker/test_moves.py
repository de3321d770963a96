"""Tables move while everything goes wrong, in simulated time: workers join, leave, die and fall
silent, calls fail before or after they have done their work, reports are late, tables change their
schema, and somebody moves tables by hand.

The processor, its mover, placement, combined sink, router and mirrors are the product's. A worker
is a model of one: it says how far its tables are, and of which rows it would give how many.
"""

import asyncio
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tidemarkpb.v1 import worker_pb2 as pb

from server.capture.capture_service import _tables_at
from server.capture.catalog import FeedCatalog
from server.capture.errors import TableMoveError
from server.capture.processor import Assignment, ProcessorStats
from server.capture.traffic import Traffic, weights
from server.capture.worker import moves, operators, service, wire
from server.capture.worker.placement import Balance, is_uneven, next_move
from server.capture.worker.processor import WorkersProcessor
from server.capture.worker.remote import ShareStatus, WorkerLostError, lost
from server.changefeed.captures import CaptureRecord
from server.changefeed.filter import TableFilter
from server.changefeed.history import History, SchemaChange
from server.changefeed.info import State
from server.changefeed.terms import Terms
from server.puller.source import TableChange
from sink.cut import Slice
from sorter.errors import NotResolvedError
from storage.model.errors import TidemarkError
from storage.model.ts import MAX_TS
from tests.sim.clock import simulated
from tests.unit.server.capture.upstream import START, SplittableSource, record

OWNER = "owner"
NAMES = ("b", "c", "d")
TABLES = 6
SILENCE_S = 60.0
TICK_S = 0.23


class Inline(Executor):
    """Asks one after the other."""

    def map(self, func, *iterables, **_):
        return map(func, *iterables)


def _look_nowhere():
    return


class Upstream:
    """What is committed, and how far time is."""

    def __init__(self, loop):
        self._loop, self._began_s = loop, loop.time()
        self.commits, self.ddls, self.hot = {}, [], {}
        self._last_ts = START
        self.look = _look_nowhere
        """Called between two steps of a move."""

    @property
    def ts(self):
        return START + int((self._loop.time() - self._began_s) * 1000)

    def next_ts(self):
        """Of a commit or a DDL, unlike any other; all below it are known."""
        self._last_ts = max(self._last_ts + 1, self.ts + 1)
        return self._last_ts

    def write(self, span, place=0):
        """A row of a table, somewhere among its keys."""
        key = span.start_key + bytes((40 * place,))
        self.commits.setdefault(span, []).append((self.next_ts(), key))

    def rows(self, span, start_ts, end_ts):
        """Of a table, or of a part of it."""
        return sum(
            start_ts < ts <= end_ts and span.contains(key)
            for whole, commits in self.commits.items()
            if whole.table_id == span.table_id
            for ts, key in commits
        )


@dataclass
class Held:
    """A table at a worker: pulled above `start_ts`."""

    start_ts: int
    counted: bool
    pulls_from_s: float
    resolved_ts: int = 0
    checkpoint_ts: int = 0
    end_ts: int = MAX_TS
    is_born: bool = False
    """Whether the table began here: it has no rows from before."""

    def __post_init__(self):
        self.resolved_ts = self.checkpoint_ts = self.start_ts


class ModelShare:
    """Implements `WorkerShare`."""

    local_sink, repairing, damage, ends, stats = None, (), None, 0, ProcessorStats()

    def __init__(self, worker, upstream, start):
        self.worker, self.upstream = worker, upstream
        self.start_ts = start.start_ts
        self.tables = {table.span: table for table in start.tables}
        self.status, self.running = ShareStatus(start.start_ts), asyncio.Event()
        self.held = {
            table.span: Held(start.start_ts, counted=True, pulls_from_s=0.0)
            for table in start.tables
        }
        self.barrier_ts = self.whole_ts = self.acked_ts = start.start_ts
        self.counts = 0
        self._loop, self._due_s = asyncio.get_running_loop(), 0.0
        for change in start.changes:
            self._changed(change)

    async def run(self, target_ts, moved, *, limited=False):
        assert limited
        self.worker.running += 1
        try:
            await self._run(moved)
        finally:
            self.worker.running -= 1

    async def _run(self, moved):
        silent_s = 0.0
        while True:
            self._check()
            self._pull()
            report = self._report()
            silent_s = silent_s + TICK_S if self.worker.is_silent else 0.0
            if silent_s > SILENCE_S:
                raise lost(self.worker.name)
            if not silent_s:
                # One after the other, as on a stream.
                self._due_s = max(self._due_s, self._loop.time() + self.worker.delay_s)
                self._loop.call_at(self._due_s, self._arrived, report, moved)
            await asyncio.sleep(TICK_S)

    def _arrived(self, report, moved):
        list(self.status.absorb_in_steps(report))
        self.running.set()
        moved()

    def _check(self):
        if not self.worker.is_alive:
            raise lost(self.worker.name)

    def _pull(self):
        for held in self.held.values():
            if self._loop.time() >= held.pulls_from_s:
                held.resolved_ts = max(held.resolved_ts, min(self.upstream.ts, held.end_ts))
        of_tables = [held.resolved_ts for held in self._holding()]
        whole_ts = min([self.barrier_ts, *of_tables])
        assert whole_ts >= self.whole_ts, "a share never goes back"
        self.whole_ts = whole_ts

    def _holding(self):
        counted = (held for held in self.held.values() if held.counted)
        return [held for held in counted if held.resolved_ts < held.end_ts]

    def _checkpoint(self):
        unread = [
            held.checkpoint_ts
            for held in self.held.values()
            if held.counted and held.checkpoint_ts < held.end_ts
        ]
        return min(unread, default=self.whole_ts)

    def _report(self):
        spans = [
            pb.SpanProgress(
                span=wire.span_message(span),
                resolved_ts=min(held.resolved_ts, self.barrier_ts),
                checkpoint_ts=held.checkpoint_ts,
            )
            for span, held in self.held.items()
        ]
        traffic = {span: each for span, each in self.upstream.hot.items() if span in self.held}
        return pb.ShareProgress(
            resolved_ts=self.whole_ts,
            checkpoint_ts=self._checkpoint(),
            counts=self.counts,
            spans=spans,
            traffic=wire.traffic_message(traffic),
        )

    def _call(self, work, result=None):
        """A call may fail before it has done its work, or after."""
        self._check()
        fails, self.worker.fails = self.worker.fails, ""
        if fails == "before":
            raise lost(self.worker.name)
        result = work()
        if fails == "after":
            raise lost(self.worker.name)
        return result

    def resolved_ts(self, span=None):
        return self.status.resolved_ts if span is None else self.status.table(span)[0]

    def checkpoint_ts(self, span=None):
        return self.status.checkpoint_ts if span is None else self.status.table(span)[1]

    def traffic(self):
        return self.status.traffic

    def plan_tables(self, spans, start_ts, end_ts, slice_bytes=None):
        def planned():
            self._pull()
            asked = [span for span, held in self.held.items() if held.counted]
            slices = []
            for span in asked if spans is None else spans:
                held = self.held[span]
                if end_ts > min(held.resolved_ts if held.end_ts == MAX_TS else MAX_TS, MAX_TS):
                    raise NotResolvedError(f"{span} is at {held.resolved_ts}")
                assert held.is_born or start_ts >= held.start_ts, (
                    "rows are asked for that it never had"
                )
                if rows := self.upstream.rows(span, start_ts, end_ts):
                    slices.append(Slice(span, start_ts, end_ts, rows, rows))
            if end_ts > self.barrier_ts:
                raise NotResolvedError(f"the barrier is {self.barrier_ts}")
            return slices

        return self._call(planned)

    def ack(self, ts, span=None):
        def acknowledged():
            for each, held in self.held.items():
                if span in (None, each):
                    held.checkpoint_ts = max(held.checkpoint_ts, ts)
            self.status.acknowledged(self._checkpoint(), self.counts)
            return self._checkpoint()

        return self._call(acknowledged)

    def add(self, tables, start_ts):
        def added():
            for table, _ in tables:
                assert table.span not in self.held, "it is here already"
                pulls_from_s = self._loop.time() + self.worker.catch_up_s
                self.held[table.span] = Held(start_ts, counted=False, pulls_from_s=pulls_from_s)
                self.tables[table.span] = table

        for table, _ in tables:
            self.status.removed(table.span)
        self._call(added)

    def count(self, positions):
        def counted():
            self._pull()
            for span, checkpoint_ts in positions.items():
                held = self.held[span]
                if held.resolved_ts < max(self.whole_ts, checkpoint_ts):
                    raise NotResolvedError(f"{span} is not as far as the others")
                held.checkpoint_ts = max(held.checkpoint_ts, checkpoint_ts)
                held.counted = True
                self.counts += 1
            return self._checkpoint(), self.counts

        self.status.acknowledged(*self._call(counted))
        self.upstream.look()

    def remove(self, spans, timeout_s=1.0):
        def removed():
            for span in spans:
                self.held.pop(span, None)

        self._call(removed)
        for span in spans:
            self.tables.pop(span, None)
            self.status.removed(span)

    def change(self, change):
        self._call(lambda: self._changed(change))

    def _changed(self, change):
        for table in change.tables:
            self.tables[table.span] = table
            born = Held(change.commit_ts, counted=True, pulls_from_s=0.0, is_born=True)
            self.held.setdefault(table.span, born)
        for table in self.tables.values():
            if table.name in change.dropped:
                self.held[table.span].end_ts = change.commit_ts

    def limit(self, barrier_ts):
        self._call(lambda: setattr(self, "barrier_ts", max(barrier_ts, self.barrier_ts)))


@dataclass
class ModelWorker:
    """Implements `Worker`."""

    id: str
    upstream: Upstream
    is_alive: bool = True
    is_silent: bool = False
    delay_s: float = 0.0
    catch_up_s: float = 0.5
    fails: str = ""
    location: str = ""
    running: int = 0

    @property
    def name(self):
        return f"capture {self.id}"

    def share(self, start):
        return ModelShare(self, self.upstream, start)

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class ModelWorkers:
    """Implements `Workers`; the owner is always there."""

    executor, term = Inline(), 1

    def __init__(self, upstream):
        self.upstream = upstream
        self.all = {OWNER: ModelWorker(OWNER, upstream)}
        self.drained = set()

    def workers(self):
        return [
            worker
            for name, worker in self.all.items()
            if worker.is_alive and name not in self.drained
        ]

    async def wait_known(self):
        return

    def wipe(self, changefeed):
        return


class Source(SplittableSource):
    """Its schema changes are those of the upstream."""

    def __init__(self, upstream):
        super().__init__()
        self.upstream = upstream

    def schema_puller(self, start_ts, catalog, *, dumps=True):
        return Schemas(self.upstream, start_ts, catalog)


@dataclass
class Schemas:
    """Tells the schema changes above `start_ts`, and that there are no others."""

    upstream: Upstream
    start_ts: int
    catalog: FeedCatalog
    table_pullers: tuple = ()

    async def run(self):
        told_ts = self.start_ts
        while True:
            known_ts = self.upstream.ts
            for change in self.upstream.ddls:
                if told_ts < change.commit_ts <= known_ts:
                    await self.catalog.change(change)
            told_ts = known_ts
            self.catalog.resolve(known_ts)
            await asyncio.sleep(0.2)


@dataclass
class Cluster:
    """A changefeed over model workers, its reader, and what has gone wrong."""

    upstream: Upstream
    workers: ModelWorkers
    source: Source
    catalog: FeedCatalog
    processor: WorkersProcessor
    errors: list = field(default_factory=list)
    reader_ts: int = START
    acknowledged_ts: int = START
    """The reader has said so, or may have been heard to say so, of everything up to it."""
    read: dict = field(default_factory=dict)
    seen: tuple = (None, 0)
    checkpoint_ts: int = START
    looks: int = 0
    is_paused: bool = False
    """Whether the reader takes cuts between two steps of a move only."""

    async def keep_running(self):
        while True:
            try:
                await self.processor.run()
            except* TidemarkError as group:
                self.errors.append(group)
            await asyncio.sleep(1)

    def take(self):
        """The reader takes a cut and acknowledges it, if the changefeed serves."""
        sink = self.processor.sink
        if sink is None:
            return
        start_ts, end_ts = self.reader_ts, sink.resolved_ts()
        if end_ts <= start_ts:
            return
        try:
            slices = sink.plan_tables(None, start_ts, end_ts)
            given = {part.span: part.rows for part in slices}
            assert len(given) == len(slices), "two workers give the rows of one table"
            assert given == {
                span: rows
                for span in self.upstream.commits
                if (rows := self.upstream.rows(span, start_ts, end_ts))
            }
            self.acknowledged_ts = end_ts
            sink.ack(end_ts)
        except (WorkerLostError, NotResolvedError):
            return
        self.reader_ts = end_ts

    def check(self):
        """Positions only move forward: of one run, and the checkpoint over all of them, which is
        never beyond what the reader has acknowledged.
        """
        assert self.processor.checkpoint_ts >= self.checkpoint_ts
        assert self.processor.checkpoint_ts <= self.acknowledged_ts
        self.checkpoint_ts = self.processor.checkpoint_ts
        sink, (known, resolved_ts) = self.processor.sink, self.seen
        if sink is not None:
            assert sink is not known or sink.resolved_ts() >= resolved_ts
            self.seen = sink, sink.resolved_ts()

    async def passes(self, seconds):
        """Time passes; the reader takes a cut now and then, so that there is something to lose."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + seconds
        while loop.time() < until_s:
            await asyncio.sleep(0.37)
            self.check()
            self.looks += 1
            if self.looks % 5 == 0 and not self.is_paused:
                self.take()
                self.check()


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(moves, "_WEIGH_EVERY_S", 15.0)
    monkeypatch.setattr(operators, "_REST_S", 40.0)
    monkeypatch.setattr(moves, "_SPLIT_EVERY_S", 45.0)


def tables_of(cluster):
    return cluster.processor._tables


async def _nothing(_):
    return


def made(loop, region_threshold=0):
    """With a `region_threshold` the tables that have so many regions are split."""
    upstream = Upstream(loop)
    workers, source = ModelWorkers(upstream), Source(upstream)
    tables = tuple(record(f"t{number}", number) for number in range(1, TABLES + 1))
    history = History([SchemaChange(START, tables=tables)])
    catalog = FeedCatalog(Terms("feed", TableFilter(["*.*"])), source, history, START, _nothing)
    assignment = Assignment("feed", source, catalog, START, region_threshold=region_threshold)
    processor = WorkersProcessor(workers, assignment)
    cluster = Cluster(upstream, workers, source, catalog, processor)
    if region_threshold:
        upstream.look = cluster.take
    return cluster


def alter(cluster, number):
    """A table gets a column, or is dropped, or a new one comes."""
    ts, tables = cluster.upstream.next_ts(), cluster.catalog.tables
    if number == 0:
        new = cluster.source.table(record(f"n{ts}", 1000 + len(cluster.upstream.ddls)))
        change = TableChange(ts, "create", (new,))
    else:
        table = tables[number % len(tables)]
        info = table.record.table_info
        changed = record(info["name"], info["id"], info["columns"] + 1)
        change = TableChange(ts, "alter", (cluster.source.table(changed),))
    cluster.upstream.ddls.append(change)


WORKER = st.sampled_from(NAMES)
NUMBER = st.integers(0, TABLES - 1)
STEPS = st.lists(
    st.tuples(st.just("passes"), st.sampled_from([0.3, 1.0, 4.0, 20.0, 70.0]))
    | st.tuples(st.just("write"), NUMBER, st.integers(0, 5))
    | st.tuples(st.just("joins"), WORKER)
    | st.tuples(st.just("is drained"), WORKER)
    | st.tuples(st.just("is_alive"), WORKER, st.just(False))
    | st.tuples(st.just("is_silent"), WORKER, st.booleans())
    | st.tuples(st.just("delay_s"), WORKER, st.sampled_from([0.0, 0.4, 3.0]))
    | st.tuples(st.just("catch_up_s"), WORKER, st.sampled_from([0.0, 2.0, 30.0]))
    | st.tuples(st.just("fails"), WORKER, st.sampled_from(["before", "after"]))
    | st.tuples(st.just("by hand"), NUMBER, st.sampled_from((OWNER, *NAMES)))
    | st.tuples(st.just("by hand"), NUMBER, st.booleans())
    | st.tuples(st.just("alter"), NUMBER)
    | st.tuples(st.just("reader is paused"), st.booleans())
    | st.tuples(st.just("hot"), NUMBER, st.sampled_from([0.0, 1e5, 1e7])),
    max_size=30,
)


async def moved_by_hand(cluster, number, name, told):
    """Whatever comes of it, it is told honestly."""
    table = cluster.catalog.tables[number]
    try:
        await cluster.processor.move_table(table.span, name)
    except TidemarkError:
        return
    told.append((table.span, name))


async def split_by_hand(cluster, number, put_together, _told):
    """Whatever comes of it, it is told honestly."""
    span = cluster.catalog.tables[number].span
    with suppress(TidemarkError):
        await cluster.processor.split_table(span, put_together=put_together)
        assert cluster.processor._tables.placement.parts(span) == (span,) or not put_together


def carry_out(cluster, step, tasks, told):
    workers = cluster.workers.all
    match step:
        case ("write", number, place):
            cluster.upstream.write(cluster.catalog.tables[number].span, place)
        case ("regions", number, places):
            span = cluster.catalog.tables[number].span
            begins = {key for key in cluster.source.begins if not span.contains(key)}
            begins |= {span.start_key + bytes((40 * place,)) for place in places}
            cluster.source.begins = sorted(begins)
        case ("joins", name):
            cluster.workers.drained.discard(name)
            if name not in workers or not workers[name].is_alive:
                workers[name] = ModelWorker(name, cluster.upstream)
        case ("is drained", name):
            cluster.workers.drained.add(name)
        case ("is_alive" | "is_silent" | "delay_s" | "catch_up_s" | "fails" as what, name, value):
            if name in workers:
                setattr(workers[name], what, value)
        case ("by hand", number, name):
            by_hand = moved_by_hand if isinstance(name, str) else split_by_hand
            tasks.create_task(by_hand(cluster, number, name, told))
        case ("alter", number):
            alter(cluster, number)
        case ("reader is paused", is_paused):
            cluster.is_paused = is_paused
        case ("hot", number, bytes_per_s):
            span = cluster.catalog.tables[number].span
            cluster.upstream.hot[span] = Traffic(1.0, bytes_per_s)


async def lived(steps, region_threshold=0):
    cluster, told = made(asyncio.get_running_loop(), region_threshold), []
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(cluster.keep_running())
        for step in steps:
            if step[0] == "passes":
                await cluster.passes(step[1])
            else:
                carry_out(cluster, step, tasks, told)
                cluster.check()
        await quiet(cluster)
        running.cancel()


async def quiet(cluster):
    """When nothing goes wrong any more, the tables are where they should be, and are read."""
    for worker in cluster.workers.all.values():
        worker.is_silent, worker.delay_s, worker.fails, worker.catch_up_s = False, 0.0, "", 0.5
    cluster.is_paused = False
    await cluster.passes(200)
    assert cluster.processor.sink is not None
    before_ts = cluster.reader_ts
    for table in cluster.catalog.tables:
        for place in range(6):
            cluster.upstream.write(table.span, place)
    await cluster.passes(6)
    assert before_ts < cluster.reader_ts
    assert cluster.upstream.ts - cluster.reader_ts < 4000

    tables = tables_of(cluster)
    placed, there = tables.placement.tables(), cluster.workers.workers()
    assert {*placed} == {*there} == {*tables.shares}
    spans = {span for of_worker in placed.values() for span in of_worker}
    for table in cluster.catalog.tables:
        parts = tables.placement.parts(table.span)
        assert {*parts} <= spans
        assert parts[0].start_key == table.span.start_key
        assert parts[-1].end_key == table.span.end_key
        assert len(parts) <= len(there)
        assert all(one.end_key == two.start_key for one, two in pairwise(parts))
        for part in parts:
            known = tables.shares[tables.placement.worker(part)].tables[part]
            assert known.mounter.columns == table.mounter.columns
    for worker, of_worker in placed.items():
        held = tables.shares[worker].held
        assert {*of_worker} <= {span for span, each in held.items() if each.counted}
        # What could not be removed when a table was split, or put together, is not asked for.
        assert {*held} <= {*of_worker} | tables.sink._layout.unasked, "it has moved away"
    if not cluster.processor.mover._is_by_hand and not tables.placement.split():
        balance = Balance(weights(len(spans), tables.traffic()), moves._EVEN)
        if is_uneven(placed, balance._replace(slack=moves._UNEVEN)):
            assert next_move(placed, there, lambda _: True, balance) is None


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS)
def test_tables_have_one_worker_each_and_nothing_goes_back_whatever_fails(steps):
    simulated(lived(steps))


REGIONS = st.tuples(st.just("regions"), NUMBER, st.sets(st.integers(1, 5)).map(sorted))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS, st.lists(st.tuples(st.integers(0, 30), REGIONS), min_size=1, max_size=6))
def test_split_tables_are_whole_to_a_reader_whatever_fails(steps, regions):
    for place, step in regions:
        steps.insert(place, step)
    simulated(lived(steps, region_threshold=2))


def test_a_table_is_split_when_captures_join_and_put_together_when_they_leave():
    async def run():
        cluster = made(asyncio.get_running_loop(), region_threshold=3)
        carry_out(cluster, ("regions", 0, [1, 3, 5]), None, [])
        carry_out(cluster, ("regions", 1, [2]), None, [])
        big, small = (table.span for table in cluster.catalog.tables[:2])
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(cluster.keep_running())
            await cluster.passes(3)
            for step, name, parts in (
                ("joins", "b", 2),
                ("joins", "c", 3),
                ("is drained", "b", 2),
                ("is drained", "c", 1),
                ("joins", "b", 2),
            ):
                # Rows wait to be read while the table gets other parts.
                cluster.is_paused, before_ts = True, cluster.reader_ts
                for place in range(6):
                    carry_out(cluster, ("write", 0, place), tasks, [])
                carry_out(cluster, (step, name), tasks, [])
                await cluster.passes(15)
                assert cluster.reader_ts > before_ts
                cluster.is_paused = False
                await cluster.passes(15)
                placement = tables_of(cluster).placement
                spans = placement.parts(big)
                assert len(spans) == parts
                assert len({*map(placement.worker, spans)}) == parts
                assert placement.parts(small) == (small,)
            assert len(cluster.processor.worker_of(big).split(", ")) == 2
            # A schema change reaches all parts; one that is dropped takes all of them along.
            alter(cluster, len(cluster.catalog.tables))
            await cluster.passes(5)
            assert len(tables_of(cluster).placement.parts(big)) == 2
            assert not cluster.errors
            await quiet(cluster)
            running.cancel()

    simulated(run())


def test_a_table_is_split_moved_and_put_together_by_command_and_stays_so():
    async def run():
        cluster = made(asyncio.get_running_loop(), region_threshold=100)
        carry_out(cluster, ("regions", 0, [1, 3]), None, [])
        big, small = (table.span for table in cluster.catalog.tables[:2])
        processor = cluster.processor
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(cluster.keep_running())
            await cluster.passes(3)
            with pytest.raises(TableMoveError, match="there are 1 and 3"):
                await processor.split_table(big, put_together=False)
            carry_out(cluster, ("joins", "b"), tasks, [])
            await cluster.passes(20)
            with pytest.raises(TableMoveError, match="there are 2 and 1"):
                await processor.split_table(small, put_together=False)
            await processor.split_table(big, put_together=False)
            await cluster.passes(100)
            assert processor.worker_of(big) in ("owner, b", "b, owner")
            await processor.move_table(big, "b")
            await cluster.passes(100)
            assert processor.worker_of(big) == "b, b"
            carry_out(cluster, ("regions", 0, range(1, 6)), None, [])
            tables_of(cluster).splitting._region_threshold = 2
            await processor.split_table(big, put_together=True)
            await cluster.passes(100)
            assert tables_of(cluster).placement.parts(big) == (big,)
            carry_out(cluster, ("joins", "c"), tasks, [])
            await cluster.passes(30)
            assert len(tables_of(cluster).placement.parts(big)) == 3
            assert not cluster.errors
            await quiet(cluster)
            running.cancel()

    simulated(run())


def test_a_capture_that_was_out_of_reach_for_a_moment_is_the_same_one():
    """As its table grew, the changefeed failed: the capture that came back had no share."""

    async def run():
        cluster = made(asyncio.get_running_loop(), region_threshold=3)
        big = cluster.catalog.tables[0].span
        cluster.workers.all["b"] = known = ModelWorker("b", cluster.upstream)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(cluster.keep_running())
            await cluster.passes(15)
            cluster.workers.all["b"] = ModelWorker("b", cluster.upstream)
            carry_out(cluster, ("regions", 0, [1, 3, 5]), None, [])
            await cluster.passes(60)
            placement = tables_of(cluster).placement
            workers = [placement.worker(span) for span in placement.parts(big)]
            assert {*workers} == {cluster.workers.all[OWNER], known}
            assert not cluster.errors
            running.cancel()

    simulated(run())


def test_a_capture_that_was_out_of_reach_for_a_moment_keeps_its_tables():
    """Where tables were moved for their weight, it was taken for one that leaves."""

    async def run():
        cluster = made(asyncio.get_running_loop())
        cluster.workers.all["b"] = known = ModelWorker("b", cluster.upstream)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(cluster.keep_running())
            await cluster.passes(15)
            placement = tables_of(cluster).placement
            cluster.workers.all["b"] = ModelWorker("b", cluster.upstream)
            hot = placement.tables()[cluster.workers.all[OWNER]][0]
            cluster.upstream.hot[hot] = Traffic(1000.0, 10e6)
            await cluster.passes(40)
            assert len(placement.tables()[known]) >= TABLES // 2
            assert not cluster.errors
            running.cancel()

    simulated(run())


def test_a_table_whose_schema_changes_while_it_is_being_split_stays_whole_until_later():
    async def run():
        cluster = made(asyncio.get_running_loop(), region_threshold=2)
        carry_out(cluster, ("regions", 0, [3]), None, [])
        big = cluster.catalog.tables[0].span
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(cluster.keep_running())
            await cluster.passes(3)
            cluster.workers.all["b"] = worker = ModelWorker("b", cluster.upstream)
            worker.catch_up_s = 8.0
            while not any(  # noqa: ASYNC110 - of simulated time
                big.table_id == span.table_id and not held.counted
                for share in tables_of(cluster).shares.values()
                for span, held in share.held.items()
            ):
                await asyncio.sleep(0.05)
            alter(cluster, TABLES)
            assert tables_of(cluster).placement.parts(big) == (big,)
            await cluster.passes(9)
            assert cluster.catalog.tables[0].mounter.columns == 2
            assert tables_of(cluster).placement.parts(big) == (big,)
            await quiet(cluster)
            assert len(tables_of(cluster).placement.parts(big)) == 2
            assert not cluster.errors
            running.cancel()

    simulated(run())


def test_a_run_begins_with_tables_that_are_split():
    async def run():
        cluster = made(asyncio.get_running_loop(), region_threshold=2)
        cluster.workers.all["b"] = ModelWorker("b", cluster.upstream)
        for number in range(TABLES):
            carry_out(cluster, ("regions", number, [3]), None, [])
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(cluster.keep_running())
            await asyncio.sleep(1)
            placement = tables_of(cluster).placement
            assert len(placement.split()) == TABLES
            for number in range(TABLES):
                for place in range(6):
                    carry_out(cluster, ("write", number, place), tasks, [])
            await quiet(cluster)
            assert not cluster.errors
            running.cancel()

    simulated(run())


def test_a_hot_table_drives_others_away_and_they_stay_there():
    steps = [
        ("joins", "b"),
        ("passes", 20.0),
        ("hot", 0, 1e7),
        *[("write", 0, 0)] * 3,
    ]

    async def run():
        cluster = made(asyncio.get_running_loop())
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(cluster.keep_running())
            for step in steps:
                if step[0] == "passes":
                    await cluster.passes(step[1])
                else:
                    carry_out(cluster, step, tasks, [])
            await cluster.passes(60)
            placed = tables_of(cluster).placement.tables()
            hot = cluster.catalog.tables[0].span
            assert sorted(map(len, placed.values())) == [1, 5]
            assert (hot,) in placed.values()
            await cluster.passes(400)
            assert tables_of(cluster).placement.tables() == placed
            assert not cluster.errors
            running.cancel()

    simulated(run())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_call_that_fails_leaves_the_table_with_one_of_the_two(when):
    async def run():
        cluster, told = made(asyncio.get_running_loop()), []
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(cluster.keep_running())
            carry_out(cluster, ("joins", "b"), tasks, told)
            await cluster.passes(20)
            for number in range(TABLES):
                cluster.workers.all["b"].fails = when
                for name in ("b", OWNER):
                    carry_out(cluster, ("by hand", number, name), tasks, told)
                    await cluster.passes(5)
            assert told
            await quiet(cluster)
            running.cancel()

    simulated(run())


def test_a_share_that_joins_takes_no_position_of_the_whole_back():
    async def run():
        cluster = made(asyncio.get_running_loop())
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(cluster.keep_running())
            await cluster.passes(3)
            for _ in range(4):
                for step in ("joins", "is drained"):
                    carry_out(cluster, (step, "b"), tasks, [])
                    await cluster.passes(12)
            assert not cluster.errors
            running.cancel()

    simulated(run())


@pytest.mark.parametrize("waits_s", [0.0, 0.05, 0.5, 12.0])
def test_a_drained_capture_is_said_to_be_empty_when_it_can_be_stopped(waits_s):
    async def run():
        cluster = made(asyncio.get_running_loop())
        cluster.workers.all["b"] = worker = ModelWorker("b", cluster.upstream)
        worker.is_alive = False
        record = CaptureRecord("b", "here", "there", "1")
        feed = SimpleNamespace(
            processor=cluster.processor,
            tables=cluster.catalog.tables,
            info=SimpleNamespace(state=State.NORMAL),
        )
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(cluster.keep_running())
            await cluster.passes(3)
            assert _tables_at(feed, record, own=False) == 0
            # It joins, and is drained while its share begins, while tables move, or afterwards.
            worker.is_alive = True
            while not cluster.processor.has_share_at("b"):  # noqa: ASYNC110 - of simulated time
                await asyncio.sleep(0.01)
            await asyncio.sleep(waits_s)
            cluster.workers.drained.add("b")
            left = set()
            while _tables_at(feed, record, own=False):
                left.add(len(tables_of(cluster).placement.tables().get(worker, ())))
                assert cluster.processor.has_share_at("b")
                await asyncio.sleep(0.01)
            assert not worker.running
            assert 0 in left, "a share without tables is one that has not ended"
            worker.is_alive = False
            await cluster.passes(60)
            assert not cluster.errors
            running.cancel()

    simulated(run())


def test_a_changefeed_that_nobody_reads_yet_is_divided_too_and_comes_together_again():
    async def run():
        cluster = made(asyncio.get_running_loop())
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(cluster.keep_running())
            await asyncio.sleep(3)
            for step, divided in (("joins", 2), ("is drained", 1), ("joins", 2)):
                carry_out(cluster, (step, "b"), tasks, [])
                await asyncio.sleep(30)
                placed = tables_of(cluster).placement.tables()
                assert len(placed) == divided
                assert {*map(len, placed.values())} == {TABLES // divided}
                assert cluster.processor.checkpoint_ts == START
            assert not cluster.errors
            running.cancel()

    simulated(run())


def test_what_nobody_has_read_is_not_acknowledged_where_all_tables_go_to_an_empty_share():
    async def run():
        cluster = made(asyncio.get_running_loop())
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(cluster.keep_running())
            cluster.is_paused = True
            await cluster.passes(3)
            carry_out(cluster, ("joins", "b"), None, [])
            await cluster.passes(60)
            for table in cluster.catalog.tables:
                await cluster.processor.move_table(table.span, "b")
            await cluster.passes(60)
            await quiet(cluster)
            running.cancel()

    simulated(run())


def test_tables_that_are_counted_in_together_hold_the_others_no_longer_than_one(monkeypatch):
    now_s, waited = [100.0], []
    monkeypatch.setattr(service.time, "monotonic", lambda: now_s[0])

    class Sink:
        def count(self, span, checkpoint_ts, timeout_s):
            waited.append((span, checkpoint_ts, timeout_s))
            now_s[0] += 2.0

    service.count_in(Sink(), {"a": 1, "b": 2, "c": 3, "d": 4})
    assert waited == [("a", 1, 5.0), ("b", 2, 3.0), ("c", 3, 1.0), ("d", 4, 0.0)]
