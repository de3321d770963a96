"""A reader of a changefeed that is dumped: cut by cut it holds what it has against the source at
that timestamp.
"""

import time
from collections.abc import Callable

import pyarrow.flight as fl
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Changefeed
from pyspark_tidemark.options import parse

from tests.integration.capture.processes import Cluster, Reader
from tests.integration.dump.cluster_source import ClusterSource, Known, Rows
from tests.integration.lake.memory import MemoryLake


class ClusterTarget:
    """Rows by table; nothing of it may be older than the source was,
    nothing may come twice within a table's life.
    """

    def __init__(
        self, cluster: Cluster, source: ClusterSource, changefeed: str, start_ts: int
    ) -> None:
        self.rows: dict[str, Rows] = {}
        self.at = start_ts
        self.cuts = 0
        self._source = source
        self._reader = Reader(cluster, changefeed)

    def follow(self, until: Callable[[], bool], limit_s: float = 200.0) -> None:
        """Read until something is so; a capture may be away meanwhile."""
        deadline, problem = time.monotonic() + limit_s, ""
        while not until():
            assert time.monotonic() < deadline, (
                f"not reached at {self.at}: {self.missing(self.at)}, {problem}"
            )
            try:
                self._step()
            except (fl.FlightError, SourceError, OSError) as err:
                problem = str(err)
                time.sleep(0.1)

    def missing(self, ts: int) -> dict[str, int]:
        """How many rows there are that are not here, by table."""
        tables = self._source.tables.items()
        return {
            name: len(each.at(ts).items() - self.rows.get(f"shop.{name}", {}).items())
            for name, each in tables
        }

    def check(self) -> None:
        """Every row is as it is in the source."""
        for name, table in self._source.tables.items():
            wanted = self.due(table)
            rows = self.rows.get(f"shop.{name}", {})
            wrong = {
                key: (value, wanted.get(key))
                for key, value in rows.items()
                if wanted.get(key) != value
            }
            assert not wrong, (
                f"{name} at {self.at}: {len(wrong)} rows are not the source's: "
                f"{list(wrong.items())[:5]}"
            )

    def due(self, table: Known) -> Rows:
        """What must be here of a table."""
        return table.at(self.at)

    def _step(self) -> None:
        begin, reader = self.at, self._reader
        names = [table["table"] for table in reader.ask("describe", ts=begin)["tables"]]
        end = reader.ask("latest", start=begin, wait_ms=300)["ts"]
        if end <= begin:
            return
        read = {name: reader.read(begin, end, name).to_pylist() for name in names}
        ddls = [ddl for ddl in reader.ask("describe", ts=end)["ddls"] if ddl["ts"] == end]
        reader.ask("ack", ts=end)
        for name, rows in read.items():
            state = self.rows.setdefault(name, {})
            for row in rows:
                if row["_op"] == "delete":
                    state.pop(row["id"], None)
                else:
                    state[row["id"]] = row["v"]
        for ddl in ddls:
            for old, new in ddl["renamed"]:
                self.rows[new] = self.rows.pop(old, {})
            for name in [*ddl["dropped"], *ddl["truncated"]]:
                self.rows.pop(name, None)
        self.at, self.cuts = end, self.cuts + 1
        self._source.settle()
        self.check()


class MergedTarget(ClusterTarget):
    """The same in a lake, by its job, that has all tables as the shards of one."""

    ROUTE = "shop.*=lake.t{shard=_shard}"

    def __init__(
        self, cluster: Cluster, source: ClusterSource, changefeed: str, start_ts: int
    ) -> None:
        super().__init__(cluster, source, changefeed, start_ts)
        endpoint = f"grpc://{cluster.capture.endpoints['flight']}"
        options = parse({"endpoint": endpoint, "changefeed": changefeed, "cuts": "true"})
        self._lake = MemoryLake(Changefeed(options), start_ts)

    def due(self, table: Known) -> Rows:
        """The lake follows a schema change with the cut behind it."""
        is_emptied = (self.at, None, None) in table.history
        return table.at(self.at - 1 if is_emptied else self.at)

    def _step(self) -> None:
        try:
            if not self._lake.follow(wait_ms=300):
                return
        except SourceError:
            self._lake.begin_again()
            raise
        assert self._lake.target.tables.keys() <= {"lake.t"}
        self.at, self.cuts, self.rows = self._lake.at_ts, self.cuts + 1, {}
        for table in self._lake.target.tables.values():
            for row in table.rows.values():
                self.rows.setdefault(row["_shard"], {})[row["id"]] = row["v"]
        self._source.settle()
        self.check()
