"""Iceberg tables of a REST catalog in S3: written and read by tasks, with keys from the catalog's
settings or lent for a table, while S3 refuses them, or is down.
"""

import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake import changes
from pyspark_tidemark.lake.iceberg import files as iceberg_files
from pyspark_tidemark.lake.iceberg.manifest import CatalogManifest, cuts_in_catalog
from pyspark_tidemark.lake.reading import as_of_cut

from tests.integration.lake.test_catalogs import CUTS, PARTITIONS, keep
from tests.integration.lake.test_iceberg import balances, held

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.parametrize("rest", ["s3"], indirect=True),
]
ACCOUNTS = "mysql.bank.accounts"


def shown(spark, root, ts):
    """What `as_of_cut` gives of the accounts."""
    rows = as_of_cut(spark, f"iceberg+{root}", ts, changefeed="bank")["bank.accounts"].collect()
    return balances([row.asDict() for row in rows])


def test_tasks_write_read_and_compact_tables(
    spark, changefeed, captures, upstream, rest, s3, root, monkeypatch
):
    for most in ("DRIVER_READ_MAX_BYTES", "ARROW_READ_MAX_BYTES"):
        monkeypatch.setattr(changes, most, -1)
    monkeypatch.setattr(iceberg_files, "SHARE_BYTES", 4096)
    target = keep(spark, changefeed, captures, root, CUTS[:2], partitions=PARTITIONS)
    assert balances(rest.rows(ACCOUNTS)) == held(upstream, CUTS[1])
    for ts in (150, 200):
        assert shown(spark, root, ts) == held(upstream, ts // 100 * 100)
    target._maintenance.rewrite("bank.accounts")
    assert balances(rest.rows(ACCOUNTS)) == held(upstream, CUTS[1])
    assert shown(spark, root, 150) == held(upstream, 100)
    keep(spark, changefeed, captures, root, CUTS[2:3], partitions=PARTITIONS)
    assert shown(spark, root, CUTS[2]) == held(upstream, CUTS[2])
    assert not [found for found in s3.names() if found.endswith("/")], "no objects for directories"

    rest.register_older(ACCOUNTS)
    with pytest.raises(SourceError, match=r"ErrTableRolledBack.*bank\.accounts"):
        keep(spark, changefeed, captures, root, CUTS[3:4], partitions=PARTITIONS)


def test_keys_that_the_catalog_lends_are_used_and_asked_for_again(
    spark, changefeed, captures, upstream, rest, s3, root
):
    keys = {"s3.access-key-id": "lent1", "s3.secret-access-key": "s3cret"}
    rest.lent = keys | {"s3.session-token": "t0ken"}
    s3.keys = {"right", "lent1"}
    keep(spark, changefeed, captures, root, CUTS[:1])
    with CatalogManifest.opened(spark, root, "bank") as manifest:
        s3.keys, s3.refusal = {"right", "lent2"}, "ExpiredToken"
        with pytest.raises(SourceError, match=r"ErrCredentials.*S3 does not allow"):
            cuts_in_catalog(spark, root, "bank")
        rest.lent = rest.lent | {"s3.access-key-id": "lent2"}
        assert manifest.announce(CUTS[0], CUTS[1]) == CUTS[1], "the manifest's table is loaded anew"
    keep(spark, changefeed, captures, root, CUTS[1:2])
    assert shown(spark, root, CUTS[1]) == held(upstream, CUTS[1])


@pytest.mark.parametrize("is_down", [False, True], ids=["keys refused", "down"])
def test_what_s3_refuses_is_named_and_nothing_is_written_twice(
    spark, changefeed, captures, upstream, rest, s3, root, is_down
):
    keep(spark, changefeed, captures, root, CUTS[:1])
    s3.down = is_down
    s3.keys = s3.keys if is_down else {"another"}
    code = "ErrTargetUnavailable" if is_down else "ErrCredentials"
    with pytest.raises(SourceError, match=code) as caught:
        keep(spark, changefeed, captures, root, CUTS[1:2])
    assert caught.value.retryable is is_down
    assert "s3cret" not in str(caught.value)
    s3.keys, s3.down = {"right"}, False
    keep(spark, changefeed, captures, root, CUTS[1:2])
    assert shown(spark, root, CUTS[1]) == held(upstream, CUTS[1])


@pytest.mark.parametrize(
    ("setting", "value"), [("s3.sse.type", "kms"), ("s3.remote-signing-enabled", "true")]
)
def test_a_setting_that_files_could_not_keep_is_refused_before_anything_is_written(
    spark, rest, s3, root, setting, value
):
    rest.settings[setting] = value
    with (
        pytest.raises(SourceError, match=f"ErrTargetUnusable.*{setting}"),
        CatalogManifest.opened(spark, root, "bank"),
    ):
        pytest.fail("it opens")
    assert not [found for found in s3.names() if found.endswith(".parquet")]
