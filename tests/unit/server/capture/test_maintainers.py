"""Several captures of one cluster run logs: real metadata, sorters and sinks, logs in memory."""

import asyncio
from collections import Counter
from functools import partial
from types import SimpleNamespace

import grpc
import pytest
from tidemarkpb.v1 import changefeed_pb2 as pb
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub

from server.capture import changefeeds as changefeeds_module
from server.capture import checkpoint_saver as checkpoint_saver_module
from server.capture import maintainers as maintainers_module
from server.capture import membership as membership_module
from server.capture import owner as owner_module
from server.capture import routing as routing_module
from server.capture.changefeeds import Changefeeds
from server.capture.errors import (
    ChangefeedExistsError,
    ChangefeedNotExistsError,
    ChangeInterruptedError,
    NotOwnerError,
)
from server.capture.feed import Feed, FeedFactory
from server.capture.fence import Fence, FencedMeta
from server.capture.job_report import failed_by_job
from server.capture.local import LocalProcessor, Resources
from server.capture.maintainers import Maintainers
from server.capture.membership import CaptureRecord, Membership
from server.capture.owner import Owner, Placement
from server.capture.records import Records
from server.capture.routing import Router
from server.capture.runner import note_job
from server.capture.worker.peers import PeerAccess
from server.changefeed import keys
from server.changefeed.info import State
from server.dump.job import DumpRecords
from server.dump.progress import TableProgress
from server.puller.source import SourceContext
from server.rpc.credentials import SecurityConfig
from server.rpc.errors import StatusError
from sink.flight.feeds import FAILED, Report
from storage.meta.meta import Compare, Delete, Put
from storage.model.errors import TidemarkError
from tests.unit.server.capture.conftest import new
from tests.unit.server.capture.scripted_log import ScriptedLog, table_of
from tests.unit.server.capture.test_owner import until

ACCOUNTS = table_of(1, "accounts", "balance")
NAMES = ("ann", "ben", "cat")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(owner_module, "_DECIDE_EVERY_S", 0.02)
    monkeypatch.setattr(owner_module, "_BALANCE_AFTER_S", 0.2)
    monkeypatch.setattr(maintainers_module, "_ADJUST_EVERY_S", 0.02)


@pytest.fixture
async def cluster(meta, upstream, tmp_path):
    """Starts captures by name, which share one log."""
    upstream.meta, upstream.log = meta, ScriptedLog(ACCOUNTS)
    running = {}

    def capture(name):
        context = SourceContext(upstream, upstream, None)
        resources = Resources(context, tmp_path / name / "sorter", 64 << 20)

        def factory(fence):
            return FeedFactory(
                Records(meta, fence),
                lambda *_: upstream.log,
                partial(LocalProcessor, resources),
            )

        fence = Fence()
        placement = Placement(meta, fence)
        owner = Owner(factory(fence), upstream, placement)
        maintainers = Maintainers(
            meta,
            name,
            owner,
            lambda of, changefeed: Changefeeds(factory(of), upstream, changefeed),
            placement.decided,
        )
        membership = Membership(meta, name, maintainers, fence)
        router = Router(maintainers, membership, PeerAccess(SecurityConfig()))
        return SimpleNamespace(
            name=name, owner=owner, maintainers=maintainers, membership=membership, router=router
        )

    async def start(name):
        made = capture(name)
        task = asyncio.get_running_loop().create_task(made.membership.run(f"{name}:1", f"{name}:2"))
        running[name] = task
        await made.membership.settled.wait()
        return made

    async def stop(name):
        task = running.pop(name)
        task.cancel()
        await asyncio.wait([task])

    yield SimpleNamespace(start=start, stop=stop, log=upstream.log)
    while running:
        await stop(next(iter(running)))


CONTEXT = SimpleNamespace(invocation_metadata=tuple)


async def resigned(capture):
    capture.membership.resign()
    await until(lambda: not capture.owner.is_active)


