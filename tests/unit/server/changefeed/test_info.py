import json
from dataclasses import astuple, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.capture.errors import ChangefeedIdInvalidError, SinkUriError
from server.changefeed import keys
from server.changefeed.info import (
    ChangefeedInfo,
    FilterUpdate,
    RunningError,
    State,
    check_id,
    check_same_sink,
    check_sink_uri,
    checkpoint_of,
    keeps_changes,
    read_info,
    status_json,
)
from server.changefeed.salt import Salt
from server.changefeed.table import ShardOf, TableRecord
from sink.masking import Mask
from storage.model.errors import CorruptError

GOLDEN = Path(__file__).parents[3] / "golden" / "changefeed"
TEXT = st.text()
TS = st.integers(0, (1 << 64) - 1)


@given(
    st.builds(
        ChangefeedInfo,
        id=TEXT,
        sink_uri=TEXT,
        source_uri=TEXT,
        rules=st.lists(TEXT).map(tuple),
        from_snapshot=st.booleans(),
        ignore_ineligible=st.booleans(),
        ignored=st.lists(TEXT).map(tuple),
        start_ts=TS,
        target_ts=TS,
        create_time=TEXT,
        tables=st.lists(st.builds(TableRecord, TEXT, st.dictionaries(TEXT, st.integers()))).map(
            tuple
        ),
        state=st.sampled_from(State),
        error=st.none() | st.builds(RunningError, TEXT, TEXT, TEXT),
        filter_update=st.none()
        | st.builds(
            FilterUpdate,
            st.lists(st.lists(TEXT).map(tuple)).map(tuple),
            TS,
            st.booleans(),
            st.booleans(),
        ),
        creator_version=TEXT,
    )
)
def test_a_record_comes_back_as_it_was_written(info):
    assert ChangefeedInfo.from_json(info.to_json()) == info


@given(TS)
def test_a_checkpoint_comes_back_as_it_was_written(ts):
    assert checkpoint_of(status_json(ts)) == ts


@pytest.mark.parametrize("value", [b"", b"{}", b"[]", b'{"tables":1}'])
def test_a_damaged_record_is_corrupt(value):
    with pytest.raises(CorruptError):
        ChangefeedInfo.from_json(value)
    with pytest.raises(CorruptError):
        checkpoint_of(value)


@pytest.mark.parametrize("changefeed", ["a", "bank-to-lake", "A1-b2", "x" * 128])
def test_ids_of_letters_digits_and_single_hyphens_are_taken(changefeed):
    check_id(changefeed)


