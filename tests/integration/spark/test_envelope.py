"""Many tables in one frame, and before-images, against the oracle server."""

import json

import pytest

pytestmark = pytest.mark.timeout(300)


def read(spark, captures, **options):
    given = {
        "endpoint": captures.uri,
        "changefeed": "bank",
        "envelope": "true",
        "startTs": "0",
    } | options
    return spark.read.format("tidemark").options(**given).load()


def test_a_pattern_reads_all_its_tables_in_one_frame(spark, captures, upstream):
    rows = read(spark, captures, tablePattern="bank.*").collect()
    found = {(row._table, row._commit_ts, row._seq, row._op) for row in rows}
    expected = {
        (table.name, row["_commit_ts"], row["_seq"], row["_op"])
        for table in upstream.tables.values()
        for row in table.rows
    }
    assert found == expected
    assert len(rows) == len(expected)


def test_json_text_reads_back_into_the_types_it_came_from(spark, captures, upstream):
    typed = spark.read.format("tidemark").options(
        endpoint=captures.uri, changefeed="bank", table="bank.kinds"
    )
    fields = [field for field in typed.load().schema if not field.name.startswith("_")]
    columns = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in fields)
    rows = read(spark, captures, table="bank.kinds")
    images = rows.selectExpr(
        f"from_json(coalesce(after, before), '{columns}') image", "_op", "key"
    ).collect()
    expected = upstream.kinds.rows
    found = sorted(
        (str(row.image.k2), row.image.k1, row.image.amount, row.image.at) for row in images
    )
    assert found == sorted(
        (str(row["k2"]), row["k1"], row["amount"], row["at"]) for row in expected
    )
    blobs = sorted(bytes(row.image.raw) for row in images if row.image.raw is not None)
    assert blobs == sorted(row["raw"] for row in expected if row["raw"] is not None)
    assert {tuple(json.loads(row.key)) for row in images} == {("k1", "k2")}


def test_a_schema_change_passes_through_a_running_envelope_as_a_row(
    spark, captures, upstream, tmp_path
):
    captures.ddls = [{"ts": 505, "query": "truncate table kinds", "truncated": ["bank.kinds"]}]
    batches = []
    query = (
        spark.readStream.format("tidemark")
        .options(
            endpoint=captures.uri,
            changefeed="bank",
            tablePattern="bank.kinds",
            envelope="true",
            startTs="0",
        )
        .load()
        .writeStream.option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .foreachBatch(lambda frame, _: batches.append(frame.collect()))
        .start()
    )
    assert query.awaitTermination(200)
    rows = [row for batch in batches for row in batch]
    assert len(rows) == len(upstream.kinds.rows) + 1
    [ddl] = [row for row in rows if row._op == "ddl"]
    assert (ddl._table, ddl._commit_ts) == ("bank.kinds", 505)
    assert json.loads(ddl.after) == {"query": "truncate table kinds", "truncated": True}
    assert {row._commit_ts > 505 for row in batches[0]} == {False}
    assert captures.acks[-1] >= 505
