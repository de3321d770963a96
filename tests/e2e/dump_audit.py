"""The verdict on a run: what a reader was given,
held against what the source was at each commit_ts. Pure.

The source is its base and its history, ordered by GTID; commit_ts are folded here from the headers
of the binlog, apart from the product's own reading of it. A row that was delivered must be the
source's at exactly its commit_ts: so the lake is right at every cut, however cuts fall. Rows that
no dump has brought yet may be missing until the end.
"""

import base64
import json
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.e2e.dump_writer import Entry, Key, Row, Schema

_HEADER = struct.Struct("<IBIIIH")
_MARIADB_GTID = 162
_SECOND = 1000 << 18
_SAMPLES = 8
Rows = dict[str, dict[Key, Row]]


@dataclass(frozen=True)
class Cut:
    """One range that a reader has taken, table by table;
    `schema` is what `describe` said of a DDL at its end.
    """

    start: int
    end: int
    tables: Mapping[str, pa.Table]
    keys: Mapping[str, tuple[str, ...]]
    """The key columns of each table."""
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Again:
    """A range of one table that was read twice; `other_capture`: by another one the second time."""

    table: str
    key: tuple[str, ...]
    first: pa.Table
    second: pa.Table
    other_capture: bool


@dataclass
class Verdict:
    """What was wrong, counted; a few examples of each."""

    rows: int = 0
    brought: int = 0
    """Rows that no transaction explains: those of the dump."""
    counts: Counter[str] = field(default_factory=Counter)
    samples: list[str] = field(default_factory=list)

    def fault(self, kind: str, *what: Any) -> None:
        """Count one: `lost`, `duplicated`, `backwards`, `wrong` (not as it was),
        `unstable`, `unequal` (at the end).
        """
        self.counts[kind] += 1
        if self.counts[kind] <= _SAMPLES:
            self.samples.append(f"{kind}: {what}")


class Source:
    """The source at a commit_ts, moved on in its order."""

    def __init__(self, base: Rows, entries: Iterable[tuple[int, Entry]]) -> None:
        self.rows: Rows = {table: dict(rows) for table, rows in base.items()}
        self._rest = list(entries)
        self._at = 0

    def move_to(self, ts: int) -> Iterator[tuple[int, str, Key]]:
        """Go to `ts`; which keys changed on the way, and when."""
        while self._at < len(self._rest) and self._rest[self._at][0] <= ts:
            commit_ts, entry = self._rest[self._at]
            self._at += 1
            if entry.schema is not None:
                apply_schema(self.rows, entry.schema)
            for (table, key), row in entry.changes.items():
                put(self.rows.setdefault(table, {}), key, row)
                yield commit_ts, table, key


class Audit:
    """Follows a reader, cut after cut."""

    def __init__(self, base: Rows, entries: Sequence[tuple[int, Entry]], start_ts: int) -> None:
        self.lake: Rows = {}
        self.verdict = Verdict()
        self._source = Source(base, entries)
        self._logged = {
            (ts, table, key): entry.ending for ts, entry in entries for table, key in entry.changes
        }
        self._at = start_ts
        for _ in self._source.move_to(start_ts):
            pass
        self._newest: dict[tuple[str, Key], tuple[int, int]] = {}

    def follow(self, cut: Cut) -> None:
        """Apply a cut; the source moves along."""
        assert cut.start == self._at, "cuts follow one another"
        self._at = cut.end
        given = sorted(_changes(cut), key=lambda each: (each[0], each[1] != "delete"))
        seen = Counter((table, key, ts, op) for ts, op, table, key, _ in given)
        for what, times in seen.items():
            if times > 1:
                self.verdict.fault("duplicated", *what)
            if not cut.start < what[2] <= cut.end:
                self.verdict.fault("wrong", "outside of", cut.start, cut.end, *what)
        expected: set[tuple[int, str, Key]] = set()
        for ts, op, table, key, row in given:
            expected.update(self._source.move_to(ts))
            self._given(ts, op, table, key, row)
            expected.discard((ts, table, key))
        expected.update(self._source.move_to(cut.end))
        for ts, table, key in expected:
            self.verdict.fault("lost", self._logged[ts, table, key], table, key, ts)
        if cut.schema is not None:
            _apply_described(self.lake, cut.schema)

    def end(self, wanted: Rows) -> Verdict:
        """Everything was read: the lake is the source, which SELECT shows as `wanted`."""
        for table in wanted.keys() | self.lake.keys():
            held, there = self.lake.get(table, {}), wanted.get(table, {})
            for key in held.keys() | there.keys():
                if held.get(key) != there.get(key):
                    kind = "lost" if key not in held else "unequal"
                    self.verdict.fault(
                        kind, "at the end", table, key, held.get(key), there.get(key)
                    )
        return self.verdict

    def reread(self, again: Again) -> None:
        """A range was read twice: it is the same, but that chunks of a killed capture may be
        missing.
        """
        first, second = (
            {tuple(row.items()) for row in rows.to_pylist()} for rows in (again.first, again.second)
        )
        missing = [dict(row) for row in first - second]
        missing_logged = [row for row in missing if self._is_logged(again, row)]
        if second - first or missing_logged or (missing and not again.other_capture):
            self.verdict.fault(
                "unstable",
                again.table,
                "first only",
                missing[:2],
                "second only",
                len(second - first),
            )

    def _is_logged(self, again: Again, row: Row) -> bool:
        return (
            row["_commit_ts"],
            again.table,
            tuple(row[name] for name in again.key),
        ) in self._logged

    def _given(self, ts: int, op: str, table: str, key: Key, row: Row | None) -> None:
        verdict, there = self.verdict, self._source.rows.get(table, {}).get(key)
        verdict.rows += 1
        verdict.brought += (ts, table, key) not in self._logged
        if row != there:
            verdict.fault("wrong", table, ts, op, row, "the source had", there)
        newest_ts, newest = self._newest.get((table, key), (0, -1))
        version = row["ver"] if row is not None else newest
        if ts < newest_ts or version < newest:
            verdict.fault("backwards", table, ts, op, row, "after", newest_ts, newest)
        self._newest[table, key] = ts, max(version, newest)
        put(self.lake.setdefault(table, {}), key, row)


