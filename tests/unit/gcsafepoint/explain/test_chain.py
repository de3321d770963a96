"""Each kind of blocker is told apart, and its command is the one that ends it."""

import pytest

from gcsafepoint.explain.explanation import document, explain
from gcsafepoint.explain.links import Kind
from gcsafepoint.explain.situation import Capture, Feed, Lock, Region, Situation, Table
from gcsafepoint.state.rules import NEVER_S, ServiceSafePoint
from tests.unit.gcsafepoint.explain.situations import LEADER, NOW_S, OWNER, ago, service, view

AGE_S = 7200
BANK = service("ticdc-default-bank", AGE_S, 50_000)


def chain(feed=None, captures=(OWNER,), services=(BANK,), worker=LEADER):
    """The links of the lowest blocker."""
    feeds = {feed.id: feed} if feed else {}
    return explain(Situation(view(services), feeds, captures, worker)).lowest.links


def feed(state="normal", error="", capture="", tables=(), checkpoint_ts=None):
    return Feed("bank", state, checkpoint_ts or ago(AGE_S), error, "why", capture, tables)


def kinds(links):
    return [link.kind for link in links]


@pytest.mark.parametrize(
    ("state", "error", "service_state", "commands"),
    [
        (
            "stopped",
            "",
            "stopped",
            ("tidemark cli changefeed resume -c bank", "tidemark cli changefeed remove -c bank"),
        ),
        (
            "failed",
            "ErrX",
            "failed",
            ("tidemark cli changefeed resume -c bank", "tidemark cli changefeed remove -c bank"),
        ),
        (
            "failed",
            "ErrSnapshotLostByGC",
            "lost",
            (
                "tidemark cli changefeed resume -c bank --overwrite-checkpoint-ts now",
                "tidemark cli changefeed remove -c bank",
            ),
        ),
        (
            "normal",
            "",
            "dead",
            ("tidemark cli capture list", "tidemark cli changefeed remove -c bank"),
        ),
    ],
)
def test_stopped_failed_lost_and_dead_changefeeds_are_told_apart(
    state, error, service_state, commands
):
    links = chain(feed(state, error))
    assert links[0].state == service_state
    assert links[1].kind is Kind.CHANGEFEED
    assert links[1].commands == commands
    assert links[0].history_lost_s == NOW_S + 50_001


def test_an_orphan_is_a_service_whose_changefeed_is_gone():
    [link] = chain()
    assert (link.state, link.commands) == (
        "orphan",
        ("tidemark cli service-gc-safepoint delete ticdc-default-bank",),
    )


def test_a_creation_that_came_to_nothing_is_an_orphan():
    creating = service("ticdc-default-creating_bank", AGE_S, 3000)
    [link] = chain(services=(creating,))
    assert link.state == "orphan"
    [link] = chain(feed(), services=(creating,))
    assert link.state == "creating"


def test_a_service_of_somebody_else_names_its_product():
    [link] = chain(services=(service("br-20261121", AGE_S),))
    assert (link.state, link.owner) == ("foreign", "BR")


def test_a_running_changefeed_keeps_its_history_for_as_long_as_it_is_renewed():
    links = chain(feed(capture="c1 at 127.0.0.1:8300"))
    assert (links[0].state, links[0].history_lost_s) == ("renewed", None)
    assert links[1].owner == "capture c1 at 127.0.0.1:8300"


def test_a_capture_that_does_not_answer_is_named_and_the_owner_first():
    captures = (
        Capture("c2", "h:2", problem="no answer in 2 s"),
        Capture("c1", "h:1", True, "no answer in 2 s"),
    )
    links = chain(feed(), captures)
    assert kinds(links) == [Kind.SERVICE, Kind.CHANGEFEED, Kind.CAPTURE]
    assert (links[2].name, links[2].owner) == ("c1", "h:1")
    assert "no answer in 2 s" in links[2].reason


def test_no_capture_at_all_is_a_link_too():
    links = chain(feed(), captures=())
    assert links[2].reason == "no capture is alive; start one"


def lagging(*locks, resolved_s=AGE_S - 1, others_s=10):
    """A table whose slowest region stands; another region and another table go on."""
    slow = Region(7, ago(resolved_s), "store:20160", tuple(locks))
    tables = (
        Table(
            "bank.accounts",
            ago(AGE_S),
            ago(resolved_s),
            (slow, Region(8, ago(others_s), "store:20160")),
        ),
        Table("bank.transfers", ago(AGE_S), ago(others_s + 20)),
    )
    return feed(capture="c1 at h:1", tables=tables)


