"""A row whose key is null would be found by nobody again: executors stop at it, too,
before a table has it.
"""

import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake import changes
from pyspark_tidemark.lake.delta import modes

from tests.integration.lake import test_delta_modes, test_iceberg

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(
    ("target", "mode"), [("delta", "upsert"), ("delta", "scd2"), ("iceberg", "upsert")]
)
def test_a_row_with_a_null_in_its_key_stops_the_job_before_the_table_has_it(
    spark, changefeed, captures, upstream, tmp_path, monkeypatch, target, mode
):
    def keep(*ends):
        if target == "delta":
            test_delta_modes.keep(spark, changefeed, captures, tmp_path, mode, ends)
        else:
            test_iceberg.keep(spark, changefeed, captures, tmp_path, ends)

    def held():
        if target == "iceberg":
            return test_iceberg.read_by_iceberg(spark, tmp_path, "bank.kinds")
        return spark.read.format("delta").load(f"{tmp_path}/bank/kinds").collect()

    rows = upstream.kinds.between(0, 200)
    rows[-1]["k2"] = None
    monkeypatch.setattr(upstream.kinds, "rows", rows)
    keep(100)
    before = held()
    for most in ("DRIVER_READ_MAX_BYTES", "ARROW_READ_MAX_BYTES"):
        monkeypatch.setattr(changes, most, -1)
    monkeypatch.setattr(modes, "MOST_SEARCHED_BYTES", -1)
    with pytest.raises(
        SourceError, match=r"bank\.kinds: a row's key column k2 is null, .*--zero-dates"
    ) as found:
        keep(200)
    assert (found.value.code, found.value.retryable) == ("ErrKeyValueUnsupported", False)
    assert held() == before
