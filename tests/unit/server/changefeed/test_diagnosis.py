"""What `tidemark cli doctor` says of what it is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tidemarkpb.v1 import changefeed_pb2 as pb

from server.changefeed.diagnosis import (
    Level,
    diagnose_captures,
    diagnose_changefeed,
    diagnose_gc,
    diagnose_members,
    stages,
)
from server.changefeed.view import NOBODY_READS, detail
from storage.model.ts import compose

NOW_MS = 1_764_000_000_000


def at(lag_s: float) -> int:
    """The timestamp of `lag_s` seconds ago."""
    return compose(NOW_MS - int(lag_s * 1000), 0)


def changefeed(lags: dict[str, float] | None = None, **members) -> dict:
    """One that runs, whose stages are as far behind as `lags` says, or all are at the present."""
    lag = dict.fromkeys(("pulled", "sorted", "cut", "checkpoint"), 1.0) | (lags or {})
    feed = pb.Changefeed(
        id="orders",
        sink_uri="delta:///lake",
        state=pb.CHANGEFEED_STATE_NORMAL,
        checkpoint_ts=at(lag["checkpoint"]),
        resolved_ts=at(lag["sorted"]),
        holding=pb.Holding(pulled_ts=at(lag["pulled"]), sorted_ts=at(lag["sorted"])),
        lake_job=pb.LakeJob(state="ready", cut_ts=at(lag["cut"]), time="2026-11-25T00:00:00Z"),
        maintainer="one",
    )
    for name, value in members.items():
        if isinstance(value, int):
            setattr(feed, name, value)
        elif isinstance(value, list):
            getattr(feed, name).extend(value)
        else:
            getattr(feed, name).MergeFrom(value)
    return detail(feed)


def said(document: dict, dump: dict | None = None) -> list[tuple[Level, str]]:
    found = diagnose_changefeed(document, dump, NOW_MS)
    return [(each.level, f"{each.where}: {each.what} → {each.do}") for each in found]


def test_nothing_is_said_of_a_changefeed_that_is_well():
    assert said(changefeed()) == []
    assert [stage.name for stage in stages(changefeed(), NOW_MS)] == [
        "source", "sorter", "lake job", "checkpoint",
    ]  # fmt: skip


def test_a_lake_job_is_never_behind_what_it_has_acknowledged():
    lags = {
        stage.name: stage.lag_s for stage in stages(changefeed({"cut": 9, "checkpoint": 1}), NOW_MS)
    }
    assert lags["lake job"] == lags["checkpoint"]


@pytest.mark.parametrize(
    ("lags", "stage"),
    [
        ({"pulled": 500, "sorted": 501, "cut": 502, "checkpoint": 503}, "source"),
        ({"sorted": 500, "cut": 501, "checkpoint": 503}, "sorter"),
        ({"cut": 500, "checkpoint": 500}, "lake job"),
        ({"checkpoint": 500}, "checkpoint"),
    ],
)
def test_the_first_stage_that_is_behind_the_one_before_it_is_blamed(lags, stage):
    [(level, text)] = said(changefeed(lags))
    assert level == Level.WARNING
    assert text.startswith(f"changefeed orders, {stage}: 8 min behind")


LAGS = st.dictionaries(
    st.sampled_from(["pulled", "sorted", "cut", "checkpoint"]), st.floats(0, 1e6), max_size=4
)


@given(LAGS)
def test_at_most_one_stage_is_blamed_and_none_where_all_are_near(lags):
    found = said(changefeed(lags))
    assert len(found) <= 1
    if all(lag <= 60 for lag in lags.values()):
        assert found == []


def test_a_reader_that_holds_much_is_named_with_what_ends_it():
    near, far = (
        pb.Reader(name="near", checkpoint_ts=at(5)),
        pb.Reader(name="etl", checkpoint_ts=at(7300)),
    )
    [(level, text)] = said(changefeed(readers=[near, far]))
    assert level is Level.WARNING
    assert "changefeed orders, reader etl: it is 2 h behind" in text
    assert "changefeed remove-reader -c orders --reader etl" in text


def test_one_that_no_capture_runs_is_a_problem_whatever_its_stages():
    document = changefeed({"pulled": 500}) | {"maintainer": ""}
    [(level, text)] = said(document)
    assert (level, "no capture runs it" in text) == (Level.PROBLEM, True)


def test_a_failed_one_is_a_problem_with_its_error_and_the_way_on():
    error = pb.RunningError(code="ErrMySQLLogPurged", message="the log is gone")
    document = changefeed(state=pb.CHANGEFEED_STATE_FAILED, error=error)
    [(level, text)] = said(document)
    assert level == Level.PROBLEM
    assert "[TM:ErrMySQLLogPurged] the log is gone" in text
    assert "tidemark cli changefeed resume -c orders --overwrite-checkpoint-ts now" in text
    assert "mend the cause" not in text
    error = pb.RunningError(code="ErrTargetFull", message="no space")
    document = changefeed(state=pb.CHANGEFEED_STATE_FAILED, error=error)
    [(level, text)] = said(document)
    assert "mend the cause, then `tidemark cli changefeed resume -c orders`" in text


def test_a_changefeed_that_nobody_reads_is_said_once():
    document = changefeed({"checkpoint": 500}) | {"warnings": [f"{NOBODY_READS}: no lake job"]}
    assert said(document) == [(Level.WARNING, f"changefeed orders: {NOBODY_READS}: no lake job → ")]


def test_the_error_of_a_lake_job_is_said_once():
    error = pb.RunningError(code="ErrSparkLost", message="the application ended", time="1")
    document = changefeed(
        {"checkpoint": 500},
        state=pb.CHANGEFEED_STATE_WARNING,
        error=error,
        lake_job=pb.LakeJob(
            state="retrying",
            error=pb.RunningError(code=error.code, message=error.message, time="2"),
        ),
    )
    texts = [text for _, text in said(document)]
    assert [text.count("the application ended") for text in texts] == [1, 0]
    assert "it failed and is started again" in texts[1]


@pytest.mark.parametrize(
    ("members", "level", "part"),
    [
        ({"state": pb.CHANGEFEED_STATE_STOPPED}, Level.NOTE, "it is paused at"),
        ({"state": pb.CHANGEFEED_STATE_FINISHED}, Level.NOTE, "it is finished"),
        (
            {"holding": pb.Holding(disk_error="No space left", waiting=3)},
            Level.PROBLEM,
            "3 writers",
        ),
        ({"lake_job": pb.LakeJob(state="silent")}, Level.WARNING, "it has not reported since"),
        ({"lake_job": pb.LakeJob(state="retrying")}, Level.WARNING, "started again"),
        (
            {"lake_job": pb.LakeJob(state="failed", error=pb.RunningError(code="E", message="m"))},
            Level.PROBLEM,
            "it has given up: [TM:E] m",
        ),
        ({"ignored_tables": ["a.b"]}, Level.NOTE, "left out: a.b"),
        ({"warnings": ["a clock jumped"]}, Level.WARNING, "a clock jumped"),
        (
            {"tables": [pb.TableStatus(name="a.b", state=pb.TABLE_STATE_REPAIRING)]},
            Level.WARNING,
            "rows of a.b were damaged",
        ),
        (
            {"rereads": pb.Rereads(since_ts=at(9), tables=[pb.Reread(table="a.b")])},
            Level.NOTE,
            "until a.b has been read again",
        ),
        (
            {"filter_update": pb.FilterUpdate(ts=at(9), before=["a.*"])},
            Level.NOTE,
            "an update waits",
        ),
        (
            {"skipped": [pb.SkippedRange(start_ts=at(9), end_ts=at(8))]},
            Level.NOTE,
            "verify -c orders --repair",
        ),
    ],
)
def test_what_is_odd_about_a_changefeed_is_said_with_its_level(members, level, part):
    assert [(each, part in text) for each, text in said(changefeed(**members))] == [(level, True)]


def test_a_dump_is_told_while_it_goes_on_and_a_problem_where_a_table_failed():
    dump = {"state": "running", "progress_percent": 40.0, "eta_seconds": 90, "waits_for": "",
            "tables_done": 1, "tables_known": 3, "status": []}  # fmt: skip
    [(level, text)] = said(changefeed(), dump)
    assert (level, "1 of 3 tables are copied, 40 %, 1 min to go" in text) == (Level.NOTE, True)
    failed = {"state": "failed", "table": "a.b", "error": "ErrX: no"}
    [(level, text)] = said(changefeed(), dump | {"state": "failed", "status": [failed]})
    assert (level, "a.b: ErrX: no" in text, "dumpresume -c orders" in text) == (
        Level.PROBLEM,
        True,
        True,
    )


def test_captures_coordinators_and_gc_are_looked_at_too():
    owner = {"is-owner": True, "version": "1"}
    assert list(diagnose_captures([owner])) == []
    [finding] = diagnose_captures([owner | {"is-owner": False}])
    assert finding.level == Level.PROBLEM
    [finding] = diagnose_captures([owner, {"is-owner": False, "version": "2"}])
    assert "1, 2" in finding.what
    member = {"name": "c1", "health": False, "client_urls": ["http://a:1"]}
    assert ["http://a:1" in each.what for each in diagnose_members([member])] == [True]
    link = {"holds_back_seconds": 7200, "reason": "it is paused", "commands": ["tidemark x"]}
    blocker = {"id": "ticdc-orders", "blocks": True, "chain": [link]}
    [finding] = diagnose_gc({"blockers": [blocker], "problems": []})
    assert (finding.what, finding.do) == (
        "ticdc-orders alone keeps 2 h of history: it is paused",
        "`tidemark x`",
    )
    assert list(diagnose_gc({"blockers": [blocker | {"blocks": False}], "problems": []})) == []
