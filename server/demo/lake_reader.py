"""The lake as its readers see it: `python -m server.demo.lake_reader URI CHANGEFEED OUT`.

Waits for a timestamp SINCE_TS on its standard input. Then it writes each table as of the newest cut
to `OUT/<table>.arrow`, and prints one JSON document: the newest cut, the total balance in cuts
spread over the run, and how long transfers after SINCE_TS took to become visible. It is a process
of its own, and knows the lake only by its manifest and its tables, as any reader would. Spark,
which starts meanwhile, reads a lake in files; a database is read in one snapshot, and shows its
newest cut only.
"""

import functools
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark_tidemark.lake.cut_record import CutRecord
from pyspark_tidemark.lake.databases.manifest import CUTS
from pyspark_tidemark.lake.manifest import DIRECTORY, read_cuts
from pyspark_tidemark.lake.session import open_session
from pyspark_tidemark.lake.target import StoredTable, open_connector
from pyspark_tidemark.sink_uri import SinkUri

from server.demo.bank import ACCOUNTS_NAME, TRANSFERS_NAME
from server.process import exit_with_parent
from server.verify.lake.database_lake import open_reader
from storage.model.ts import physical_ms

_SCHEMAS = {
    ACCOUNTS_NAME: pa.schema(
        [
            ("id", pa.int64()),
            ("owner", pa.string()),
            ("balance", pa.int64()),
            ("updated_at", pa.int64()),
            ("_commit_ts", pa.int64()),
        ]
    ),
    TRANSFERS_NAME: pa.schema(
        [
            *((name, pa.int64()) for name in ("id", "src", "dst", "amount")),
            ("note", pa.string()),
            ("_commit_ts", pa.int64()),
        ]
    ),
}
"""The columns of the demo's tables in a database."""
_META = ("_op", "_commit_ts", "_start_ts", "_seq")
_CUTS_READ = 6
"""Cuts whose balance is summed: Spark plans and reads each as a table of its own, and each task
gets the plan of all of them, so that all cuts of a minute would take longer than the run itself.
"""


class Reader(ABC):
    """A lake at its cuts, oldest first."""

    cuts: Sequence[CutRecord]

    @abstractmethod
    def rows(self, table: str) -> pa.Table:
        """The rows of `table` at the newest cut, with `_commit_ts`."""

    @abstractmethod
    def totals(self, since_ts: int) -> list[int]:
        """The total balance in cuts after `since_ts` that have accounts and can be read: at most
        `_CUTS_READ`, spread evenly, with the first and the last.
        """

    def latencies_s(self, transfers: pa.Table, since_ts: int) -> list[float]:
        """Seconds from the commit of each transfer after `since_ts` to the moment its cut was
        visible, sorted.
        """
        ends = [
            (cut.end_ts, datetime.fromisoformat(cut.applied_at).timestamp()) for cut in self.cuts
        ]
        latencies, position = [], 0
        for commit_ts in sorted(ts for ts in transfers["_commit_ts"].to_pylist() if ts > since_ts):
            while ends[position][0] < commit_ts:
                position += 1
            latencies.append(max(0.0, ends[position][1] - physical_ms(commit_ts) / 1000))
        return sorted(latencies)


class DatabaseReader(Reader):
    """A database, in one snapshot; its tables hold the newest cut."""

    def __init__(self, uri: SinkUri, changefeed: str) -> None:
        self._reader = open_reader(uri)
        app = changefeed.replace("'", "''")
        query = f"SELECT {{columns}} FROM {CUTS} WHERE app = '{app}' ORDER BY end_ts"  # noqa: S608 - quoted
        documents = self._read(CUTS, query, pa.schema([("document", pa.string())]))
        self.cuts = [CutRecord.from_json(text) for text in documents["document"].to_pylist()]

    def rows(self, table: str) -> pa.Table:
        """See `Reader`."""
        query = f"SELECT {{columns}} FROM {self._reader.quoted_table(table)}"  # noqa: S608 - quoted
        return self._read(table, query, _SCHEMAS[table])

    def totals(self, since_ts: int) -> list[int]:
        """See `Reader`."""
        del since_ts
        return [pc.sum(self.rows(ACCOUNTS_NAME)["balance"]).as_py() or 0]

    def _read(self, table: str, query: str, schema: pa.Schema) -> pa.Table:
        return pa.Table.from_batches(self._reader.batches(table, query, schema), schema)


