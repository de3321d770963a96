"""The chain of blockers against the safepoint rules themselves,
and against a clock that is let run.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcsafepoint.explain.explanation import (
    BlockerFixedError,
    BlockerUnknownError,
    document,
    explain,
    holders,
    lost_at,
)
from gcsafepoint.explain.links import Kind
from gcsafepoint.explain.names import feed_of, feed_service, generation_of
from gcsafepoint.explain.situation import Situation
from gcsafepoint.state.rules import GC_WORKER, NEVER_S, GcState
from gcsafepoint.state.states import MinStartTs
from tests.unit.gcsafepoint.explain.situations import LEADER, NOW_S, ago, service, situations, view


def live_services(situation):
    return [one for one in situation.view.services if not one.is_expired(NOW_S)]


@given(situations())
def test_chains_are_in_order_and_the_first_is_the_lowest_of_all_that_live(situation):
    explained = explain(situation)
    order = [(chain.ts, chain.id == GC_WORKER, chain.id) for chain in explained.chains]
    assert order == sorted(order)
    barriers = [
        *live_services(situation),
        *(b for b in situation.view.global_barriers if not b.is_expired(NOW_S)),
    ]
    lowest = min(
        [barrier.safe_point for barrier in (*barriers, situation.view.gc_worker)]
        + [running.start_ts for running in situation.view.min_start_ts]
    )
    assert explained.lowest.ts == lowest
    assert len(order) == len(barriers) + len(situation.view.min_start_ts) + 1


@given(situations())
def test_the_first_service_is_the_minimum_of_the_rules(situation):
    rules = GcState([*live_services(situation), situation.view.gc_worker])
    first = next(
        chain
        for chain in explain(situation).chains
        if chain.links[0].kind in (Kind.SERVICE, Kind.GC_WORKER)
    )
    assert first.ts == rules.minimum().safe_point


@given(situations(), st.data())
def test_what_if_is_what_the_situation_without_them_says(situation, data):
    removable = [one for one in holders(situation) if one.kind is not Kind.GC_WORKER]
    names = (
        data.draw(st.lists(st.sampled_from([one.id for one in removable]), min_size=1))
        if removable
        else []
    )
    explained = explain(situation, names)
    if not names:
        assert explained.what_if is None
        return
    rest = [one for one in holders(situation) if one.id not in names]
    assert explained.what_if.next.ts == rest[0].ts
    assert explained.what_if.next.ts >= explained.lowest.ts
    assert set(explained.what_if.removed) == set(names)


@given(situations())
def test_a_deeper_link_never_releases_more_than_what_hangs_on_it(situation):
    for blocker in document(explain(situation))["blockers"]:
        released = [link["minimum_without"] for link in blocker["chain"]]
        assert released == sorted(released, reverse=True)
        assert all(link["holds_back_seconds"] >= 0 for link in blocker["chain"])


@given(situations())
def test_history_is_lost_when_the_last_one_below_has_ended(situation):
    ordered = holders(situation)
    for index, holder in enumerate(ordered):
        below = [one for one in ordered if one.ts <= holder.ts and one.kind is not Kind.GC_WORKER]
        endless = any(one.renewed or one.expired_at == NEVER_S for one in below)
        found = lost_at(ordered, index)
        if endless or not below:
            assert found is None
        else:
            seconds = range(NOW_S - 60, NOW_S + 60)
            free = [second for second in seconds if all(one.expired_at < second for one in below)]
            assert found == min(free)


@given(situations())
def test_every_situation_has_a_printable_document(situation):
    def texts(value):
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            for member in value.values():
                yield from texts(member)
        elif isinstance(value, list):
            for member in value:
                yield from texts(member)

    for text in texts(document(explain(situation))):
        assert text.isprintable()
        text.encode()


@given(situations(), st.integers(0, 5))
def test_what_is_left_out_is_counted(situation, most):
    explained = explain(situation, most=most)
    assert len(explained.chains) + explained.left_out == len(holders(situation))
    assert explained.chains


BANK = service("ticdc-default-bank", 7200)


def test_removing_the_lowest_moves_the_minimum_to_the_next():
    situation = Situation(view([BANK, service("br-1", 3600)]), worker=LEADER)
    explained = document(explain(situation, ["ticdc-default-bank"]))
    assert (explained["min_safe_point_id"], explained["what_if"]["min_safe_point_id"]) == (
        "ticdc-default-bank",
        "br-1",
    )
    assert explained["what_if"]["gain_seconds"] == 3600
    assert explained["blockers"][0]["chain"][0]["holds_back_seconds"] == 3600
    assert explained["blockers"][1]["chain"][0]["holds_back_seconds"] == 0
    assert explained["what_if"]["blocked"]


def test_removing_several_ends_at_gcs_own_worker():
    situation = Situation(view([BANK, service("br-1", 3600)]), worker=LEADER)
    explained = document(explain(situation, ["bank", "br-1"]))
    assert explained["what_if"]["min_safe_point_id"] == GC_WORKER
    assert not explained["what_if"]["blocked"]
    assert explained["what_if"]["removed"] == ["ticdc-default-bank", "br-1"]


def test_a_changefeed_that_was_made_anew_is_known_by_its_id():
    again = service("ticdc-default-bank.12", 7200)
    situation = Situation(view([again, service("br-1", 3600)]), worker=LEADER)
    explained = document(explain(situation, ["bank"]))
    assert explained["what_if"]["removed"] == ["ticdc-default-bank.12"]
    assert (feed_of("ticdc-default-bank.12"), generation_of("ticdc-default-bank.12")) == (
        "bank",
        12,
    )
    assert generation_of("ticdc-default-bank") == 0
    assert feed_of(feed_service("a-1", 3)) == "a-1"


def test_an_unknown_name_gets_the_nearest():
    situation = Situation(view([BANK]))
    with pytest.raises(BlockerUnknownError, match="did you mean ticdc-default-bank"):
        explain(situation, ["ticdc-default-bnk"])
    with pytest.raises(BlockerFixedError, match="gc_worker is GC itself"):
        explain(situation, [GC_WORKER])


def test_nothing_blocks_while_gcs_own_worker_is_the_lowest():
    explained = document(
        explain(Situation(view([service("ticdc-default-bank", 5)]), worker=LEADER))
    )
    assert not explained["blocked"]
    assert explained["summary"] == "nothing holds GC back: the minimum is where GC wants it"


def test_a_new_cluster_says_that_gc_never_ran():
    explained = document(explain(Situation(view(worker_ts=0))))
    assert explained["summary"] == "GC is held at its beginning by gc_worker (absent)"
    assert explained["blockers"][0]["chain"][0]["commands"] == [
        "tidemark gc-worker --coordinator HOST:PORT"
    ]


def test_what_gcs_worker_waits_for_comes_before_it_when_both_stand_at_one_point():
    """As today's PD has it: its txn safe point goes up to the lowest barrier."""
    situation = Situation(view([BANK], worker_ts=BANK.safe_point), worker=LEADER)
    explained = explain(situation)
    assert [(chain.id, chain.links[0].state) for chain in explained.chains] == [
        (BANK.service_id, "orphan"),
        (GC_WORKER, "held"),
    ]
    assert document(explain(situation, ["bank"]))["what_if"]["next"]["chain"][0]["state"] == "late"


def test_a_running_transaction_of_tidb_is_a_blocker():
    situation = Situation(view([], min_start_ts=[MinStartTs("ddl-7", ago(9000))]), worker=LEADER)
    [first, *_] = document(explain(situation))["blockers"]
    assert (first["id"], first["chain"][0]["owner"]) == ("tidb/ddl-7", "TiDB server ddl-7")
