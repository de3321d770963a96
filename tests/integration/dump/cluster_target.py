"""A reader of a changefeed that is dumped: cut by cut it holds what it has against the source at
that timestamp.
"""

import time
from collections.abc import Callable

import pyarrow.flight as fl

from tests.integration.capture.processes import Cluster, Reader
from tests.integration.dump.cluster_source import ClusterSource, Rows


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
            except (fl.FlightError, OSError) as err:
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
            wanted = table.at(self.at)
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