@pytest.mark.parametrize(
    "changefeed", ["", "-a", "a-", "a--b", "a/b", "../a", "a b", "ä", "x" * 129, "a\n"]
)
def test_other_ids_are_refused(changefeed):
    with pytest.raises(ChangefeedIdInvalidError):
        check_id(changefeed)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "delta:///lake",
            "parquet:///var/lib/tidemark/lake",
            "flight://",
            "none:///",
            "blackhole://",
            "flight:",
        ),
        *("delta+hdfs://nn:8020/lake", "parquet+s3a://bucket/lake", "iceberg+viewfs://lake/x"),
        *(
            "postgresql://me@db/lake?password-file=/run/pw",
            "mysql://me@[::1]:3307/lake?password-env=TIDEMARK_SECRET_A",
        ),
    ],
)
def test_sinks_that_a_changefeed_may_have(text):
    check_sink_uri(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/lake", "delta:///lake"),
        ("http://169.254.169.254/latest", "flight://"),
        ("jdbc:x", "postgresql://user@host/db or mysql://"),
        ("jdbc:mysql://u:pw-1@h/d", "mysql://"),
        ("https://broker/topic", "flight://"),
        ("detla:///lake", "the nearest is delta:///path"),
        ("postgres://me@h/d", "the nearest is postgresql://"),
        ("file:///etc/x", "the nearest is delta:///path"),
        ("s3a://bucket/lake", "delta+s3a://bucket/path"),
        ("delta://relative/lake", "delta:///relative/lake"),
        ("delta:lake", "needs its whole path"),
        ("delta:///../../etc", "without"),
        ("delta:///lake/../etc", "without"),
        ("delta:///lake/%2e%2e/etc", "without"),
        ("delta:///lake/./x", "without"),
        ("delta:///etc/cron.d", "/etc/cron.d belongs to the system"),
        ("delta:////etc//cron.d/", "/etc/cron.d belongs to the system"),
        ("parquet:///var/spool/cron", "belongs to the system"),
        ("iceberg:///", "belongs to the system"),
        ("delta:///proc/self/cwd/lake", "belongs to the system"),
        ("delta:///lake?mod=append", "did you mean mode?"),
        ("delta:///lake#x", "no fragment"),
        ("delta:///lake\n", "no control characters"),
        ("delta:///la\0ke", "no control characters"),
        (" delta:///lake", "no blanks at its ends"),
        ("delta:///" + "x" * 5000, "at most 2048"),
        ("mysql://me@h/d?password-env=PATH", "TIDEMARK_SECRET_"),
        ("mysql://me@h/d?password-env=TIDEMARK_SECRET_A&password-file=/x", "give one of them"),
        ("mysql://me@[::1/d", "cannot be read"),
        ("mysql://me@h:x/d", "cannot be read"),
    ],
)
def test_what_is_no_sink_is_refused_with_the_nearest_that_is(text, said):
    with pytest.raises(SinkUriError) as caught:
        check_sink_uri(text)
    assert said in str(caught.value)
    assert "pw-1" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://u:geheim@H/d",
        "mysql://u:geheim@H/d",
        "delta:///lake?password=geheim",
        "postgresql://H/d?user=u&password=geheim",
        "delta+s3a://key:geheim@bucket/lake",
    ],
)
def test_a_sink_uri_with_a_secret_is_refused_and_an_old_one_masked(text):
    with pytest.raises(SinkUriError) as caught:
        check_sink_uri(text)
    assert "password-file=" in str(caught.value) or "spark.hadoop.fs" in str(caught.value)
    old = ChangefeedInfo(id="old", sink_uri=text, start_ts=1, target_ts=0, create_time="")
    shown = repr(old) + old.shown_sink_uri + old.secret_advice + str(caught.value)
    assert "geheim" not in shown
    assert "***" in old.shown_sink_uri
    assert "changefeed update -c old" in old.secret_advice
    assert ChangefeedInfo.from_json(old.to_json()) == old


def test_an_update_stays_at_its_place():
    check_same_sink("postgresql://u:geheim@h/d", "postgresql://other@H:5432/d?password-file=/x")
    for text in (
        "postgresql://u@h2/d",
        "postgresql://u@h/d2",
        "mysql://u@h/d",
        "postgresql://u@h:1/d",
    ):
        with pytest.raises(SinkUriError, match="create another changefeed") as caught:
            check_same_sink("postgresql://u:geheim@h/d", text)
        assert "geheim" not in str(caught.value)


def test_lost_history_does_not_hold_gc_back_any_more():
    info = ChangefeedInfo(id="a", sink_uri="x:", start_ts=1, target_ts=0, create_time="", tables=())
    assert info.moved_to(State.STOPPED).blocks_gc
    assert info.moved_to(State.FAILED, RunningError("ErrOther", "", "")).blocks_gc
    assert not info.moved_to(State.FAILED, RunningError("ErrSnapshotLostByGC", "", "")).blocks_gc


def test_records_of_version_0_1_0_stay_readable_and_their_tables_become_the_first_schema_change():
    status = (GOLDEN / "status.json").read_bytes().strip()
    assert status_json(checkpoint_of(status)) == status
    old = ChangefeedInfo.from_json((GOLDEN / "info.json").read_bytes())
    assert (old.source_uri, old.rules, old.state, [table.name for table in old.tables]) == (
        "",
        (),
        State.WARNING,
        ["bank.accounts"],
    )
    moved = old.without_tables()
    assert (moved.tables, moved.rules, moved.from_snapshot) == ((), ('"bank"."accounts"',), False)
    assert (moved.start_ts, moved.error, moved.creator_version) == (
        old.start_ts,
        old.error,
        "0.2.0",
    )