class FileReader(Reader):
    """A lake in files, read by Spark."""

    def __init__(self, spark: Any, uri: SinkUri) -> None:
        self._spark = spark
        self._uri = uri
        self.cuts = read_cuts(Path(uri.path) / DIRECTORY)

    def _versions(self, table: str) -> list[int]:
        """The version of `table` that each cut shows;
        a cut without changes shows the one before it.
        """
        versions, current = [], -1
        for cut in self.cuts:
            current = next((part.version for part in cut.tables if part.table == table), current)
            versions.append(current)
        return versions

    def rows(self, table: str) -> pa.Table:
        """See `Reader`."""
        return _rows_of(self._read(table, self._versions(table)[-1]))

    def _read(self, table: str, version: int) -> Any:
        stored = StoredTable(self._uri, self.cuts[-1].changefeed, table)
        return open_connector(self._uri.format).read(self._spark, stored, version)

    def totals(self, since_ts: int) -> list[int]:
        """See `Reader`."""
        shown = [
            version
            for cut, version in zip(self.cuts, self._versions(ACCOUNTS_NAME), strict=True)
            if cut.end_ts >= since_ts and version >= 0
        ]
        # A cut that did not change the accounts shows the version of the cut before.
        versions = _spread(list(dict.fromkeys(shown)), _CUTS_READ)
        return self._totals_of(versions) if versions else []

    def _totals_of(self, versions: Sequence[int]) -> list[int]:
        """The total balance at each version."""
        tables = [self._read(ACCOUNTS_NAME, version) for version in versions]
        if "_op" in tables[0].columns:
            # The rows of a changelog are not known before its changes are put together.
            return [pc.sum(_rows_of(table)["balance"]).as_py() or 0 for table in tables]
        sums = [
            table.selectExpr(f"{version}L AS version", "balance")
            for version, table in zip(versions, tables, strict=True)
        ]
        # One job: each of its own would cost more than the sums themselves.
        summed = functools.reduce(type(sums[0]).unionAll, sums).groupBy("version").sum("balance")
        by_version = {row["version"]: row["sum(balance)"] for row in summed.collect()}
        return [by_version.get(version, 0) for version in versions]


def _spread(versions: Sequence[int], most: int) -> list[int]:
    """At most `most` of `versions`, evenly spread, with the first and the last."""
    if len(versions) <= most:
        return list(versions)
    step = (len(versions) - 1) / (most - 1)
    return [versions[round(position * step)] for position in range(most)]


def _spark(uri: SinkUri, out: Path) -> Any:
    return open_session(
        master="local[2]", driver_memory="1g", directory=out / "spark", lake=uri.format, extra={}
    )


def _rows_of(stored: Any) -> pa.Table:
    """The rows of a table that Spark reads; of a changelog, the newest change of each."""
    rows = stored.toArrow()
    return _replayed(rows) if "_op" in rows.column_names else rows


def _replayed(changes: pa.Table) -> pa.Table:
    """The last change of each id, deletes left out."""
    ordered = changes.sort_by([("_commit_ts", "ascending"), ("_seq", "ascending")])
    numbered = ordered.append_column("_row", pa.array(range(len(ordered)), pa.int64()))
    newest = numbered.group_by("id").aggregate([("_row", "max")])["_row_max"]
    last = ordered.take(newest)
    return last.filter(pc.not_equal(last["_op"], "delete"))


def main(arguments: Sequence[str]) -> None:
    """Read the lake; see the module."""
    uri, changefeed, out = SinkUri.parse(arguments[0]), arguments[1], Path(arguments[2])
    spark = None if uri.is_database else _spark(uri, out)
    line = sys.stdin.readline()
    if not line:
        return  # the demo has ended
    exit_with_parent()
    since_ts = int(line)
    reader: Reader = FileReader(spark, uri) if spark else DatabaseReader(uri, changefeed)
    tables = {name: reader.rows(name) for name in (ACCOUNTS_NAME, TRANSFERS_NAME)}
    for name, table in tables.items():
        data = table.select([column for column in table.column_names if column not in _META])
        with (
            pa.OSFile(str(out / f"{name}.arrow"), "wb") as file,
            pa.ipc.new_file(file, data.schema) as writer,
        ):
            writer.write_table(data)
    latencies = reader.latencies_s(tables[TRANSFERS_NAME], since_ts)
    answer = {
        "cut_ts": reader.cuts[-1].end_ts,
        "totals": reader.totals(since_ts),
        "cuts": sum(cut.end_ts >= since_ts for cut in reader.cuts),
        "p50_seconds": latencies[len(latencies) // 2] if latencies else 0.0,
        "p99_seconds": latencies[len(latencies) * 99 // 100] if latencies else 0.0,
    }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
