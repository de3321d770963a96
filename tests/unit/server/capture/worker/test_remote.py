"""A worker's share, over real sockets: the capture's end and the worker's end in one process,
an upstream in memory.
"""

import asyncio
import json
import zlib
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import grpc
import pyarrow.flight as fl
import pytest
from tidemarkpb.v1 import worker_pb2
from tidemarkpb.v1.worker_pb2_grpc import WorkerServiceStub

from server.capture.errors import ChangefeedNotRunningError, NotOwnerError, SnapshotLostError
from server.capture.listener import serving_flight
from server.capture.local import LocalProcessor, Resources
from server.capture.source.registry import sources
from server.capture.worker import remote, wire
from server.capture.worker.flight import ShareFeeds
from server.capture.worker.host import Host
from server.capture.worker.local_share import LocalShare
from server.capture.worker.peers import PeerAccess, PeerCapture
from server.capture.worker.remote import RemoteShare, WorkerLostError
from server.capture.worker.service import WorkerService
from server.capture.worker.share import ShareStart, known_blockers
from server.changefeed.captures import CaptureRecord
from server.changefeed.table import TableRecord
from server.puller.source import SourceContext
from server.puller.tidb.table import tidb_table
from server.rpc.client import connect
from server.rpc.config import MAX_MESSAGE_BYTES
from server.rpc.server import RpcServer
from sink.cut import Bounds
from sink.flight.tokens import OneToken
from sorter.errors import TableNotFoundError
from storage.model.errors import CorruptError, TidemarkError, UnavailableError
from storage.tidb.document import read_document
from storage.tidb.schema import Column, TableInfo
from tests.unit.server.capture.conftest import TABLE
from tests.unit.server.certificates import Certificates

ACCOUNTS = tidb_table(TableRecord("bank", json.loads(TABLE.to_json())))
TABLES = (ACCOUNTS,)


class Worker:
    """The capture's view of a worker that listens in `directory`."""

    def __init__(self, directory):
        self.name, self.comes_back = "worker 0", True
        self.killed = self.was_lost = False
        self.control = f"unix:{directory}/control"
        self.rows = f"unix:{directory}/flight"
        self.channel = grpc.insecure_channel(self.control)
        self.stub = WorkerServiceStub(self.channel)
        self.flight = fl.FlightClient(f"grpc+{self.rows.replace(':', '://', 1)}")

    def connect(self):
        return connect(self.control)

    def do_get(self, ticket, timeout_s):
        return self.flight.do_get(ticket, fl.FlightCallOptions(timeout=timeout_s))

    def lost(self):
        self.was_lost = True

    def kill(self):
        self.killed = True

    def close(self):
        self.channel.close()
        self.flight.close()


@asynccontextmanager
async def serving(service, worker):
    server = RpcServer()
    server.add_service(worker_pb2.DESCRIPTOR.services_by_name["WorkerService"], service)
    async with server.listen(worker.control):
        yield


@asynccontextmanager
async def hosting(upstream, directory):
    """Runs shares; yields them."""
    context = SourceContext(upstream, upstream, None)
    resources = Resources(context, directory / "sorter", 64 << 20)
    async with asyncio.TaskGroup() as tasks:
        host = Host(tasks, partial(LocalProcessor, resources))
        yield host, sources(context)
        host.close()


@pytest.fixture
async def worker(upstream, tmp_path):
    """One that works."""
    seen = Worker(tmp_path)
    async with (
        hosting(upstream, tmp_path) as (host, make_source),
        serving(WorkerService(host, make_source), seen),
        serving_flight(ShareFeeds(host), seen.rows),
    ):
        yield seen
        seen.close()


@asynccontextmanager
async def running(share, target_ts=0):
    """The share, told apart from what it fails with: `failed` has it."""
    moved = asyncio.Event()
    outcome = SimpleNamespace(moved=moved, error=None)

    async def run():
        try:
            await share.run(target_ts, moved.set)
        except TidemarkError as err:
            outcome.error = err
            moved.set()

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run())
        yield outcome
        task.cancel()


async def until(condition, outcome):
    async with asyncio.timeout(60):
        while not condition():
            outcome.moved.clear()
            await outcome.moved.wait()


