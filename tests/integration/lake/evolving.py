"""A changefeed with a history of schemas, in memory: what captures would hand out, and the replay at any ts."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark_tidemark.flight import ChangefeedMeta, Ddl, Known, Slice, TableMeta

from sink.defaults import plain, with_default

_ENVELOPE = [("_op", pa.string()), ("_commit_ts", pa.int64()), ("_start_ts", pa.int64()), ("_seq", pa.int64())]
END = 1000


@dataclass
class Version:
    """A table between two DDLs; `key` is its first column."""

    name: str
    columns: dict[str, Any]
    from_ts: int
    to_ts: int = END
    defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def meta(self) -> TableMeta:
        schema = pa.schema([*_ENVELOPE, *self.columns.items()])
        return TableMeta(self.name, (next(iter(self.columns)),), schema, self.from_ts, self.defaults)


@dataclass
class EvolvingFeed:
    """The history, written down by `create`, `rows`, `alter` and so on, in the order of their ts."""

    versions: list[Version] = field(default_factory=list)
    ddls: list[Ddl] = field(default_factory=list)
    changes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    states: list[tuple[int, dict[str, dict[Any, dict[str, Any]]]]] = field(default_factory=lambda: [(0, {})])

    def create(self, ts: int, name: str, /, **columns: Any) -> None:
        """CREATE TABLE; at 0 it was there before the changefeed."""
        self.versions.append(Version(name, columns, ts))
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
        self._change(name, "delete", ts, 0, {column: row[column] for column in row if column != "_commit_ts"})

    def alter(
        self,
        ts: int,
        name: str,
        query: str,
        renamed: dict[str, str] | None = None,
        defaults: dict[str, Any] | None = None,
        /,
        **columns: Any,
    ) -> None:
        """ALTER TABLE to these columns."""
        self._end(ts, name)
        held = defaults or {}
        told = {column: plain(value) for column, value in held.items()}
        self.versions.append(Version(name, columns, ts, defaults=told))
        self.ddls.append(Ddl(ts, query, tables=(name,)))
        state, names = self._state(ts), {new: old for old, new in (renamed or {}).items()}
        state[name] = {
            key: {column: row.get(names.get(column, column), held.get(column)) for column in (*columns, "_commit_ts")}
            for key, row in state[name].items()
        }

    def truncate(self, ts: int, name: str) -> None:
        """TRUNCATE TABLE."""
        self.ddls.append(Ddl(ts, f"TRUNCATE TABLE {name}", truncated=(name,)))
        self._state(ts)[name] = {}

    def drop(self, ts: int, name: str) -> None:
        """DROP TABLE."""
        self._end(ts, name)
        self.ddls.append(Ddl(ts, f"DROP TABLE {name}", dropped=(name,)))
        del self._state(ts)[name]

    def rename(self, ts: int, old: str, new: str) -> None:
        """RENAME TABLE."""
        columns = self._end(ts, old).columns
        self.versions.append(Version(new, columns, ts))
        self.ddls.append(Ddl(ts, f"RENAME TABLE {old} TO {new}", tables=(new,), renamed=((old, new),)))
        state = self._state(ts)
        state[new] = state.pop(old)

    def state(self, ts: int) -> dict[str, dict[Any, dict[str, Any]]]:
        """The replay: each table's rows by key, as of `ts`."""
        return next(state for at, state in reversed(self.states) if at <= ts)

    def cut_ends(self, *wanted: int) -> list[int]:
        """Ends of cuts that never cross a DDL: those wanted, and each DDL's ts."""
        return sorted({*wanted, *(ddl.ts for ddl in self.ddls)})

    def describe(self, ts: int | None = None, *, known: Known | None = None) -> ChangefeedMeta:
        """As a capture: what is in force above `ts`, and the DDLs from it on."""
        at = ts or 0
        if known and known.ts <= at and not any(known.ts < ddl.ts <= at for ddl in self.ddls):
            return ChangefeedMeta(0, END, known.tables, tuple(ddl for ddl in self.ddls if ddl.ts >= at))
        tables = {found.name: found.meta for found in self.versions if found.from_ts <= at < found.to_ts}
        return ChangefeedMeta(0, END, tables, tuple(ddl for ddl in self.ddls if ddl.ts >= at))

    def plan(self, start_ts: int, end_ts: int, tables: Any = None) -> list[Slice]:
        """One slice for each table that has rows."""
        assert not any(start_ts < ddl.ts < end_ts for ddl in self.ddls), "a cut crosses a DDL"
        names = sorted({name for name, row in self.changes if start_ts < row["_commit_ts"] <= end_ts})
        return [
            Slice(name, (), json.dumps({"table": name, "start": start_ts, "end": end_ts}).encode(), 1, 1)
            for name in names
            if tables is None or name in tables
        ]

    def read(self, part: Slice) -> Iterator[Any]:
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

    def _end(self, ts: int, name: str) -> Version:
        ended = next(found for found in self.versions if found.name == name and found.to_ts == END)
        ended.to_ts = ts
        return ended

    def _state(self, ts: int) -> dict[str, dict[Any, dict[str, Any]]]:
        """The state from `ts` on, to be changed."""
        if self.states[-1][0] != ts:
            self.states.append((ts, {name: dict(rows) for name, rows in self.states[-1][1].items()}))
        return self.states[-1][1]
