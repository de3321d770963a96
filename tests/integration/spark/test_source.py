"""`format("tidemark")` in a real Spark, against the oracle server."""

from datetime import datetime

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Changefeed
from pyspark_tidemark.options import parse
from pyspark_tidemark.query_schema import spark_schema
from pyspark_tidemark.stream import CutStreamReader, RowStreamReader

from tests.integration.spark.captures import ROW_BYTES

pytestmark = pytest.mark.timeout(300)


def read(spark, captures, **options):
    given = {"endpoint": captures.uri, "changefeed": "bank", "table": "bank.kinds"} | options
    return spark.read.format("tidemark").options(**given).load()


def unzoned(row):
    """A row as Spark collects it: `seen` without its zone, binary as bytes."""
    fields = dict(row if isinstance(row, dict) else row.asDict())
    fields["seen"] = fields["seen"].replace(tzinfo=None)
    fields["raw"] = None if fields["raw"] is None else bytes(fields["raw"])
    return fields


def plain(rows):
    """Changes in commit order."""
    return sorted(
        (unzoned(row) for row in rows), key=lambda fields: (fields["_commit_ts"], fields["_seq"])
    )


def test_a_batch_read_gives_each_type_and_just_the_range(spark, captures, upstream):
    rows = read(spark, captures, startTs="200", endTs="700").collect()
    assert plain(rows) == plain(upstream.kinds.between(200, 700))


def wall_clock(ts):
    return datetime.fromtimestamp((ts >> 18) / 1000)  # noqa: DTZ006 - as Spark collects it


@pytest.mark.parametrize("form", [{}, {"envelope": "true"}], ids=["columns", "envelope"])
def test_the_time_of_a_commit_and_the_names_of_deltas_change_feed(spark, captures, upstream, form):
    given = {"startingVersion": "201", "endingVersion": "700", "commitTime": "true"} | form
    frame = read(spark, captures, **given)
    place = frame.columns.index("_commit_ts")
    assert frame.columns[place + 1] == "_commit_time"
    rows = frame.collect()
    assert len(rows) == len(upstream.kinds.between(200, 700))
    assert all(row._commit_time == wall_clock(row._commit_ts) for row in rows)


def test_a_stream_has_the_time_of_a_commit(spark, captures, upstream, tmp_path):
    rows = []
    given = {"endpoint": captures.uri, "changefeed": "bank", "table": "bank.kinds"}
    query = (
        spark.readStream.format("tidemark")
        .options(**given, commitTime="true")
        .load()
        .writeStream.option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .foreachBatch(lambda frame, _: rows.extend(frame.collect()))
        .start()
    )
    assert query.awaitTermination(200)
    assert len(rows) == len(upstream.kinds.rows)
    assert all(row._commit_time == wall_clock(row._commit_ts) for row in rows)


def test_a_stream_gives_every_row_once_and_never_splits_a_transaction(
    spark, captures, upstream, tmp_path
):
    batches = []
    query = (
        spark.readStream.format("tidemark")
        .options(
            endpoint=captures.uri, changefeed="bank", table="bank.kinds", maxRowsPerTrigger="60"
        )
        .load()
        .writeStream.option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .foreachBatch(lambda frame, _: batches.append(frame.collect()))
        .start()
    )
    assert query.awaitTermination(200)
    assert len(batches) > 2
    commits = [{row._commit_ts for row in batch} for batch in batches]
    assert sum(len(found) for found in commits) == len(set().union(*commits))
    assert plain([row for batch in batches for row in batch]) == plain(upstream.kinds.rows)
    assert captures.acks == sorted(captures.acks)
    assert (
        captures.acks[-1] == max(row._commit_ts for row in batches[-2])
        or captures.acks[-1] == captures.resolved_ts
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"tabel": "bank.kinds"},
            r"\[TM:ErrOptionInvalid\] unknown option 'tabel', did you mean 'table'\?",
        ),
        ({"table": "bank.none"}, r"\[TM:ErrTableNotFound\] .* it has: bank.accounts, bank.kinds"),
        ({"changefeed": "none"}, r"\[TM:ErrChangefeedNotFound\]"),
    ],
)
def test_a_mistake_is_told_in_our_words(spark, captures, options, told):
    with pytest.raises(PySparkException, match=told):
        read(spark, captures, **options)


def reader_of(captures, **options):
    parsed = parse(
        {"endpoint": captures.uri, "changefeed": "bank", "table": "bank.kinds"} | options
    )
    described = Changefeed(parsed).describe()
    return RowStreamReader(parsed, spark_schema(described.tables["bank.kinds"]))


def at(ts):
    return {"ts": ts, "changefeed": "bank"}


def test_before_spark_4_2_a_reader_without_a_position_sets_no_limit(captures):
    """Counted from the checkpoint, a limited offset could lie before what Spark has already
    committed.
    """
    restarted = reader_of(captures, maxRowsPerTrigger="5")
    assert restarted.latestOffset() == at(captures.resolved_ts)
    fresh = reader_of(captures, maxRowsPerTrigger="5")
    assert fresh.initialOffset() == at(0)
    assert fresh.latestOffset()["ts"] < captures.resolved_ts