def test_records_are_written_as_ever():
    info = (GOLDEN / "info-0.2.0.json").read_bytes().strip()
    assert ChangefeedInfo.from_json(info).to_json() == info
    selecting = replace(ChangefeedInfo.from_json(info), columns=("shop.*=id",))
    assert b'"columns":["shop.*=id"],' in selecting.to_json()
    assert ChangefeedInfo.from_json(selecting.to_json()) == selecting


def test_every_member_is_written_as_ever() -> None:
    info = (GOLDEN / "info-all-members.json").read_bytes().strip()
    read = ChangefeedInfo.from_json(info)
    assert read.to_json() == info
    plain = ChangefeedInfo(id="", sink_uri="", start_ts=0, target_ts=0, create_time="")
    members = {member.name for member in fields(ChangefeedInfo)} - {"tables"}
    unset = {name for name in members if getattr(read, name) == getattr(plain, name)}
    assert unset == {"creator_version"}, "a new member belongs into the golden file"
    assert all(astuple(read.event_filters[0]))


def test_what_is_ours_in_a_tables_document_is_read_and_written_as_ever() -> None:
    document = json.loads((GOLDEN / "table_info.json").read_bytes())
    routed = TableRecord("shop_1", document["routed"])
    merged = TableRecord("shop_1", document["merged"])
    shard = ShardOf("shop", "orders", "_shard")
    assert (routed.target, routed.shard, merged.shard) == (("lake", "orders"), None, shard)
    assert routed.masked == {"email": "mask.hash.SHA-256"}
    assert (routed.selected, routed.renamed) == (["id", "email"], {"mail": "email"})
    assert routed.zero_dates == "text"
    assert routed.ignored is not None
    assert json.loads(routed.table_info_json) == document["routed"]
    assert routed.whole.merged(shard).table_info == document["merged"]
    again = routed.whole.selecting(["id", "email"], {"mail": "email"}).showing("text")
    masks = {"email": Mask.parse("mask.hash.SHA-256", default="none")}
    salt = Salt("/etc/tidemark/salt", "0123456789abcdef")
    again = again.masking(masks, salt).ignoring(routed.ignored)
    assert again.routed(("lake", "orders")).table_info == document["routed"]


@pytest.mark.parametrize(
    ("target_ts", "update", "stop_ts"),
    [
        (0, None, 0),
        (30, None, 30),
        (0, FilterUpdate((("s.*",),), 20), 20),
        (30, FilterUpdate((("s.*",),), 20), 20),
        (10, FilterUpdate((("s.*",),), 20), 10),
        (30, FilterUpdate((("s.*",),), 20, is_planned=False), 30),
    ],
)
def test_a_changefeed_stops_where_a_new_filter_comes_in_force(target_ts, update, stop_ts):
    info = ChangefeedInfo.from_json((GOLDEN / "info-0.2.0.json").read_bytes())
    assert replace(info, target_ts=target_ts, filter_update=update).stop_ts == stop_ts
    gone_on = replace(info, filter_update=update).continuing_at(50, 40, "now")
    assert gone_on.filter_update is None, "it is in force there"


@pytest.mark.parametrize(
    ("sink_uri", "answer"),
    [
        ("parquet:///lake", True),
        ("delta:///lake?mode=append", True),
        ("flight://", True),
        ("delta:///lake", False),
        ("iceberg+catalog://prod?compact-every=1", False),
        ("postgresql://me@db/lake?mode=scd2", False),
    ],
)
def test_changelogs_are_told_from_targets_of_current_rows(sink_uri, answer):
    assert keeps_changes(sink_uri) is answer


def test_a_record_of_a_later_version_is_named_with_what_to_do() -> None:
    info = ChangefeedInfo(
        id="orders", sink_uri="delta:///lake", start_ts=5, target_ts=0, create_time=""
    )
    document = json.loads(info.to_json())
    later = json.dumps(document | {"of a later version": 1}).encode()
    with pytest.raises(CorruptError, match=r"'orders'.*A later version may have written it"):
        read_info(keys.info("orders"), later)


def test_a_record_that_is_nested_beyond_reading_is_corrupt() -> None:
    with pytest.raises(CorruptError):
        read_info(keys.info("orders"), b"[" * 100_000)
    with pytest.raises(CorruptError):
        checkpoint_of(b"[" * 100_000)