async def test_what_is_asked_while_nobody_is_owner_waits_for_the_next_one(cluster):
    capture = await cluster.start("a")

    async def made():
        return await capture.owner.carry_out(create(capture.owner, "feed"))

    await resigned(capture)
    with pytest.raises(NotOwnerError):
        await made()
    await capture.router.carry_out(None, "CreateChangefeed", None, CONTEXT, made)
    await until(lambda: capture.maintainers.has("feed"))


async def test_an_elected_capture_that_has_not_begun_does_not_ask_itself(meta, cluster):
    _, elected = [await cluster.start(name) for name in "ab"]
    await meta.put(keys.OWNER, b"b")
    with pytest.raises(NotOwnerError, match="begins"):
        await elected.router.find()


async def test_to_resign_is_not_asked_of_the_next_owner(cluster):
    capture, asked = await cluster.start("a"), []

    async def resign():
        asked.append(True)

    await resigned(capture)
    with pytest.raises(NotOwnerError):
        await capture.router.carry_out(None, "ResignOwner", None, CONTEXT, resign)
    assert not asked


async def test_a_change_that_the_end_of_an_owner_breaks_off_says_so(cluster):
    capture, begun = await cluster.start("a"), asyncio.Event()

    async def endless():
        begun.set()
        await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        changing = tasks.create_task(outcome(capture.owner.carry_out(endless())))
        await begun.wait()
        await resigned(capture)
    assert isinstance(changing.result(), ChangeInterruptedError)


async def test_a_creation_that_its_owner_did_not_survive_is_made_once_by_the_next_one(
    cluster, monkeypatch
):
    """Its owner ends when the record is written, before it has answered."""
    monkeypatch.setattr(changefeeds_module, "_DRAIN_TIMEOUT_S", 0.0)
    monkeypatch.setattr(checkpoint_saver_module, "_FINAL_SAVE_S", 0.0)
    monkeypatch.setattr(membership_module, "_RETRY_S", 0.05)
    capture = await cluster.start("a")
    here, interrupted = capture.owner, asyncio.Event()
    write = here._records.create

    async def written(*arguments):
        await write(*arguments)
        if not interrupted.is_set():
            interrupted.set()
            await asyncio.Event().wait()

    here._records.create = written
    made = []

    async def attempt():
        made.append(None)
        return await here.carry_out(create(here, "feed", request="1"))

    async with asyncio.TaskGroup() as tasks:
        call = (None, "CreateChangefeed", None, CONTEXT, attempt)
        creating = tasks.create_task(capture.router.carry_out(*call))
        await interrupted.wait()
        capture.membership.resign()
    assert creating.result().id == "feed"
    assert len(made) > 1
    await until(lambda: capture.maintainers.has("feed"))
    with pytest.raises(ChangefeedExistsError):
        await create(here, "feed", request="2")


