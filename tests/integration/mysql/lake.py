"""A lake in memory, which reads a changefeed through its Flight address as a target does."""

import time
from typing import Any

from tests.integration.capture.processes import Cluster, Reader


class Lake:
    """Applies cuts as a target does: tables by name, each with its rows by key."""

    def __init__(self, cluster: Cluster, feed: str, start_ts: int) -> None:
        self.tables: dict[str, dict[int, dict[str, Any]]] = {}
        self._reader = Reader(cluster, feed)
        self.at_ts = start_ts
        self.ddls: list[str] = []

    def follow(self, is_complete: Any, limit_s: float = 200.0) -> None:
        """Read and acknowledge cuts until it says so."""
        deadline = time.monotonic() + limit_s
        while not is_complete(self.tables):
            assert time.monotonic() < deadline, f"not complete at {self.at_ts}: {self.tables}"
            end = self._reader.ask("latest", start=self.at_ts, wait_ms=500)["ts"]
            if end > self.at_ts:
                self._apply(end)

    def _apply(self, end: int) -> None:
        for part in self._reader.ask("plan", start=self.at_ts, end=end)["slices"]:
            table = self.tables.setdefault(part["table"], {})
            for row in self._reader.read(self.at_ts, end, part["table"]).to_pylist():
                values = {name: value for name, value in row.items() if not name.startswith("_")}
                if row["_op"] == "delete":
                    table.pop(row["id"], None)
                else:
                    table[row["id"]] = values
        for ddl in self._reader.ask("describe", ts=end)["ddls"]:
            if ddl["ts"] == end:
                self._apply_ddl(ddl)
        self._reader.ask("ack", ts=end)
        self.at_ts = end

    def _apply_ddl(self, ddl: dict[str, Any]) -> None:
        self.ddls.append(ddl["query"])
        moved = {new: self.tables.pop(old, {}) for old, new in ddl["renamed"]}
        self.tables |= moved
        for name in ddl["dropped"]:
            self.tables.pop(name, None)
        for name in ddl["truncated"]:
            self.tables[name] = {}
