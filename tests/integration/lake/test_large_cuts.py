"""Cuts with more changes of a table than are few, but not more than the driver reads: by MERGE,
and as a changelog.
"""

import pyarrow as pa
import pytest
from pyspark_tidemark.lake.changes import FEW_ROWS_MAX
from pyspark_tidemark.lake.checksum import checksum, hexadecimal
from pyspark_tidemark.lake.reading import as_of_cut

from tests.integration.lake.test_delta_modes import keep
from tests.integration.spark.upstream import Upstream

pytestmark = pytest.mark.timeout(400)
KEYS = FEW_ROWS_MAX + 1_000
CHANGED, GONE, AGAIN, NEW = 11_000, 8_000, 500, 2_000


def changes_of_two_cuts():
    """First many inserts; then updates, deletes, keys deleted and inserted again,
    and new ones that partly go again.
    """
    ops = [[(key, "insert") for key in range(KEYS)]]
    ops.append([(key, "update") for key in range(CHANGED)])
    ops.append([(key, "delete") for key in range(CHANGED - AGAIN, CHANGED + GONE)])
    ops.append([(key, "insert") for key in range(CHANGED - AGAIN, CHANGED)])
    ops.append([(key, "insert") for key in range(KEYS, KEYS + NEW)])
    ops.append([(key, "delete") for key in range(KEYS, KEYS + AGAIN)])
    return ops


@pytest.fixture
def upstream():
    upstream = Upstream(1, transactions=0)
    for number, ops in enumerate(changes_of_two_cuts(), 1):
        for seq, (key, op) in enumerate(ops):
            envelope = {
                "_op": op,
                "_commit_ts": 10 * number,
                "_start_ts": 10 * number - 5,
                "_seq": seq,
            }
            upstream.accounts.rows.append(envelope | Upstream._account(key, number))
        upstream.end_ts = 10 * number
    return upstream


@pytest.mark.parametrize("foreign", [False, True], ids=["masked", "merged"])
def test_a_cut_that_the_driver_reads_equals_the_replay(
    spark, changefeed, captures, upstream, tmp_path, foreign
):
    """A table with a property that is not ours is written by Delta alone."""
    ends = (10, upstream.end_ts)
    path = f"{tmp_path}/bank/accounts"
    assert len(upstream.accounts.between(*ends)) > FEW_ROWS_MAX
    keep(spark, changefeed, captures, tmp_path, "upsert", ends[:1])
    if foreign:
        spark.sql(
            f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('delta.checkpoint.writeStatsAsJson' = "
            "'true')"
        )
    _, _, cuts = keep(spark, changefeed, captures, tmp_path, "upsert", ends[1:])
    rows = [
        row.asDict() for row in as_of_cut(spark, f"delta://{tmp_path}")["bank.accounts"].collect()
    ]
    assert len(rows) == len(upstream.accounts.state(upstream.end_ts)) == KEYS - GONE + NEW - AGAIN
    assert {(row["id"],): row for row in rows} == upstream.accounts.state(upstream.end_ts)

    history = spark.sql(f"DESCRIBE HISTORY delta.`{path}`").collect()
    assert [row.operation for row in sorted(history, key=lambda row: row.version)] == [
        "CUT",
        *(["SET TBLPROPERTIES", "MERGE"] if foreign else ["CUT"]),
    ]
    before = spark.read.format("delta").option("versionAsOf", 0).load(path)
    assert before.count() == KEYS
    told = {
        cut.end_ts: item for cut in cuts for item in cut.tables if item.table == "bank.accounts"
    }
    for start_ts, end_ts in ((0, 10), ends):
        changes = pa.Table.from_pylist(
            upstream.accounts.between(start_ts, end_ts), schema=upstream.accounts.schema
        )
        assert (told[end_ts].rows, told[end_ts].checksum) == (
            len(changes),
            hexadecimal(checksum([changes])[1]),
        )
    assert len(captures.reads) == len(ends), "each cut is read once"
