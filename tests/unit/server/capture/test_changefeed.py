from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.capture.changefeed import (
    ChangefeedInfo,
    RunningError,
    State,
    TableRecord,
    check_id,
    check_sink_uri,
    checkpoint_of,
    status_json,
)
from server.capture.errors import ChangefeedIdInvalidError, SinkUriError
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
        tables=st.lists(st.builds(TableRecord, TEXT, st.dictionaries(TEXT, st.integers()))).map(tuple),
        state=st.sampled_from(State),
        error=st.none() | st.builds(RunningError, TEXT, TEXT, TEXT),
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


@pytest.mark.parametrize("changefeed", ["", "-a", "a-", "a--b", "a/b", "../a", "a b", "ä", "x" * 129, "a\n"])
def test_other_ids_are_refused(changefeed):
    with pytest.raises(ChangefeedIdInvalidError):
        check_id(changefeed)


def test_a_sink_uri_needs_a_scheme():
    check_sink_uri("delta:///lake?mode=append")
    with pytest.raises(SinkUriError):
        check_sink_uri("/lake")


@pytest.mark.parametrize("text", ["delta+hdfs://nn:8020/lake", "parquet+s3a://bucket/lake", "iceberg+viewfs:///lake"])
def test_a_sink_may_lie_on_another_file_system(text):
    check_sink_uri(text)


@pytest.mark.parametrize(
    "text", ["delta+s3://b/lake", "iceberg+s3a://b/lake", "delta+s3a://key:secret@b/lake", "a+b:c"]
)
def test_a_sink_that_no_lake_job_could_keep_is_refused_and_no_secret_repeated(text):
    with pytest.raises(SinkUriError, match=r"FORMAT\+SCHEME") as caught:
        check_sink_uri(text)
    assert "secret" not in str(caught.value)


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
    assert (moved.start_ts, moved.error, moved.creator_version) == (old.start_ts, old.error, "0.2.0")


def test_records_are_written_as_ever():
    info = (GOLDEN / "info-0.2.0.json").read_bytes().strip()
    assert ChangefeedInfo.from_json(info).to_json() == info
    selecting = replace(ChangefeedInfo.from_json(info), columns=("shop.*=id",))
    assert b'"columns":["shop.*=id"],' in selecting.to_json()
    assert ChangefeedInfo.from_json(selecting.to_json()) == selecting
