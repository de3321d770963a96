"""`format("tidemark")` in a real Spark, against the oracle server."""

import dataclasses

import pytest
from pyspark.errors import PySparkException
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.options import parse
from pyspark_tidemark.stream import TableStreamReader

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
    return sorted((unzoned(row) for row in rows), key=lambda fields: (fields["_commit_ts"], fields["_seq"]))


def test_a_batch_read_gives_each_type_and_just_the_range(spark, captures, upstream):
    rows = read(spark, captures, startTs="200", endTs="700").collect()
    assert plain(rows) == plain(upstream.kinds.between(200, 700))


def test_a_stream_gives_every_row_once_and_never_splits_a_transaction(spark, captures, upstream, tmp_path):
    batches = []
    query = (
        spark.readStream.format("tidemark")
        .options(endpoint=captures.uri, changefeed="bank", table="bank.kinds", maxRowsPerTrigger="60")
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
    assert captures.acks, "Spark's commits reach the changefeed, one batch late"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tabel": "bank.kinds"}, r"\[TM:ErrOptionInvalid\] unknown option 'tabel', did you mean 'table'\?"),
        ({"table": "bank.none"}, r"\[TM:ErrTableNotFound\] .* it has: bank.accounts, bank.kinds"),
        ({"changefeed": "none"}, r"\[TM:ErrChangefeedNotFound\]"),
    ],
)
def test_a_mistake_is_told_in_our_words(spark, captures, options, told):
    with pytest.raises(PySparkException, match=told):
        read(spark, captures, **options)


def test_before_spark_4_2_a_reader_without_a_position_sets_no_limit(captures):
    """Counted from the checkpoint, a limited offset could lie before what Spark has already committed."""
    options = parse({"endpoint": captures.uri, "changefeed": "bank", "table": "bank.kinds", "maxRowsPerTrigger": "5"})
    restarted = TableStreamReader(options)
    assert restarted.latestOffset() == {"ts": captures.resolved_ts}
    fresh = TableStreamReader(options)
    first = fresh.latestOffset() if fresh.initialOffset() == {"ts": 0} else None
    assert first is not None
    assert first["ts"] < captures.resolved_ts
    capped = TableStreamReader(dataclasses.replace(options, end_ts=40, max_rows=None))
    assert capped.latestOffset({"ts": 0}) == {"ts": 40}
    assert capped.latestOffset({"ts": 40}) == {"ts": 40}


def test_tls_files_that_are_missing_are_told(captures):
    given = {"endpoint": captures.uri, "changefeed": "bank", "cuts": "true", "caPath": "/nowhere/ca.pem"}
    with pytest.raises(SourceError, match=r"\[TM:ErrCredentials\] .*/nowhere/ca.pem"):
        TableStreamReader(parse(given)).initialOffset()
