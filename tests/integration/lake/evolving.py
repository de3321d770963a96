"""A changefeed with a history of schemas, in memory: what captures would hand out,
and the replay at any ts.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark_tidemark.flight import ChangefeedMeta, Ddl, Known, SliceEndpoint, TableMeta

from sink.mounter import plain, with_default

_ENVELOPE = [
    ("_op", pa.string()),
    ("_commit_ts", pa.int64()),
    ("_start_ts", pa.int64()),
    ("_seq", pa.int64()),
]
END = 1_000_000


@dataclass
class Version:
    """A table between two DDLs; its key is its first column, unless `key` says another."""

    name: str
    columns: dict[str, Any]
    from_ts: int
    to_ts: int = END
    defaults: dict[str, Any] = field(default_factory=dict)
    table_id: int = 0
    key: str = ""
    column_ids: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.column_ids:
            self.column_ids = {column: number for number, column in enumerate(self.columns, 1)}

    @property
    def meta(self) -> TableMeta:
        schema = pa.schema([*_ENVELOPE, *self.columns.items()])
        key = (self.key or next(iter(self.columns)),)
        return TableMeta(
            self.name, key, schema, self.from_ts, self.defaults, self.table_id, self.column_ids
        )


@dataclass
class EvolvingFeed:
    """The history, written down by `create`, `rows`, `alter` and so on,
    in the order of their ts.
    """

    versions: list[Version] = field(default_factory=list)
    ddls: list[Ddl] = field(default_factory=list)
    changes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    states: list[tuple[int, dict[str, dict[Any, dict[str, Any]]]]] = field(
        default_factory=lambda: [(0, {})]
    )

    def create(self, ts: int, name: str, /, **columns: Any) -> None:
        """CREATE TABLE; at 0 it was there before the changefeed."""
        self.versions.append(Version(name, columns, ts, table_id=len(self.versions) + 1))
        if ts:
            self.ddls.append(Ddl(ts, f"CREATE TABLE {name} …", tables=(name,)))
        self._state(ts)[name] = {}

    def put(self, ts: int, name: str, *rows: dict[str, Any]) -> None:
        """Insert rows, or update those that are there."""
        state = self._state(ts)
        for seq, row in enumerate(rows):
            key = next(iter(row.values()))
            op = "update" if key in state[name] else "insert"
            self._change(name, op, ts, seq, row)
            state[name][key] = row | {"_commit_ts": ts}

    def delete(self, ts: int, name: str, key: Any) -> None:
        """Delete a row."""
        row = self._state(ts)[name].pop(key)
        self._change(
            name, "delete", ts, 0, {column: row[column] for column in row if column != "_commit_ts"}
        )

    def alter(
        self,
        ts: int,
        name: str,
        query: str,
        renamed: dict[str, str] | None = None,
        defaults: dict[str, Any] | None = None,
        dropped: tuple[str, ...] = (),
        /,
        **columns: Any,
    ) -> None:
        """ALTER TABLE to these columns; those that are `dropped` may come again,
        as other columns.
        """
        before = self._end(ts, name)
        held = defaults or {}
        told = {column: plain(value) for column, value in held.items()}
        old_names = {new: old for old, new in (renamed or {}).items()}
        gone = {*dropped, *(renamed or {})}
        sources = {column: old_names.get(column, column) for column in columns}
        sources = {
            column: source
            for column, source in sources.items()
            if source in before.columns and (column in old_names or source not in gone)
        }
        unused = itertools.count(
            1 + max(number for found in self.versions for number in found.column_ids.values())
        )
        ids = {
            column: before.column_ids[sources[column]] if column in sources else next(unused)
            for column in columns
        }
        self.versions.append(
            Version(name, columns, ts, defaults=told, table_id=before.table_id, column_ids=ids)
        )
        self.ddls.append(Ddl(ts, query, tables=(name,)))
        state = self._state(ts)
        state[name] = {
            key: {
                column: row[sources[column]] if column in sources else held.get(column)
                for column in columns
            }
            | {own: row[own] for own in ("_commit_ts", "is_deleted") if own in row}
            for key, row in state[name].items()
        }

    def truncate(self, ts: int, name: str) -> None:
        """TRUNCATE TABLE."""
        self.ddls.append(Ddl(ts, f"TRUNCATE TABLE {name}", truncated=(name,)))
        self._state(ts)[name] = {}

    def create_or_replace(self, ts: int, name: str, /, **columns: Any) -> None:
        """CREATE OR REPLACE TABLE: the name is another table's, in one statement."""
        self._end(ts, name)
        self.create(ts, name, **columns)

    def drop(self, ts: int, name: str) -> None:
        """DROP TABLE."""
        self._end(ts, name)
        self.ddls.append(Ddl(ts, f"DROP TABLE {name}", dropped=(name,)))
        del self._state(ts)[name]

    def rename(self, ts: int, old: str, new: str) -> None:
        """RENAME TABLE."""
        self.rename_all(ts, (old, new))

    def rename_all(self, ts: int, *pairs: tuple[str, str]) -> None:
        """RENAME TABLE of several tables; a name may be taken that another one of them had."""
        ended = [self._end(ts, old) for old, _ in pairs]
        self.versions += [
            Version(new, found.columns, ts, table_id=found.table_id, column_ids=found.column_ids)
            for found, (_, new) in zip(ended, pairs, strict=True)
        ]
        query = "RENAME TABLE " + ", ".join(f"{old} TO {new}" for old, new in pairs)
        self.ddls.append(Ddl(ts, query, tables=tuple(new for _, new in pairs), renamed=pairs))
        state = self._state(ts)
        rows = [state.pop(old) for old, _ in pairs]
        state |= {new: held for held, (_, new) in zip(rows, pairs, strict=True)}

    def state(self, ts: int) -> dict[str, dict[Any, dict[str, Any]]]:
        """The replay: each table's rows by key, as of `ts`."""
        return next(state for at, state in reversed(self.states) if at <= ts)

    def tables_at(self, ts: int) -> list[str]:
        """The tables whose rows have commit_ts `ts`: those below a DDL that has this ts."""
        return [found.name for found in self.versions if found.from_ts < ts <= found.to_ts]

    def history(self, name: str, ts: int) -> list[dict[str, Any]]:
        """All changes up to `ts` of the table that is called `name` at `ts`,
        under whatever names it had.
        """
        table_id = self._version(name, ts).table_id
        return [
            row
            for name, row in self.changes
            if (at := row["_commit_ts"]) <= ts and self._version(name, at).table_id == table_id
        ]

    def cut_ends(self, *wanted: int) -> list[int]:
        """Ends of cuts that never cross a DDL: those wanted, and each DDL's ts."""
        return sorted({*wanted, *(ddl.ts for ddl in self.ddls)})

    def describe(self, ts: int | None = None, *, known: Known | None = None) -> ChangefeedMeta:
        """As a capture: what is in force above `ts`, and the DDLs from it on."""
        at = ts or 0
        if known and known.ts <= at and not any(known.ts < ddl.ts <= at for ddl in self.ddls):
            return ChangefeedMeta(
                0, END, known.tables, tuple(ddl for ddl in self.ddls if ddl.ts >= at)
            )
        tables = {
            found.name: found.meta for found in self.versions if found.from_ts <= at < found.to_ts
        }
        return ChangefeedMeta(0, END, tables, tuple(ddl for ddl in self.ddls if ddl.ts >= at))

    def plan(self, start_ts: int, end_ts: int, tables: Any = None) -> list[SliceEndpoint]:
        """One slice for each table that has rows."""
        assert not any(start_ts < ddl.ts < end_ts for ddl in self.ddls), "a cut crosses a DDL"
        names = sorted(
            {name for name, row in self.changes if start_ts < row["_commit_ts"] <= end_ts}
        )
        return [
            SliceEndpoint(
                name,
                (),
                json.dumps({"table": name, "start": start_ts, "end": end_ts}).encode(),
                1,
                1,
            )
            for name in names
            if tables is None or name in tables
        ]

    def read(self, part: SliceEndpoint) -> Iterator[Any]:
        """The rows of a slice."""
        asked = json.loads(part.ticket)
        rows = [
            row
            for name, row in self.changes
            if name == part.table and asked["start"] < row["_commit_ts"] <= asked["end"]
        ]
        table = self.describe(asked["start"]).tables[part.table]
        fields = [with_default(field, table.defaults.get(field.name)) for field in table.schema]
        yield pa.RecordBatch.from_pylist(rows, schema=pa.schema(fields))

    def ack(self, ts: int) -> int:
        """Nothing is ever cleaned."""
        return ts

    def _change(self, name: str, op: str, ts: int, seq: int, row: dict[str, Any]) -> None:
        envelope = {"_op": op, "_commit_ts": ts, "_start_ts": ts - 1, "_seq": seq}
        self.changes.append((name, envelope | row))

    def _version(self, name: str, ts: int) -> Version:
        """The table that rows with commit_ts `ts` belong to."""
        return next(
            found
            for found in self.versions
            if found.name == name and found.from_ts < ts <= found.to_ts
        )

    def _end(self, ts: int, name: str) -> Version:
        ended = next(found for found in self.versions if found.name == name and found.to_ts == END)
        ended.to_ts = ts
        return ended

    def _state(self, ts: int) -> dict[str, dict[Any, dict[str, Any]]]:
        """The state from `ts` on, to be changed."""
        if self.states[-1][0] != ts:
            self.states.append(
                (ts, {name: dict(rows) for name, rows in self.states[-1][1].items()})
            )
        return self.states[-1][1]
