"""The metadata are lost, and restored from a backup: a changefeed goes on, and its rows are the
same.
"""

import stat
from pathlib import Path

import pytest

from storage.meta import etcd3
from tests.integration.capture.many_tables import Feed
from tests.integration.capture.processes import patiently, running_cluster, transaction_client

pytest.importorskip("tikv_client")
PREFIX = "/tidemark/default/"


def test_a_changefeed_goes_on_from_a_backup(tmp_path: Path) -> None:
    file = tmp_path / "metadata.backup"
    with running_cluster(tmp_path) as cluster, transaction_client(cluster) as store:
        feed = Feed(cluster, store)
        feed.write(5)
        end = feed.resolved()
        feed.check(end)
        patiently(feed.reader.ask, "ack", ts=end)
        feed.start, feed.expected = end, []
        while cluster.cli("changefeed", "query", "-c", "many")["checkpoint_tso"] < end:
            pass

        made = cluster.cli("metadata", "backup", str(file))
        assert made["changefeeds"] == ["many"]
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert "take another name" in cluster.cli("metadata", "backup", str(file))
        assert "stop all captures" in cluster.cli("metadata", "restore", str(file), "--yes")
        shown = cluster.cli("metadata", "restore", str(file), "--dry-run")
        assert (shown["dry_run"], shown["records"]["info"]) == (True, 1)

        feed.write(5)
        cluster.capture.kill()
        host, _, port = cluster.pd.rpartition(":")
        with etcd3.client(host, int(port)) as client:
            client.delete(f"{PREFIX}owner")
            client.put(f"{PREFIX}changefeed/info/other", "{}")
            assert "changefeed/info/other" in cluster.cli("metadata", "restore", str(file), "--yes")
            client.delete_prefix(f"{PREFIX}changefeed/")
        assert "ErrNotConfirmed" in cluster.cli("metadata", "restore", str(file))
        for _ in range(2):  # again, as after one that was interrupted
            assert cluster.cli("metadata", "restore", str(file), "--yes")["restored"]
        cluster.capture.start()
        assert cluster.cli("changefeed", "query", "-c", "many")["checkpoint_tso"] >= feed.start
        feed.check(feed.resolved())

        damaged = tmp_path / "damaged"
        damaged.write_bytes(file.read_bytes()[:-20])
        refused = cluster.cli("metadata", "restore", str(damaged), "--yes")
        assert f"cannot use {damaged}" in refused
        assert "cut off" in refused