def test_offsets_keep_to_the_end_to_bytes_and_to_their_changefeed(captures):
    capped = reader_of(captures, endTs="40")
    assert capped.latestOffset(at(0)) == at(40)
    assert capped.latestOffset(at(40)) == at(40)
    few = reader_of(captures, maxRowsPerTrigger="50", maxBytesPerTrigger=str(3 * ROW_BYTES))
    ends = [few.latestOffset(at(0))["ts"]]
    assert len(captures.upstream.kinds.between(0, ends[0])) <= 3, (
        "also where Spark limits rows only"
    )
    assert few.reportLatestOffset() == at(captures.resolved_ts)
    with pytest.raises(
        SourceError, match=r"\[TM:ErrCheckpointForeign\] .* belongs to changefeed 'other'"
    ):
        few.latestOffset({"ts": 0, "changefeed": "other"})
    with pytest.raises(SourceError, match=r"\[TM:ErrOffsetBehind\]"):
        few.partitions(at(40), at(30))


def test_what_spark_asks_on_from_is_acknowledged_without_waiting_for_its_commit(captures):
    reader = reader_of(captures)
    reader.latestOffset(at(100))
    assert captures.acks == [100]
    reader.commit(at(100))
    reader_of(captures, ack="false").latestOffset(at(200))
    assert captures.acks == [100]


@pytest.mark.parametrize(
    "options", [{}, {"table": "", "tablePattern": "bank.*", "envelope": "true"}]
)
def test_an_idle_reader_repeats_its_last_acknowledgement_now_and_then(
    captures, monkeypatch, options
):
    """A capture that died before it kept it never heard it again."""
    reader = reader_of(captures, **options)
    reader.latestOffset(at(100))
    told = len(captures.acks)
    reader.latestOffset(at(100))
    assert captures.acks == [100] * told, "not at each poll"
    monkeypatch.setattr("pyspark_tidemark.stream.ACK_AGAIN_S", 0.0)
    reader.latestOffset(at(200))
    reader.latestOffset(at(200))
    reader.commit(at(100))
    assert captures.acks == [100] * told + [200] * 2 * told


@pytest.mark.parametrize(
    "options", [{}, {"table": "", "tablePattern": "bank.*", "envelope": "true"}]
)
def test_a_query_ends_once_the_checkpoint_was_moved_back(captures, monkeypatch, options):
    """Its repeated acknowledgement moved the checkpoint forward again,
    and whoever began there missed rows silently.
    """
    monkeypatch.setattr("pyspark_tidemark.stream.ACK_AGAIN_S", 0.0)
    reader = reader_of(captures, **options)
    reader.latestOffset(at(300))
    captures.checkpoint_ts, captures.epoch = 100, 1  # resume --overwrite-checkpoint-ts 100
    for _ in range(2):
        with pytest.raises(SourceError, match=r"\[TM:ErrChangefeedMovedBack\]"):
            reader.latestOffset(at(300))
    with pytest.raises(SourceError, match=r"\[TM:ErrChangefeedMovedBack\]"):
        reader.commit(at(400))
    with pytest.raises(
        SourceError, match=r"MovedBack\] .* another checkpointLocation.*startTs=300"
    ):
        reader_of(captures, **options).latestOffset(at(300))
    assert captures.checkpoint_ts == 100

    fresh = reader_of(captures, **options)
    start = fresh.initialOffset()
    assert start == at(100) | {"epoch": 1}
    end = fresh.latestOffset(start)
    assert end == at(captures.resolved_ts) | {"epoch": 1}
    reader_of(captures, **options).latestOffset(end)
    assert captures.checkpoint_ts == captures.resolved_ts, "started again, it goes on"


def test_a_start_that_is_gone_is_told_at_once(captures):
    captures.resolve(500)
    for ts in (200, 300):
        reader_of(captures).latestOffset(at(ts))
    assert reader_of(captures, startTs="200").initialOffset() == at(200), (
        "the last cut can be read once more"
    )
    with pytest.raises(SourceError, match=r"\[TM:ErrRangeCleaned\] .* checkpoint, 300"):
        reader_of(captures, startTs="100").initialOffset()


def test_a_table_in_slices_read_by_any_number_of_tasks_is_the_table(spark, captures, upstream):
    captures.slice_rows = 9
    rows = len(upstream.kinds.between(200, 700))
    frame = read(spark, captures, startTs="200", endTs="700", sliceBytes=str(20 * ROW_BYTES))
    assert frame.rdd.getNumPartitions() > 2
    assert frame.rdd.getNumPartitions() < rows / 9, "small slices share a task"
    assert plain(frame.collect()) == plain(upstream.kinds.between(200, 700))


def test_a_capture_that_dies_in_the_middle_of_a_slice_is_read_on(captures, upstream):
    captures.die_after = 3
    reader = reader_of(captures)
    [partition] = reader.partitions(at(0), at(captures.resolved_ts))
    found = pa.Table.from_batches(reader.read(partition)).to_pylist()
    assert plain(found) == plain(upstream.kinds.rows)
    assert captures.die_after == 0


def test_a_token_is_sent_with_every_call_and_its_lack_is_told(spark, captures, upstream, tmp_path):
    captures.token = "s3cret"
    (tmp_path / "token").write_text("s3cret\n")
    assert read(spark, captures, tokenFile=str(tmp_path / "token"), startTs="0").count() == len(
        upstream.kinds.rows
    )
    with pytest.raises(PySparkException, match=r"\[TM:ErrUnauthenticated\]"):
        read(spark, captures)


def test_tls_files_that_are_missing_are_told(captures):
    given = {
        "endpoint": captures.uri,
        "changefeed": "bank",
        "cuts": "true",
        "caPath": "/nowhere/ca.pem",
    }
    with pytest.raises(SourceError, match=r"\[TM:ErrCredentials\] .*/nowhere/ca.pem"):
        CutStreamReader(parse(given)).initialOffset()