def test_the_chain_goes_down_to_the_lock():
    lock = Lock(ago(AGE_S - 1), "6b31", "6b32", ttl_ms=20_000, kind="put")
    links = chain(lagging(lock))
    assert kinds(links) == [Kind.SERVICE, Kind.CHANGEFEED, Kind.TABLE, Kind.REGION, Kind.LOCK]
    table, region, last = links[2:]
    assert (table.name, region.name, region.owner) == ("bank.accounts", "7", "store store:20160")
    assert (last.state, last.owner) == ("expired", "primary key 6b31")
    assert last.commands == (
        f"tidemark cli unsafe resolve-lock --key 6b32 --start-ts {ago(AGE_S - 1)}",
    )


def test_a_lock_within_its_ttl_says_so():
    links = chain(lagging(Lock(ago(60), "6b", ttl_ms=100_000), resolved_s=61))
    # the lag is mostly that of the reader here
    assert links[-1].kind is Kind.READER
    links = chain(lagging(Lock(ago(AGE_S - 1), "6b", ttl_ms=AGE_S * 1000 + 5000)))
    assert links[-1].state == "live"
    assert links[-1].expires_ms == (NOW_S + 1 + 5) * 1000


def test_what_a_link_holds_back_is_bounded_by_its_neighbours():
    lock = Lock(ago(AGE_S - 1), "6b31", ttl_ms=1)
    other = service("br-1", 3600)
    shown = document(
        explain(
            Situation(view((BANK, other)), {"bank": lagging(lock, others_s=5000)}, (OWNER,), LEADER)
        )
    )
    seconds = [link["holds_back_seconds"] for link in shown["blockers"][0]["chain"]]
    # all of it: up to br-1; the table: up to the next table; region and lock: up to the next
    # region, no further
    assert seconds == [AGE_S - 3600, AGE_S - 3600, AGE_S - 5020, AGE_S - 5020, AGE_S - 5020]


def test_a_region_without_lock_blames_its_store_and_one_without_store_says_so():
    assert "sends no newer resolved_ts" in chain(lagging())[-1].reason
    gap = Table("bank.accounts", ago(AGE_S), ago(AGE_S), (Region(0, ago(AGE_S)),))
    assert chain(feed(capture="c1", tables=(gap,)))[-1].name == "unserved"
    unknown = Table(
        "bank.accounts",
        ago(AGE_S),
        ago(AGE_S),
        (Region(0, ago(AGE_S), problem="worker 1 is silent"),),
    )
    assert chain(feed(capture="c1", tables=(unknown,)))[-1].reason == "worker 1 is silent"


def test_the_pump_that_all_others_wait_for_is_the_end_of_the_chain():
    late = Table(
        "shop.orders", ago(AGE_S), ago(AGE_S), (Region(0, ago(AGE_S), "pump2:8250", pump="pump-2"),)
    )
    link = chain(feed(capture="c1", tables=(late,)))[-1]
    assert (link.kind, link.name, link.owner) == (Kind.PUMP, "pump-2", "at pump2:8250")
    assert link.commands == ("tidemark cli pump list", "curl http://PUMP/status  # of pump2:8250")


def test_rows_that_nobody_takes_blame_the_reader():
    table = Table("bank.accounts", ago(AGE_S), ago(1), (Region(7, ago(1)),))
    links = chain(feed(capture="c1 at h:1", tables=(table,)))
    assert kinds(links) == [Kind.SERVICE, Kind.CHANGEFEED, Kind.READER]


def test_a_global_barrier_is_deleted_by_its_own_call():
    situation = Situation(
        view(global_barriers=[ServiceSafePoint("weekly", NEVER_S, ago(AGE_S))]), worker=LEADER
    )
    link = explain(situation).lowest.links[0]
    assert link.kind is Kind.GLOBAL_BARRIER
    assert link.expires_ms is None
    assert "DeleteGlobalGCBarrier" in link.commands[0]


def test_a_hostile_service_id_can_be_shown_and_pasted():
    [link] = chain(services=(service("x; rm -rf /\x1b[2J", AGE_S),))
    assert link.name == "x; rm -rf /\\x1b[2J"
    assert link.commands == (
        "tidemark cli service-gc-safepoint delete 'x; rm -rf /\\x1b[2J' --yes",
    )
