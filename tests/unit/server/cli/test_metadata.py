"""What of a backup is restored, and where."""

import json
from collections.abc import Mapping

import pytest

from server.changefeed import keys
from server.changefeed.captures import OtherClusterError
from server.cli.metadata import BackupFileError, check_cluster, chosen
from storage.meta.backup import Backup

SOURCES = {"bank": "", "binlogs": "pump://", "shop": "mysql://me@db", "shop-2": "mysql://me@db"}


def backup(cluster_id: int, sources: Mapping[str, str] = SOURCES) -> Backup:
    pairs = []
    for name, uri in sources.items():
        pairs.append((keys.info(name), json.dumps({"source_uri": uri}).encode()))
        pairs.append((keys.schema_change(name, 7), b"{}"))
    return Backup(keys.CHANGEFEEDS, "2026-11-29T05:00:00+00:00", pairs, cluster_id)


def test_chosen_changefeeds_have_their_records_and_no_others() -> None:
    only = chosen(backup(1), ["shop"])
    assert [key for key, _ in only.pairs] == [keys.info("shop"), keys.schema_change("shop", 7)]
    with pytest.raises(BackupFileError, match="no changefeed nope; it has bank, binlogs, shop"):
        chosen(backup(1), ["shop", "nope"])


def test_changefeeds_of_a_clusters_tables_stay_in_their_cluster() -> None:
    check_cluster(backup(1), 1)
    check_cluster(backup(0), 1)  # a backup of an earlier version
    with pytest.raises(OtherClusterError, match=r"bank, binlogs would take .* -c shop -c shop-2"):
        check_cluster(backup(1), 2)
    check_cluster(chosen(backup(1), ["shop", "shop-2"]), 2)