@pytest.mark.parametrize(
    ("method", "advice"), [("CreateChangefeed", "request_id"), ("MoveTable", "query")]
)
async def test_a_forwarded_change_that_gets_no_answer_may_have_been_made(
    cluster, monkeypatch, method, advice
):
    monkeypatch.setattr(routing_module, "_FIND_TIMEOUT_S", 0.0)
    capture = await cluster.start("a")

    async def silent():
        raise StatusError(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    with pytest.raises(ChangeInterruptedError, match=f"Socket closed.*{advice}"):
        await capture.router.carry_out(None, method, None, CONTEXT, silent)
    with pytest.raises(StatusError):
        await capture.router.carry_out(None, "QueryChangefeed", None, CONTEXT, silent)


async def test_a_capture_that_has_died_is_sent_nothing(cluster, monkeypatch):
    monkeypatch.setattr(routing_module, "_FIND_TIMEOUT_S", 0.0)
    monkeypatch.setattr(routing_module, "_CONNECT_S", 0.2)
    capture = await cluster.start("a")

    async def find(*_):
        return CaptureRecord("b", "127.0.0.1:1", "")

    monkeypatch.setattr(capture.router, "find", find)
    call = (ChangefeedServiceStub, "ResumeChangefeed", pb.ResumeChangefeedRequest(), CONTEXT, None)
    with pytest.raises(
        NotOwnerError, match=r"capture b does not answer: .* cannot be connected to"
    ):
        await capture.router.carry_out(*call)


async def test_a_change_that_comes_while_an_owner_ends_is_for_the_next_one(cluster):
    capture = await cluster.start("a")
    begun, ending, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow_to_end():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await may_end.wait()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(outcome(capture.owner.carry_out(slow_to_end())))
        await begun.wait()
        capture.membership.resign()
        await ending.wait()
        with pytest.raises(NotOwnerError):
            await capture.owner.carry_out(create(capture.owner, "feed"))
        may_end.set()


async def outcome(change):
    try:
        return await change
    except TidemarkError as err:
        return err


async def create(owner, name, request=""):
    log = {"source_uri": "log://", "start_ts": 1000, "rules": ["bank.*"]}
    made = await owner.create(new(name, f"delta:///lake/{name}", request=request, **log))
    assert made.info.state is State.NORMAL
    return made


async def maintained(meta):
    """Who holds the key of which changefeed."""
    return await owner_module.captures_of(meta, keys.MAINTAINERS)


async def spread(meta, captures, counts):
    """Wait until so many logs run on the captures, each exactly where its key is."""
    for _ in range(3000):
        held = await maintained(meta)
        running = {
            each.name: {
                changefeed
                for changefeed, feed in each.maintainers.feeds.items()
                if feed.processor.sink
            }
            for each in captures
        }
        if (
            sorted(Counter(held.values()).values()) == sorted(counts)
            and sum(map(len, running.values())) == len(held)
            and all(changefeed in running.get(name, ()) for changefeed, name in held.items())
        ):
            return held
        await asyncio.sleep(0.02)
    raise TimeoutError(f"{held} {running}")


async def test_logs_are_spread_over_the_captures_and_go_to_the_others_when_one_leaves(
    meta, cluster
):
    captures = [await cluster.start(name) for name in NAMES]
    owner = next(each.owner for each in captures if each.owner.is_active)
    for number in range(6):
        await create(owner, f"log{number}")
    before = await spread(meta, captures, [2, 2, 2])
    leaves = next(each for each in captures if each.owner is not owner)
    await cluster.stop(leaves.name)
    stays = [each for each in captures if each is not leaves]
    after = await spread(meta, stays, [3, 3])
    assert {
        log: name for log, name in before.items() if name != leaves.name
    }.items() <= after.items()
    joins = await cluster.start("dan")
    balanced = await spread(meta, [*stays, joins], [2, 2, 2])
    assert sum(balanced[log] != after[log] for log in after) == 2


async def test_a_drained_capture_gives_its_logs_away_and_gets_some_back(meta, cluster):
    one, two = [await cluster.start(name) for name in NAMES[:2]]
    for number in range(4):
        await create(one.owner, f"log{number}")
    await spread(meta, [one, two], [2, 2])
    await one.membership.drain("ben")
    held = await spread(meta, [one, two], [4])
    assert set(held.values()) == {"ann"}
    await one.membership.drain("ben", cancel=True)
    await spread(meta, [one, two], [2, 2])


async def test_a_drained_capture_goes_on_if_the_one_that_took_over_dies(meta, cluster):
    one, two = [await cluster.start(name) for name in NAMES[:2]]
    for number in range(2):
        await create(one.owner, f"log{number}")
    await spread(meta, [one, two], [1, 1])
    await one.membership.drain("ben")
    assert set((await spread(meta, [one, two], [2])).values()) == {"ann"}
    await cluster.stop("ann")
    await spread(meta, [two], [2])
    assert two.owner.is_active
    assert [each.id for each in await two.membership.sharing()] == ["ben"]
    joins = await cluster.start("dan")
    await until(lambda: len(joins.maintainers.feeds) == 2)
    await until(lambda: joins.owner.is_active)
    assert [each.id for each in await joins.membership.sharing()] == ["dan"]


async def test_keys_that_are_no_text_stop_nobody(meta, cluster):
    for prefix in (keys.PLACEMENTS, keys.MAINTAINERS, keys.CAPTURES, keys.DRAINING):
        await meta.put(prefix + b"\xff", b"\xff")
    captures = [await cluster.start(name) for name in "ab"]
    for name in ("one", "two"):
        await create(captures[0].owner, name)
    await spread(meta, captures, [1, 1])
    assert {each.record.id for each in await captures[0].membership.members()} == {"a", "b"}


async def test_another_owner_changes_nothing_for_the_logs_of_others(meta, cluster):
    one, two = [await cluster.start(name) for name in NAMES[:2]]
    for number in range(2):
        await create(one.owner, f"log{number}")
    held = await spread(meta, [one, two], [1, 1])
    [log] = (log for log, name in held.items() if name == "ben")
    feed = two.maintainers.feed(log)
    one.membership.resign()
    await until(lambda: two.owner.is_active)
    assert two.maintainers.feed(log) is feed
    assert await spread(meta, [one, two], [1, 1]) == held


async def test_what_a_moved_log_has_delivered_is_not_delivered_again(meta, cluster, tmp_path):
    one, two = [await cluster.start(name) for name in NAMES[:2]]
    await create(one.owner, "log")
    held = await spread(meta, [one, two], [1])
    first, second = (one, two) if held["log"] == "ann" else (two, one)
    cluster.log.rows(1010, ACCOUNTS, {"id": 1, "balance": 5})
    cluster.log.resolve(1040)
    feed = first.maintainers.feed("log")
    await until(lambda: feed.processor.resolved_ts == 1040)
    await asyncio.to_thread(feed.processor.sink.ack, 1020)
    await one.membership.drain(first.name)
    await until(lambda: second.maintainers.has("log"))
    moved = second.maintainers.feed("log")
    assert (moved.checkpoint_ts, moved.info.state) == (1020, State.NORMAL)
    await until(lambda: moved.processor.resolved_ts == 1040)
    assert not (tmp_path / first.name / "sorter" / "log").exists()
    assert (tmp_path / second.name / "sorter" / "log").exists()


async def test_a_change_is_carried_out_before_its_log_moves_and_the_next_one_where_it_went(
    meta, cluster, monkeypatch
):
    one, two = [await cluster.start(name) for name in NAMES[:2]]
    await create(one.owner, "log")
    held = await spread(meta, [one, two], [1])
    first, second = (one, two) if held["log"] == "ann" else (two, one)
    here = first.maintainers.changefeeds_of("log")
    stopping, may_stop = asyncio.Event(), asyncio.Event()
    stop = Feed.stop

    async def slow_stop(feed):
        stopping.set()
        await may_stop.wait()
        await stop(feed)

    monkeypatch.setattr(Feed, "stop", slow_stop)
    async with asyncio.TaskGroup() as tasks:
        pausing = tasks.create_task(outcome(here.carry_out(here.pause("log"))))
        await stopping.wait()
        await one.membership.drain(first.name)
        await until(lambda: "log" in first.maintainers._leaving)
        behind = tasks.create_task(outcome(here.carry_out(here.resume("log"))))
        await asyncio.sleep(0.1)  # it would have been broken off by now
        may_stop.set()
    assert pausing.result().info.state is State.STOPPED
    assert isinstance(behind.result(), NotOwnerError)
    await until(lambda: second.maintainers.has("log"))
    assert second.maintainers.feed("log").info.state is State.STOPPED


async def test_a_changefeed_is_found_from_every_capture_and_can_be_made_again_at_once(
    meta, cluster
):
    captures = [await cluster.start(name) for name in NAMES]
    for number in range(3):
        await create(captures[0].owner, f"log{number}")
    held = await spread(meta, captures, [1, 1, 1])
    for capture in captures:
        for log, name in held.items():
            found = await capture.router.find(log)
            assert (found.id if found else capture.name) == name
        owner = await capture.router.find("nobody")
        assert (owner.id if owner else capture.name) == "ann"
    with pytest.raises(ChangefeedNotExistsError):
        captures[0].maintainers.feed("nobody")
    [log] = (log for log, name in held.items() if name == "ben")
    for _ in range(5):
        where = next(each for each in captures if each.maintainers.has(log))
        here = where.maintainers.changefeeds_of(log)
        await here.carry_out(here.remove(log))
        assert await captures[0].router.find(log) is None  # it answers that there is none
        await create(captures[0].owner, log)
        found = await captures[2].router.find(log)
        assert found is None or found.id in NAMES
        await spread(meta, captures, [1, 1, 1])


async def test_a_capture_that_comes_back_takes_the_keys_of_its_dead_process(meta, cluster):
    async with await meta.grant_lease(60) as lease:
        one = await cluster.start("ann")
        await create(one.owner, "log")
        await spread(meta, [one], [1])
        await cluster.stop("ann")
        # as `kill -9` leaves it, for as long as the lease lasts
        await meta.put(keys.maintainer("log"), b"ann", lease.id)
        again = await cluster.start("ann")
        await spread(meta, [again], [1])


async def test_a_key_that_another_capture_holds_is_waited_for(meta, cluster):
    one = await cluster.start("ann")
    async with await meta.grant_lease(60) as lease:
        await meta.put(keys.maintainer("log"), b"hung", lease.id)
        await create(one.owner, "log")
        with pytest.raises(NotOwnerError, match="on its way to another capture"):
            await one.router.find("log", 0.3)
        assert not one.maintainers.has("log")
    await spread(meta, [one], [1])


async def test_nothing_is_written_for_a_changefeed_whose_key_is_lost(meta):
    async with await meta.grant_lease(60) as lease:
        key = keys.maintainer("log")
        fence = Fence(key, await meta.campaign(key, b"ann", lease.id))
        fenced = FencedMeta(meta, fence)
        records, dump = Records(meta, fence), DumpRecords(fenced, "log")
        await fenced.put(b"/a", b"1")
        # a comparison of the caller that fails is no lost key
        assert not (await fenced.txn([Compare.absent(b"/a")], [Put(b"/a", b"2")])).succeeded
        await meta.delete(key)
        await meta.campaign(key, b"ben", lease.id)
        progress = TableProgress("bank.accounts", 1, "job")
        for write in (
            fenced.put(b"/a", b"3"),
            fenced.delete(b"/a"),
            fenced.write_all([Put(b"/b%d" % each, b"1") for each in range(300)]),
            fenced.txn([Compare.absent(b"/c")], [Put(b"/c", b"1")]),
            records.save({"log": 2000}, {}),
            dump.put_tables([progress]),
        ):
            with pytest.raises(NotOwnerError, match="another capture"):
                await write
        assert (await meta.get(b"/a")).value == b"1"
        assert not await meta.get_prefix(b"/b")
        assert not await meta.get_prefix(keys.source("log"))


async def test_a_key_is_given_back_however_long_it_takes_to_stop(meta, cluster, monkeypatch):
    one, two = [await cluster.start(name) for name in NAMES[:2]]
    await create(one.owner, "log")
    held = await spread(meta, [one, two], [1])
    release = Maintainers._release

    async def slowly(self, key):
        await asyncio.sleep(0.2)
        await release(self, key)

    monkeypatch.setattr(Maintainers, "_release", slowly)
    await one.membership.drain(held["log"])
    await until(lambda: not (one if held["log"] == "ann" else two).maintainers.has("log"))
    assert (await spread(meta, [one, two], [1]))["log"] != held["log"]


async def test_a_key_that_could_not_be_given_back_is_given_back_later(meta, cluster):
    one = await cluster.start("ann")
    await meta.put(keys.maintainer("gone"), b"ann", one.maintainers._lease.id)
    for _ in range(3000):
        if not await maintained(meta):
            return
        await asyncio.sleep(0.02)
    raise TimeoutError


async def test_a_key_that_is_taken_again_is_not_deleted_by_what_was_sent_before(
    meta, cluster, monkeypatch
):
    one, late = await cluster.start("ann"), []

    async def unanswered(_, key):
        late.append(key)

    await create(one.owner, "log")
    await spread(meta, [one], [1])
    monkeypatch.setattr(Maintainers, "_release", unanswered)
    here = one.maintainers.changefeeds_of("log")
    await here.carry_out(here.remove("log"))
    await until(lambda: late)
    await create(one.owner, "log")
    await spread(meta, [one], [1])
    for key in late:
        assert not (await meta.txn([key], [Delete(key.key)])).succeeded
    assert await maintained(meta) == {"log": "ann"}


async def test_rows_are_promised_only_while_the_lease_surely_lasts(meta, cluster):
    one = await cluster.start("ann")
    one.maintainers.check_held()
    one.maintainers._lease.deadline = 0.0  # as after a process was stopped and goes on
    with pytest.raises(NotOwnerError, match="lease has ended"):
        one.maintainers.check_held()


async def test_a_call_that_meets_a_move_is_made_again_but_not_a_forwarded_one(meta, cluster):
    one = await cluster.start("ann")
    await create(one.owner, "log")
    await spread(meta, [one], [1])
    calls = []

    async def pause():
        calls.append("pause")
        if len(calls) == 1:
            raise NotOwnerError("it moves")
        return "paused"

    def context(*metadata):
        return SimpleNamespace(invocation_metadata=lambda: metadata)

    asked = (None, "PauseChangefeed", None)
    assert await one.router.carry_out(*asked, context(), pause, "log") == "paused"
    assert len(calls) == 2
    calls.clear()
    with pytest.raises(NotOwnerError, match="it moves"):
        await one.router.carry_out(*asked, context(("tidemark-forwarded", "1")), pause, "log")


async def test_one_that_nobody_runs_is_shown_with_what_its_lake_job_said_last(meta, cluster):
    one = await cluster.start("ann")
    await create(one.owner, "log")
    await spread(meta, [one], [1])
    feed = one.maintainers.feed("log")
    note_job(feed, Report(FAILED, 0, "ErrTargetForeign", "not ours"))
    await until(lambda: feed.job_saved)
    [recorded] = await one.owner.recorded(())
    assert failed_by_job(recorded.info, recorded.job)


async def test_a_log_whose_record_cannot_be_read_stops_no_other_and_stays_with_one_capture(
    meta, cluster
):
    captures = {name: await cluster.start(name) for name in NAMES}
    owner = next(each.owner for each in captures.values() if each.owner.is_active)
    for number in range(3):
        await create(owner, f"log{number}")
    before = await spread(meta, list(captures.values()), [1, 1, 1])
    broken, gone = next(iter(before.items()))
    pair = await meta.get(keys.info(broken))
    await meta.put(pair.key, b'{"of": "a later version"}')
    await cluster.stop(gone)
    del captures[gone]
    await until(
        lambda: (
            any(broken in each.maintainers.feeds for each in captures.values())
            and len([f for each in captures.values() for f in each.maintainers.feeds.values()]) == 3
            and any(each.owner.is_active for each in captures.values())
        )
    )
    [home] = [each for each in captures.values() if broken in each.maintainers.feeds]
    feed = home.maintainers.feed(broken)
    assert (feed.info.state, feed.info.error.code) == (State.FAILED, "ErrCorrupt")
    others = [
        each.maintainers.feed(log)
        for log in before
        for each in captures.values()
        if log != broken and each.maintainers.has(log)
    ]
    await until(lambda: all(each.processor.sink for each in others))
    assert len(others) == 2
    assert (await meta.get(keys.info(broken))).value == b'{"of": "a later version"}'
    for each in captures.values():
        assert await each.router.find(broken) in (
            None,
            *[member.record for member in await each.membership.members()],
        )
    await home.maintainers.changefeeds_of(broken).remove(broken)
    assert await meta.get(keys.info(broken)) is None
    await until(lambda: not any(broken in each.maintainers.feeds for each in captures.values()))
