"""Whatever a lake keeps (rows, changes, versions of rows),
verify sees the table as it was at a cut.
"""

import itertools

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark_tidemark.digest import RangeChecksums, Ranges
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.cut_record import CutRecord, TableCut
from pyspark_tidemark.sink_uri import SinkUri

from server.verify.lake.file_lake import LakeTable
from server.verify.lake.question import Question
from tests.integration.spark.upstream import ACCOUNTS, Upstream

pytestmark = pytest.mark.timeout(300)
COLUMNS = pa.schema([ACCOUNTS.field(name) for name in ("id", "owner", "balance", "updated_at")])
CUTS = (300, 600, 1000)


@pytest.fixture(scope="module")
def accounts():
    return Upstream(3, transactions=100).accounts


def versions(table):
    """What mode scd2 holds: each version of a row, with the time it was valid in."""
    rows, current = [], {}
    for change in table.rows:
        if change["id"] in current:
            current.pop(change["id"])["valid_to_ts"] = change["_commit_ts"]
        if change["_op"] != "delete":
            row = {name: change[name] for name in COLUMNS.names}
            current[change["id"]] = row | {
                "valid_from_ts": change["_commit_ts"],
                "valid_to_ts": None,
            }
            rows.append(current[change["id"]])
    schema = [("valid_from_ts", pa.int64()), ("valid_to_ts", pa.int64())]
    return pa.Table.from_pylist(rows, schema=pa.schema([*COLUMNS, *schema]))


def stored(spark, table, lake, mode, root):
    """A lake of the format in which all cuts are applied."""
    changes = pa.Table.from_pylist(table.rows, schema=ACCOUNTS)
    if lake == "delta":
        rows = versions(table) if mode == "scd2" else changes
        spark.createDataFrame(rows).write.format("delta").save(f"{root}/bank/accounts")
        return
    for start, end in itertools.pairwise((0, *CUTS)):
        directory = root / "bank" / "accounts" / f"cut={end}"
        directory.mkdir(parents=True)
        part = pa.Table.from_pylist(table.between(start, end), schema=ACCOUNTS)
        pq.write_table(part, directory / "part-00000.parquet")


def lake_table(root, lake, mode, cut, schema=COLUMNS):
    cuts = [
        CutRecord(
            "bank",
            0,
            end,
            0,
            "",
            (TableCut("bank.accounts", 1, 0 if lake == "delta" else end),),
            mode,
        )
        for end in CUTS
    ]
    asked = Question("bank.accounts", cut, 0, ("id",), schema, Ranges())
    return LakeTable(SinkUri.parse(f"{lake}://{root}"), "bank", tuple(cuts), asked)


def digested(batches):
    range_checksums = RangeChecksums(Ranges(4))
    for batch in batches:
        range_checksums.add(batch, ["id"])
    return range_checksums.to_bytes()


@pytest.mark.parametrize(
    ("lake", "mode"), [("parquet", "append"), ("delta", "append"), ("delta", "scd2")]
)
def test_the_table_is_seen_as_it_was_at_each_cut(spark, accounts, tmp_path, lake, mode):
    stored(spark, accounts, lake, mode, tmp_path)
    for cut in CUTS:
        table = lake_table(tmp_path, lake, mode, cut)
        rows = list(accounts.state(cut).values())
        expected = pa.RecordBatch.from_pylist(rows, schema=COLUMNS)
        assert digested(table.frame(spark).toArrow().cast(COLUMNS).to_batches()) == digested(
            [expected]
        )


def test_columns_that_the_lake_lacks_are_told(spark, accounts, tmp_path):
    stored(spark, accounts, "parquet", "append", tmp_path)
    schema = COLUMNS.append(pa.field("more", pa.int64()))
    table = lake_table(tmp_path, "parquet", "append", 600, schema)
    with pytest.raises(
        SourceError, match=r"\[TM:ErrVerifyColumns\] table bank.accounts has no column more"
    ):
        table.frame(spark)
