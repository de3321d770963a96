"""Rows that a dump brings: the lake may have their keys already, by the log or by a dump before,
or may not.
"""

import pytest
from pyspark_tidemark.lake.reading import as_of_cut

from tests.integration.lake import test_delta_modes, test_iceberg
from tests.integration.spark.upstream import Upstream

pytestmark = pytest.mark.timeout(300)
CUTS = (1000, 1010)


@pytest.fixture
def upstream() -> Upstream:
    """One whose accounts are all told once more at the end, and others with them."""
    upstream = Upstream(7, transactions=100)
    living, envelope = (
        upstream.accounts.state(1000),
        {"_op": "update", "_commit_ts": 1010, "_start_ts": 1009},
    )
    chunk = [row | {"_commit_ts": 1010} for row in living.values()]
    chunk += [
        dict.fromkeys(chunk[0], 0) | {"id": number, "owner": "new", "_commit_ts": 1010}
        for number in (900, 901)
    ]
    upstream.accounts.rows += [row | envelope | {"_seq": seq} for seq, row in enumerate(chunk)]
    upstream.end_ts = 1010
    return upstream


def test_delta_has_each_key_in_one_current_version(spark, changefeed, captures, upstream, tmp_path):
    test_delta_modes.keep(spark, changefeed, captures, tmp_path, "scd2", CUTS)
    rows = [
        row.asDict() for row in as_of_cut(spark, f"delta://{tmp_path}")["bank.accounts"].collect()
    ]
    current = [row for row in rows if row["is_current"]]
    held = upstream.accounts.state(1010)
    assert {(row["id"], row["balance"]) for row in current} == {
        (row["id"], row["balance"]) for row in held.values()
    }
    assert len(current) == len(held)


def test_iceberg_has_each_key_once(spark, changefeed, captures, upstream, tmp_path):
    test_iceberg.keep(spark, changefeed, captures, tmp_path, CUTS)
    found = test_iceberg.balances(test_iceberg.read_by_iceberg(spark, tmp_path, "bank.accounts"))
    assert found == test_iceberg.held(upstream, 1010)
