"""Ways out that errors about a TiDB's DDL print,
followed from a real store by a capture to a lake in PostgreSQL.
"""

import re
from dataclasses import dataclass, replace

import pytest

from tests.integration.capture.processes import running_cluster
from tests.integration.dump.cluster_binlogs import Written
from tests.integration.dump.cluster_source import DATABASE_ID, ClusterSource
from tests.integration.lake.test_databases import rows
from tests.integration.lake.test_job_errors import until
from tests.integration.lake.test_ways_out import LakeJobLoop
from tests.tidb_encoding import table_key

pytestmark = pytest.mark.timeout(500)
EXCHANGE_PARTITION = 42


class Source(ClusterSource):
    """A TiDB that exchanges partitions, too."""

    def put(self, name, *numbers):
        """Insert rows."""
        self._call(self._put(name, dict.fromkeys(numbers, 7)))

    def exchange(self, name, place, plain):
        """ALTER TABLE … EXCHANGE PARTITION: its rows and those of a plain table change places,
        which nobody writes.
        """
        self._call(self._exchange(name, place, plain))

    async def _exchange(self, name, place, plain):
        async with self._turn:
            table, other = self.tables[name], self.tables[plain]
            parts = list(table.info.partition_ids)
            moved = {
                number: value
                for number, value in table.at(1 << 63).items()
                if number % len(parts) == place
            }
            came, old_id = other.at(1 << 63), other.info.id
            partition, parts[place] = parts[place], old_id
            table.info = replace(table.info, partition_ids=tuple(parts))
            other.info = replace(other.info, id=partition)
            meta = {table_key(DATABASE_ID, partition): other.info.to_json().encode()}
            await self._commit(meta, Written())  # TiDB writes it with the job
            arguments = [partition, 1, table.info.id, "p", True]
            query = f"alter table {name} exchange partition p with table {plain}"
            ts = await self._ddl(EXCHANGE_PARTITION, old_id, query, table.info, raw_args=arguments)
            table.history += [(ts, number, None) for number in moved] + [
                (ts, *row) for row in came.items()
            ]
            other.history += [(ts, number, None) for number in came] + [
                (ts, *row) for row in moved.items()
            ]

    def rows(self, name):
        """All of a table's, as pairs."""
        return sorted(self.tables[name].at(1 << 63).items())


@dataclass
class Feed:
    """A changefeed of the database `shop`, and its lake."""

    cluster: object
    name: str
    target: str

    def create(self, *flags):
        made = self.cluster.cli(
            "changefeed", "create", "-c", self.name, "--sink-uri", self.target, *flags
        )
        assert made["state"] == "normal", made

    def cli(self, verb, *flags):
        return self.cluster.cli("changefeed", verb, "-c", self.name, *flags)

    def state(self):
        document = self.cli("query")
        return document["state"], (document["error"] or {}).get("code")

    def fails_with(self, code):
        until(self.state, ("failed", f"TM:{code}"))
        return self.cli("query")["error"]["message"]

    def lake(self, table):
        try:
            return sorted((row["id"], row["v"]) for row in rows(self.target, f"shop.{table}"))
        except Exception:  # noqa: BLE001 - it may not be there yet
            return []


@pytest.fixture
def cluster(tmp_path):
    with running_cluster(tmp_path) as running:
        yield running


@pytest.fixture
def source(cluster):
    opened = Source(cluster.pd).opened()
    yield opened
    opened.stop()


def test_an_exchanged_partition_goes_on_as_printed_in_another_changefeed(cluster, source, postgres):
    first = Feed(cluster, "first", postgres.create("exchanged1"))
    source.create("other", 0)
    first.create("--filter", "shop.*")
    with LakeJobLoop(first):
        source.create("parted", 6, partitions=2)
        source.create("plain", 0)
        source.put("plain", 11, 13)
        source.put("other", 1)
        source.exchange("parted", 1, "plain")
        source.put("parted", 2, 15)
        message = first.fails_with("ErrDdlUnsupported")
        assert first.lake("parted") == [(number, 0) for number in range(6)], (
            "everything before it is delivered"
        )
        assert (first.lake("plain"), first.lake("other")) == ([(11, 7), (13, 7)], [(1, 7)])
    (ts,) = re.findall(r"--start-ts (\d+)", message)
    assert "another --sink-uri" in message
    assert "dumpstart" in message

    second = Feed(cluster, "second", postgres.create("exchanged2"))
    second.create("--filter", "shop.*", "--start-ts", ts)
    with LakeJobLoop(second):
        second.cli("dumpstart")
        source.put("plain", 17)
        for name in ("parted", "plain", "other"):
            until(lambda name=name: second.lake(name), source.rows(name))
        assert [number for number, _ in second.lake("parted")] == [0, 2, 4, 11, 13, 15]
        assert second.state() == ("normal", None)


def test_a_table_renamed_into_the_filter_goes_on_by_the_printed_resume_and_a_dump(
    cluster, source, postgres
):
    feed = Feed(cluster, "renamed", postgres.create("renamed"))
    source.create("seen", 0)
    source.create("hidden", 3)
    feed.create("--filter", "shop.*", "--filter", "!shop.hidden")
    with LakeJobLoop(feed):
        source.put("seen", 1)
        source.rename("hidden", "shown")
        source.put("shown", 9)
        message = feed.fails_with("ErrSyncRenameTableFailed")
        until(lambda: feed.lake("seen"), [(1, 7)])
        (ts,) = re.findall(r"--overwrite-checkpoint-ts (\d+)", message)
        assert feed.cli("resume", "--overwrite-checkpoint-ts", ts, "--yes")["state"] == "normal"
        until(lambda: feed.lake("shown"), [(9, 7)])
        assert "dumpstart" in message
        feed.cli("dumpstart")
        until(lambda: feed.lake("shown"), source.rows("shown"))
        assert (feed.lake("seen"), feed.state()) == (source.rows("seen"), ("normal", None))