def put(rows: dict[Key, Row], key: Key, row: Row | None) -> None:
    """Let a key have this row, or none."""
    if row is None:
        rows.pop(key, None)
    else:
        rows[key] = row


def apply_schema(rows: Rows, schema: Schema) -> None:
    """What a DDL of ours does to rows."""
    if schema.verb == "truncate":
        rows[schema.table] = {}
    elif schema.verb == "add":
        rows[schema.table] = {
            key: row | {schema.column: schema.held} for key, row in rows[schema.table].items()
        }
    elif schema.verb == "drop":
        rows[schema.table] = {
            key: _without(row, schema.column) for key, row in rows[schema.table].items()
        }


def commit_ts_of(saved_position: Mapping[str, Any], binlogs: Sequence[Path]) -> dict[int, int]:
    """The commit_ts of each transaction behind a saved position, by its number."""
    ts, after = (
        int(saved_position["ts"]),
        int(str(saved_position["gtids"] or "0-0-0").rpartition("-")[2]),
    )
    found = {}
    for path in binlogs:
        for seq, second in _gtids(path):
            if seq > after:
                ts = max(ts + 2, second * _SECOND)
                found[seq] = ts
    return found


def timed(entries: Iterable[Entry], commit_ts: Mapping[int, int]) -> list[tuple[int, Entry]]:
    """In the source's order; a DDL has the commit_ts right before its transaction's.

    Those before the saved position have 0.
    """
    found: list[tuple[int, Entry]] = []
    for entry in sorted(entries, key=lambda each: each.seq):
        ts = commit_ts.get(entry.seq, 0)
        assert ts or not found or not found[-1][0], f"the log has no transaction {entry.seq}"
        found.append((ts - (entry.schema is not None), entry))
    return found


def _gtids(path: Path) -> Iterator[tuple[int, int]]:
    """Number and second of each transaction of a log file."""
    data, at = path.read_bytes(), 4
    while at + _HEADER.size <= len(data):
        second, kind, _, size, _, _ = _HEADER.unpack_from(data, at)
        if kind == _MARIADB_GTID:
            yield struct.unpack_from("<Q", data, at + _HEADER.size)[0], second
        at += size


def _changes(cut: Cut) -> Iterator[tuple[int, str, str, Key, Row | None]]:
    for table, rows in cut.tables.items():
        for each in rows.to_pylist():
            key = tuple(each[name] for name in cut.keys[table])
            row = {name: value for name, value in each.items() if not name.startswith("_")}
            yield (
                each["_commit_ts"],
                each["_op"],
                table,
                key,
                None if each["_op"] == "delete" else row,
            )


def _apply_described(lake: Rows, described: Mapping[str, Any]) -> None:
    """A DDL, as a reader does it: docs/format/flight.md."""
    ddl = described["ddls"][0]
    for name in ddl["dropped"]:
        lake.pop(name, None)
    for name in ddl["truncated"]:
        lake[name] = {}
    for table in described["tables"]:
        if table["table"] in ddl["tables"]:
            fields = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(table["schema"])))
            held = {field.name: _held(field) for field in fields if not field.name.startswith("_")}
            rows = lake.get(table["table"], {})
            lake[table["table"]] = {
                key: {name: row.get(name, held[name]) for name in held} for key, row in rows.items()
            }


def _held(column: pa.Field) -> Any:
    text = (column.metadata or {}).get(b"tidemark.default")
    return json.loads(text) if text else None


def _without(row: Row, column: str) -> Row:
    return {name: value for name, value in row.items() if name != column}