async def test_a_share_tells_its_progress_and_answers_for_its_tables(worker, upstream):
    share = RemoteShare(worker, "feed", TABLES, 1000)
    async with running(share) as outcome:
        await until(share.running.is_set, outcome)
        for ts in (1010, 1020, 1030):
            upstream.commit(ts, ts, ts)
        upstream.resolve(1040)
        await until(lambda: share.resolved_ts() == 1040, outcome)
        span = ACCOUNTS.span
        assert (share.resolved_ts(span), share.checkpoint_ts(span)) == (1040, 1000)
        await until(lambda: share.status.stats.sorted_ts == 1040, outcome)
        assert share.status.stats.pulled_ts == 1040
        assert await asyncio.to_thread(share.cut, 1000, 2, None, span) == 1029
        part = await asyncio.to_thread(share.cut_part, 1000, 1040, Bounds(max_rows=2))
        assert (part.end_ts, [extent.commit_ts.tolist() for extent in part.extents]) == (
            1029,
            [[1010, 1020]],
        )
        [plan] = await asyncio.to_thread(share.plan_tables, [span], 1000, 1040)
        assert (plan.span, plan.rows) == (span, 3)
        rows = await asyncio.to_thread(
            lambda: [row for batch in share.read(span, 1010, 1040) for row in batch["id"]]
        )
        assert [row.as_py() for row in rows] == [1020, 1030]
        assert await asyncio.to_thread(share.ack, 1020, span) == 1020
        assert share.checkpoint_ts() == 1020
        [table] = await asyncio.to_thread(share.blockers, 3, with_locks=False)
        assert (table.name, table.checkpoint_ts, len(table.regions)) == ("bank.accounts", 1020, 1)


async def test_another_capture_runs_a_share_over_mtls_and_with_the_readers_token(
    upstream, tmp_path
):
    (tmp_path / "token").write_text("s3cret")
    security = Certificates(tmp_path).security(ca=True)
    local = "127.0.0.1:0"
    server = RpcServer(security)
    async with hosting(upstream, tmp_path) as (host, make_source):
        service = WorkerService(host, make_source)
        server.add_service(worker_pb2.DESCRIPTOR.services_by_name["WorkerService"], service)
        token = str(tmp_path / "token")
        reading = serving_flight(
            ShareFeeds(host), local, security=security, readers=OneToken("s3cret")
        )
        async with reading as flight, server.listen(local) as bound:
            record = CaptureRecord("b", bound, flight.bound)
            peer = PeerCapture(record, PeerAccess(security, token))
            share = RemoteShare(peer, "feed", TABLES, 1000)
            async with running(share) as outcome:
                await until(share.running.is_set, outcome)
                upstream.commit(1010, 1, 5)
                upstream.resolve(1040)
                await until(lambda: share.resolved_ts() == 1040, outcome)
                batches = await asyncio.to_thread(
                    lambda: list(share.read(ACCOUNTS.span, 1000, 1040))
                )
                assert [batch["id"].to_pylist() for batch in batches] == [[1]]
                assert await asyncio.to_thread(share.ack, 1040) == 1040
        gone = RemoteShare(peer, "feed", TABLES, 1000)
        with pytest.raises(WorkerLostError, match="capture b at"):
            await gone.run(0, lambda: None)
        assert peer.is_left_out


async def test_an_error_of_the_share_arrives_with_its_name_and_kind(worker, upstream):
    share = RemoteShare(worker, "feed", TABLES, 1000)
    for sent in (UnavailableError("no luck"), SnapshotLostError("gone")):
        async with running(share) as outcome:
            await until(share.running.is_set, outcome)
            await until(lambda: upstream.subscriptions, outcome)
            upstream.fail(sent)
            await until(lambda: outcome.error, outcome)
        assert (outcome.error.code, outcome.error.kind, outcome.error.message) == (
            sent.code,
            sent.kind,
            sent.message,
        )
        share.running.clear()


async def test_a_share_can_be_started_again_as_soon_as_it_has_ended(worker, upstream):
    for _ in range(8):
        share = RemoteShare(worker, "feed", TABLES, 1000)
        async with running(share) as outcome:
            await until(share.running.is_set, outcome)
            assert outcome.error is None
        assert not upstream.subscriptions


