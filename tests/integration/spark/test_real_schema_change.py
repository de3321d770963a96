"""Schema changes of a real TiDB, through store, capture and Spark: restart by restart,
no row of it is lost.
"""

import asyncio
import contextlib
import json
import re

import pytest
from pyspark.errors import StreamingQueryException
from tidemarkpb.v1 import changefeed_pb2 as pb

from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient
from tests.integration.capture.processes import Reader
from tests.integration.spark.cluster import flight
from tests.integration.tidb.history import load, txns
from tests.unit.storage.tidb import vectors

pytestmark = [pytest.mark.timeout(400), vectors.needed]
TABLE = "vec.spk"


def last_step():
    """TABLE has seen all its schema changes."""
    next_table_ts = next(ts for ts, name, _ in vectors.history() if name == "vec.gencol")
    return [step for step in vectors.lines("steps") if step["ts_after"] < next_table_ts][-1]


@pytest.fixture(scope="module")
def history(cluster):
    """A changefeed over the history of TABLE; its start and its end."""

    async def loaded():
        async with PdClient.open(cluster.pd) as pd, KvClient.open(pd) as kv:
            await load(kv, (txn for txn in txns() if txn.commit_ts <= end_ts))

    start_ts = next(
        ts for ts, name, _ in vectors.history() if name == "vec.ncs"
    )  # the last of the first tables
    end_ts = last_step()["ts_after"]
    asyncio.run(loaded())
    create = pb.CreateChangefeedRequest(
        id="history", sink_uri="none:///", start_ts=start_ts, filter=[TABLE]
    )
    create.ignore_ineligible_table = True
    cluster.api("CreateChangefeed", create)
    Reader(cluster, "history").wait_resolved(end_ts)
    return start_ts, end_ts


def options(cluster, history, **more):
    given = {"endpoint": flight(cluster), "changefeed": "history", "ack": "false"}
    given |= {"startTs": str(history[0]), "endTs": str(history[1])}
    return given | more


def in_order(row):
    return row._commit_ts, row._seq


def rows_at_the_end():
    found = last_step()["rows_after"][TABLE]
    places = [found["columns"].index(name) for name in ("s", "v")]
    return {row[places[0]]: int(row[places[1]]) for row in found["rows"]}


def run(spark, checkpoint, found, **given):
    """A query until it ends; what it failed with, if it did."""
    query = (
        spark.readStream.format("tidemark")
        .options(**given)
        .load()
        .writeStream.option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .foreachBatch(lambda rows, _: found.extend(rows.collect()))
        .start()
    )
    with contextlib.suppress(StreamingQueryException):
        assert query.awaitTermination(300)
    return None if query.exception() is None else str(query.exception())


def test_a_query_is_started_again_at_each_change_of_its_columns(spark, cluster, history, tmp_path):
    found, told, schema_ts = [], [], history[0]
    while error := run(
        spark, tmp_path, found, **options(cluster, history, table=TABLE, schemaTs=str(schema_ts))
    ):
        told.append(
            re.search(
                r"\[TM:ErrSchemaChanged\] table vec.spk (.*) above (\d+) by: (.*?);", error
            ).groups()
        )
        schema_ts = told[-1][1]
    assert [change for change, _, _ in told] == [
        "gets extra int, gets nul string",
        "changes v from int to bigint",
        "gets ex2 string, loses extra",
        "loses nul",
    ]
    folded = {row.s: None if row._op == "delete" else row.v for row in sorted(found, key=in_order)}
    assert {key: v for key, v in folded.items() if v is not None} == rows_at_the_end()


def test_an_envelope_reads_the_whole_history_in_one_query(spark, cluster, history, tmp_path):
    found = []
    given = options(cluster, history, table=TABLE, envelope="true", beforeImage="true")
    assert run(spark, tmp_path, found, **given) is None
    rows = sorted(found, key=in_order)
    folded = {}
    for row in rows:
        if row._op != "ddl":
            is_told = (
                row._op == "update" and row.before is not None
            )  # not of rows that are read again
            assert not is_told or json.loads(row.before)["s"] == json.loads(row.key)["s"]
            folded[json.loads(row.key)["s"]] = (
                None if row.after is None else json.loads(row.after)["v"]
            )
    assert {key: v for key, v in folded.items() if v is not None} == rows_at_the_end()
    statements = [json.loads(row.after)["query"] for row in rows if row._op == "ddl"]
    assert [text.split()[3:5] for text in statements if "column" in text] == [
        ["add", "column"],
        ["modify", "column"],
        ["modify", "column"],
        ["change", "column"],
        ["drop", "column"],
    ]
