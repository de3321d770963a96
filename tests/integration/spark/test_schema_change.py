"""A schema change under a running query: all before is committed, a named error,
and on from there with new columns.
"""

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException

from tests.integration.spark.captures import Captures
from tests.integration.spark.upstream import KINDS, Upstream

pytestmark = pytest.mark.timeout(300)
CHANGE_TS = 505


@pytest.fixture
def upstream():
    return Upstream(7, transactions=100)


@pytest.fixture
def altered(captures: Captures, upstream: Upstream):
    """`bank.kinds` gets a column at CHANGE_TS."""
    captures.ddls = [
        {"ts": CHANGE_TS, "query": "alter table kinds add more bigint", "tables": ["bank.kinds"]}
    ]
    upstream.kinds.later = [(CHANGE_TS, KINDS.append(pa.field("more", pa.int64())))]
    for row in upstream.kinds.between(CHANGE_TS, upstream.end_ts):
        row["more"] = row["_commit_ts"]
    return captures


def frame(spark, captures, *, stream, **options):
    reader = spark.readStream if stream else spark.read
    given = {
        "endpoint": captures.uri,
        "changefeed": "bank",
        "table": "bank.kinds",
        "maxRowsPerTrigger": "30",
    } | options
    return reader.format("tidemark").options(**({} if stream else {"startTs": "0"}) | given).load()


def run(spark, captures, checkpoint, found, **options):
    """The query, until it ends or fails; its rows go to `found`."""
    query = (
        frame(spark, captures, stream=True, **options)
        .writeStream.option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .foreachBatch(lambda rows, _: found.extend(rows.collect()))
        .start()
    )
    assert query.awaitTermination(120)


def commits(rows):
    return sorted((row["_commit_ts"], row["_seq"]) for row in rows)


@pytest.mark.parametrize("more", [{"startTs": "0"}, {"ack": "false", "schemaTs": str(CHANGE_TS)}])
def test_a_query_ends_at_the_change_and_goes_on_when_started_again(
    spark, altered, upstream, tmp_path, more
):
    found: list = []
    first = {name: value for name, value in more.items() if name != "schemaTs"}
    with pytest.raises(
        StreamingQueryException,
        match=r"\[TM:ErrSchemaChanged\] .* gets more bigint above 505 by: alter",
    ):
        run(spark, altered, tmp_path, found, **first)
    assert commits(found) == commits(upstream.kinds.between(0, CHANGE_TS))
    run(spark, altered, tmp_path, found, **more)
    assert commits(found) == commits(upstream.kinds.rows)
    assert {row.more for row in found if row._commit_ts > CHANGE_TS} == {
        row["more"] for row in upstream.kinds.between(CHANGE_TS, upstream.end_ts)
    }


def test_a_batch_has_one_set_of_columns(spark, altered, upstream):
    with pytest.raises(
        PySparkException,
        match=r"\[TM:ErrSchemaChanged\] .* \(endTs\) .* \(startTs\) by two queries",
    ):
        frame(spark, altered, stream=False).collect()
    before = frame(spark, altered, stream=False, endTs=str(CHANGE_TS)).collect()
    after = frame(spark, altered, stream=False, startTs=str(CHANGE_TS)).collect()
    assert commits(before + after) == commits(upstream.kinds.rows)
    assert "more" in after[0]


def test_a_truncated_table_is_told_once(spark, captures, upstream, tmp_path):
    captures.ddls = [
        {"ts": CHANGE_TS, "query": "truncate table kinds", "truncated": ["bank.kinds"]}
    ]
    found: list = []
    with pytest.raises(
        StreamingQueryException,
        match=r"\[TM:ErrTableTruncated\] table bank.kinds was emptied at 505",
    ):
        run(spark, captures, tmp_path, found)
    assert commits(found) == commits(upstream.kinds.between(0, CHANGE_TS))
    run(spark, captures, tmp_path, found)
    assert commits(found) == commits(upstream.kinds.rows)