async def test_a_later_run_ends_an_earlier_one_and_what_that_still_says_changes_nothing(worker):
    old, new = (RemoteShare(worker, "feed", TABLES, 1000, term=term) for term in (7, 8))
    async with running(old) as deposed:
        await until(old.running.is_set, deposed)
        async with running(new) as elected:
            await until(new.running.is_set, elected)
            with pytest.raises(UnavailableError, match="ErrChangefeedNotRunning"):
                await asyncio.to_thread(old.limit, 1 << 60)
            await until(lambda: deposed.error, deposed)
            # its Stop is of its own run only
            assert elected.error is None
            assert await asyncio.to_thread(new.ack, 1000) == 1000
            again = RemoteShare(worker, "feed", TABLES, 1000, term=7)
            async with running(again) as refused:
                await until(lambda: refused.error, refused)
            assert refused.error.code == "ErrNotOwner"
            assert await asyncio.to_thread(new.ack, 1000) == 1000


@pytest.mark.parametrize("name", ["", "../elsewhere", "/etc", "a/b", "..", "x" * 300])
async def test_a_share_is_not_named_by_a_path(worker, tmp_path, name):
    (tmp_path / "elsewhere").mkdir()
    share = RemoteShare(worker, name, TABLES, 1000)
    async with running(share) as outcome:
        await until(lambda: outcome.error, outcome)
    assert outcome.error.code == "ErrInvalidChangefeedID"
    assert (tmp_path / "elsewhere").exists()


async def test_only_the_present_owner_starts_shares(upstream, tmp_path):
    async def check_term(term):
        if term != 7:
            raise NotOwnerError("not you")

    seen = Worker(tmp_path)
    async with (
        hosting(upstream, tmp_path) as (host, make_source),
        serving(WorkerService(host, make_source, check_term), seen),
    ):
        for term, code in ((6, "ErrNotOwner"), (1 << 63, "ErrNotOwner"), (7, None)):
            share = RemoteShare(seen, "feed", TABLES, 1000, term=term)
            async with running(share) as outcome:
                await until(lambda: outcome.error or share.running.is_set(), outcome)  # noqa: B023 - asked at once
            assert (outcome.error and outcome.error.code) == code
    seen.close()


async def test_what_cannot_be_read_is_refused_before_the_first_row(worker, upstream):
    share = RemoteShare(worker, "feed", TABLES, 1000)
    async with running(share) as outcome:
        await until(share.running.is_set, outcome)
        upstream.resolve(1040)
        await until(lambda: share.resolved_ts() == 1040, outcome)
        with pytest.raises(TidemarkError, match="ErrRangeCleaned"):
            await asyncio.to_thread(share.read, ACCOUNTS.span, 900, 1040)
    with pytest.raises(UnavailableError, match="ErrChangefeedNotRunning"):
        await asyncio.to_thread(share.ack, 1010)


async def test_a_worker_that_is_gone_is_lost(worker, tmp_path):
    gone = Worker(tmp_path / "nowhere")
    share = RemoteShare(gone, "feed", TABLES, 1000)
    with pytest.raises(WorkerLostError):
        share.ack(1000)
    with pytest.raises(WorkerLostError):
        share.read(ACCOUNTS.span, 1000, 1000)
    [table] = known_blockers(share, 3, "silent")
    assert (table.resolved_ts, table.regions[0].problem) == (1000, "silent")
    gone.close()


async def reached(condition):
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - a share here tells only how far it is
            await asyncio.sleep(0.01)


