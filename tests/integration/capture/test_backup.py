"""The metadata are lost or removed, and restored from a backup: a changefeed goes on, and its rows
are the same.
"""

import argparse
import stat
from pathlib import Path

import pytest

from server.capture.errors import CaptureUnknownError
from server.cli import processor, unsafe
from server.cli.remote import Remote
from server.rpc.credentials import SecurityConfig
from storage.meta import etcd3
from tests.integration.capture.many_tables import NAMES, Feed
from tests.integration.capture.processes import patiently, run, running_cluster, transaction_client

pytest.importorskip("tikv_client")
PREFIX = "/tidemark/default/"


def asked(cluster, command, **arguments):
    """The document that a command shows; in this process, which is quicker."""
    remote = Remote(cluster.capture.endpoints["capture"], cluster.pd, SecurityConfig())
    return run(command(remote, argparse.Namespace(**arguments))).document


def check_processors(cluster) -> None:
    """The commands show which capture has which tables."""
    [row] = asked(cluster, processor.list_processors)
    assert (row["changefeed-id"], row["tables"]) == ("many", len(NAMES))
    of_one = {"changefeed_id": "many", "capture_id": row["capture-id"]}
    tables = asked(cluster, processor.query_processor, **of_one)["status"]["tables"]
    assert sorted(table["name"] for table in tables.values()) == sorted(NAMES)
    with pytest.raises(CaptureUnknownError, match="does nothing for changefeed many"):
        asked(cluster, processor.query_processor, **of_one | {"capture_id": "another"})


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
        check_processors(cluster)
        with pytest.raises(unsafe.CapturesRunningError):
            asked(cluster, unsafe.reset, dry_run=False, yes=True)
        shown = cluster.cli("metadata", "restore", str(file), "--dry-run")
        assert (shown["dry_run"], shown["records"]["info"]) == (True, 1)

        feed.write(5)
        cluster.capture.kill()
        host, _, port = cluster.pd.rpartition(":")
        with etcd3.client(host, int(port)) as client:
            client.delete(f"{PREFIX}owner")
            client.delete_prefix(f"{PREFIX}capture/")
            client.put(f"{PREFIX}changefeed/info/other", "{}")
            assert "changefeed/info/other" in cluster.cli("metadata", "restore", str(file), "--yes")
            removed = {"changefeeds": ["many", "other"], "safepoints": ["ticdc-default-many"]}
            for flags in ({"dry_run": True, "yes": False}, {"dry_run": False, "yes": True}):
                shown = asked(cluster, unsafe.reset, **flags)
                assert {name: shown[name] for name in removed} == removed
            assert not list(client.get_prefix(f"{PREFIX}changefeed/"))
        assert asked(cluster, unsafe.delete_safepoints, dry_run=True) == {
            "dry_run": True,
            "safepoints": [],
        }
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
