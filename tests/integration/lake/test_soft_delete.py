"""Mode soft-delete over captures: rows that are deleted stay as they were, marked; everything else
is as in upsert. Any number of random histories, with DDL and deaths: `tests.fuzz.lakes --mode
soft-delete`.
"""

import functools

import pyarrow as pa
import pytest
from pyspark_tidemark.lake import changes
from pyspark_tidemark.lake.checksum import checksum
from pyspark_tidemark.lake.delta import inserted
from pyspark_tidemark.lake.iceberg import table_keys
from pyspark_tidemark.lake.keys import KeyIndex
from pyspark_tidemark.lake.manifest import read_cuts
from pyspark_tidemark.lake.reading import as_of_cut

from tests.integration.lake.test_job_errors import until
from tests.integration.lake.test_verify import Kept
from tests.integration.lake.test_ways_out import LakeJobLoop, Shop, running_services

pytestmark = pytest.mark.timeout(400)
CUTS = (300, 600, 1000)


def kept_rows(table, ts):
    """Each key's last change up to `ts`, as the lake must have it."""
    last = {}
    for row in table.between(0, ts):
        last[tuple(row[name] for name in table.key)] = row
    own = [name for name in table.schema.names if name not in ("_op", "_start_ts", "_seq")]
    return {
        key: {name: row[name] for name in own} | {"is_deleted": row["_op"] == "delete"}
        for key, row in last.items()
    }


@pytest.fixture(params=["driver", "tasks"])
def read_by(request, monkeypatch):
    """Who reads the changes; the driver's index of keys has room for none."""
    for keys in (inserted, table_keys):
        monkeypatch.setattr(keys, "KeyIndex", functools.partial(KeyIndex, 0))
    if request.param == "tasks":
        for most in ("DRIVER_READ_MAX_BYTES", "ARROW_READ_MAX_BYTES"):
            monkeypatch.setattr(changes, most, -1)


@pytest.mark.usefixtures("read_by")
@pytest.mark.parametrize("lake", ["delta", "iceberg"])
def test_deleted_rows_stay_as_they_were_and_are_marked(
    spark, changefeed, captures, tmp_path, caplog, lake
):
    upstream = captures.upstream
    kept = Kept(spark, changefeed, captures, lake, "soft-delete", str(tmp_path))
    kept.apply(*CUTS[:2])
    kept.apply(*CUTS[2:])
    accounts = upstream.accounts
    for ts in CUTS:
        found = as_of_cut(spark, f"{lake}://{tmp_path}", ts)["bank.accounts"].collect()
        by_key = {(row.id,): row.asDict() for row in found}
        assert len(by_key) == len(found)
        assert by_key == kept_rows(accounts, ts)
        live = {key for key, row in by_key.items() if not row["is_deleted"]}
        assert live == accounts.state(ts).keys() < by_key.keys()
    # The manifest has the sums of what the captures sent, and a key that is inserted after its
    # delete is nothing to warn of.
    cuts = read_cuts(kept.manifest)
    told = [item for cut in cuts for item in cut.tables if item.table == "bank.accounts"]
    table = pa.Table.from_pylist(accounts.rows, schema=accounts.schema)
    assert sum(int(item.checksum, 16) for item in told) % (1 << 64) == checksum([table])[1]
    assert not any(item.replaced for item in told)
    assert "in the table already" not in caplog.text


@pytest.fixture(scope="module")
def services(tmp_path_factory, postgres):
    with running_services(tmp_path_factory.mktemp("soft"), postgres.create("soft")) as running:
        yield running


def test_statements_of_mariadb_reach_a_lake_that_forgets_no_row(services):
    shop = Shop("soft", *services)

    shop.execute("INSERT INTO a VALUES (1, 10, 100), (2, 20, 200), (3, 30, 300)")
    shop.create("--dump")
    with LakeJobLoop(shop, "soft-delete"):
        until(shop.lake, [
            (1, 10, 100, False), (2, 20, 200, False), (3, 30, 300, False)])  # fmt: skip
        shop.execute(
            "DELETE FROM a WHERE id = 1",
            "UPDATE a SET v = 21, id = 5 WHERE id = 2",
            "INSERT INTO a VALUES (7, 7, 7)",
            "DELETE FROM a WHERE id = 7",
            "BEGIN",
            # Nobody outside of its transaction ever saw this one.
            "INSERT INTO a VALUES (8, 8, 8)",
            "DELETE FROM a WHERE id = 8",
            "COMMIT",
        )
        until(shop.lake, [
            (1, 10, 100, True), (2, 20, 200, True), (3, 30, 300, False), (5, 21, 200, False),
            (7, 7, 7, True)])  # fmt: skip
        shop.execute("INSERT INTO a VALUES (1, 11, 111)", "ALTER TABLE a ADD note TEXT DEFAULT 'n'")
        until(shop.lake, [
            (1, 11, 111, False, "n"), (2, 20, 200, True, "n"), (3, 30, 300, False, "n"),
            (5, 21, 200, False, "n"), (7, 7, 7, True, "n")])  # fmt: skip
        shop.execute("TRUNCATE a", "INSERT INTO a VALUES (3, 33, 333, 'again')")
        until(shop.lake, [
            (1, 11, 111, True, "n"), (2, 20, 200, True, "n"), (3, 33, 333, False, "again"),
            (5, 21, 200, True, "n"), (7, 7, 7, True, "n")])  # fmt: skip
        # The upstream's own column would be ours: the changefeed stops by name.
        shop.execute("ALTER TABLE b ADD is_deleted INT")
        assert "mode soft-delete adds the column is_deleted" in shop.fails_with(
            "ErrNameUnsupported"
        )