async def test_a_share_of_this_process_answers_as_one_elsewhere_does(upstream, tmp_path):
    span = ACCOUNTS.span
    async with hosting(upstream, tmp_path) as (host, make_source):
        share = LocalShare(host, make_source, ShareStart("feed", TABLES, 1000))
        assert (share.resolved_ts(), share.checkpoint_ts(span)) == (1000, 1000)
        assert share.local_sink is None
        async with running(share):
            await reached(share.running.is_set)
            for ts in (1010, 1020, 1030):
                upstream.commit(ts, ts, ts)
            upstream.resolve(1040)
            await reached(lambda: share.resolved_ts() == 1040)
            assert (share.resolved_ts(span), share.checkpoint_ts(span)) == (1040, 1000)
            part = await asyncio.to_thread(share.cut_part, 1000, 1040, Bounds(max_rows=2))
            assert part.end_ts == share.cut(1000, 2) == share.cut(1000, 2, None, span) == 1029
            [plan] = share.plan_tables(None, 1000, 1040)
            assert (plan.span, plan.rows) == (span, 3)
            rows = [row.as_py() for batch in share.read(span, 1010, 1040) for row in batch["id"]]
            assert rows == [1020, 1030]
            assert share.ack(1020) == 1020
            await reached(lambda: share.checkpoint_ts() == 1020)
            [table] = await asyncio.to_thread(share.blockers, 3, with_locks=False)
            assert (table.name, table.checkpoint_ts, len(table.regions)) == (
                "bank.accounts",
                1020,
                1,
            )
            assert (share.stats.regions, len(share.repairing), share.damage) == (1, 0, None)

            # It gives the table away, and takes it again from where it was acknowledged.
            await asyncio.to_thread(share.remove, [span])
            assert not share.tables
            with pytest.raises(TableNotFoundError):
                share.resolved_ts(span)
            await asyncio.to_thread(share.add, [(ACCOUNTS, 1000)], 1020)
            await reached(lambda: share.local_sink.resolved_ts(span) >= 1020)
            await asyncio.to_thread(share.count, {span: 1020})
            assert share.checkpoint_ts(span) == 1020
        assert share.checkpoint_ts() == 1020, "what was acknowledged counts after its end, too"
        with pytest.raises(ChangefeedNotRunningError):
            share.ack(1030)


async def test_an_error_of_a_share_of_this_process_ends_it(upstream, tmp_path):
    async with hosting(upstream, tmp_path) as (host, make_source):
        share = LocalShare(host, make_source, ShareStart("feed", TABLES, 1000))
        async with running(share) as outcome:
            await reached(lambda: upstream.subscriptions)
            upstream.fail(SnapshotLostError("gone"))
            await reached(lambda: outcome.error)
        assert (outcome.error.code, outcome.error.message) == (SnapshotLostError.code, "gone")


async def test_a_later_owner_ends_a_share_of_this_process(upstream, tmp_path):
    async with hosting(upstream, tmp_path) as (host, make_source):
        old, new, older = (
            LocalShare(host, make_source, ShareStart("feed", TABLES, 1000, term=term))
            for term in (7, 8, 6)
        )
        async with running(old) as ended:
            await reached(old.running.is_set)
            async with running(new) as goes_on, running(older) as refused:
                await reached(new.running.is_set)
                await reached(lambda: ended.error and refused.error)
                assert isinstance(ended.error, ChangefeedNotRunningError)
                assert isinstance(refused.error, NotOwnerError)
                assert goes_on.error is None


class Silent:
    """Takes everything and says nothing."""

    async def Run(self, request, context):
        await asyncio.Event().wait()
        yield worker_pb2.ShareProgress()

    async def Stop(self, request, context):
        return worker_pb2.StopResponse()


async def test_a_worker_that_says_nothing_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "SILENCE_S", 0.2)
    worker = Worker(tmp_path)
    async with serving(Silent(), worker):
        with pytest.raises(WorkerLostError):
            await RemoteShare(worker, "feed", TABLES, 1000).run(0, lambda: None)
    worker.close()
    assert worker.killed


def test_very_many_tables_of_a_share_are_packed_and_are_the_same_on_the_other_side():
    source = sources(SourceContext(None, None, None))("feed", "")
    columns = [Column.bigint("id"), *(Column.bigint(f"c{place}") for place in range(9))]
    infos = [TableInfo.build(number, f"t{number}", columns) for number in range(100, 1100)]
    tables = [source.table(TableRecord("shop", read_document(info.to_json()))) for info in infos]
    plain = worker_pb2.RunRequest(tables=map(wire.table_message, tables))
    packed = worker_pb2.RunRequest(packed_tables=wire.packed_tables(tables))
    assert list(wire.tables_of(packed)) == [table.record for table in tables]
    assert list(wire.tables_of(plain)) == [table.record for table in tables]
    # Four hundred thousand of them are below what a message may have.
    assert packed.ByteSize() * 400 < MAX_MESSAGE_BYTES < plain.ByteSize() * 100


@pytest.mark.parametrize("garbage", [b"x", zlib.compress(b"\xff\xff\xff")])
def test_what_is_packed_and_is_something_else_is_told(garbage):
    with pytest.raises(CorruptError, match="tables of a share"):
        list(wire.tables_of(worker_pb2.RunRequest(packed_tables=garbage)))
