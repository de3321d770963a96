"""The schema changes of one changefeed as the metadata holds them: from its start,
or from its checkpoint on. Pure.

The first one has the tables that it begins with, and no query. Invariants:
1. For a ts at or above the checkpoint, `at(ts)` does not depend on what was collected below the
   checkpoint.
2. A repeated change has no effect: at most one change has a given commit_ts, and a log repeats only
   changes above the checkpoint.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Self

from server.changefeed.table import TableRecord
from storage.model.errors import CorruptError

QUERY_CHARACTERS_MAX = 16 << 10


@dataclass(frozen=True, slots=True)
class SchemaChange:
    """One DDL's effect on the tables that the changefeed takes; the members are those of
    `TableChange`.
    """

    commit_ts: int
    query: str = ""
    tables: tuple[TableRecord, ...] = ()
    """In the order of table ids, so that it is the same after a restart."""
    dropped: tuple[str, ...] = ()
    truncated: tuple[str, ...] = ()

    def head_json(self) -> bytes:
        """Everything but the tables."""
        head = {"query": self.query, "dropped": self.dropped, "truncated": self.truncated}
        return json.dumps(head, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, commit_ts: int, head: bytes, tables: Iterable[bytes]) -> Self:
        """Read what `head_json` and `table_json` wrote.

        Raises:
            CorruptError: it is something else.
        """
        try:
            doc = json.loads(head)
            names = {member: tuple(map(str, doc[member])) for member in ("dropped", "truncated")}
            return cls(commit_ts, str(doc["query"]), by_id(map(_table, tables)), **names)
        except (ValueError, KeyError, TypeError) as err:
            raise CorruptError(
                f"a schema change at {commit_ts} in the metadata cannot be read: {err!r}"
            ) from err


@dataclass(frozen=True, slots=True)
class Garbage:
    """Records that no ts at or above the checkpoint needs; the tables are to be deleted first."""

    tables: tuple[tuple[int, TableRecord], ...]
    """Each with the commit_ts of its change."""
    changes: tuple[int, ...]
    """The commit_ts of changes that have no table left."""


class History:
    """The changes of a changefeed in the order of their commit_ts."""

    def __init__(self, changes: Iterable[SchemaChange] = ()) -> None:
        self._changes = {
            change.commit_ts: change
            for change in sorted(changes, key=lambda change: change.commit_ts)
        }

    def __iter__(self) -> Iterator[SchemaChange]:
        return iter(self._changes.values())

    def __len__(self) -> int:
        return len(self._changes)

    @property
    def first_ts(self) -> int:
        """The commit_ts of the first change that is kept; 0 without any."""
        return min(self._changes, default=0)

    @property
    def last_ts(self) -> int:
        """The commit_ts of the last change; 0 without any."""
        return max(self._changes, default=0)

    def last(self, most: int) -> list[SchemaChange]:
        """The newest ones, ascending."""
        return list(self._changes.values())[-most:]

    def known_from(self, checkpoint_ts: int) -> int:
        """The lowest ts whose tables a reader at `checkpoint_ts` may ask for,
        as far as the changes tell them.

        It is the one before the checkpoint: the reader may have yet to take a DDL at the
        checkpoint.
        """
        first, needed_ts = next(iter(self._changes.values()), None), self.needed_from(checkpoint_ts)
        # A first change that is a DDL had no tables before it: the change that brought them would
        # not have been collected. One without a query began the changefeed: nothing is known below.
        if first is not None and first.query:
            return needed_ts - 1
        return max(needed_ts - 1, min(self.first_ts, needed_ts))

    def needed_from(self, checkpoint_ts: int) -> int:
        """Return the lowest ts at which a reader may stand: the checkpoint, or the change that left
        no table.
        """
        # Without tables the checkpoint follows the log, whether or not a reader has taken the
        # change that dropped the last one: it must stay known.
        last_ts = max((ts for ts in self._changes if ts <= checkpoint_ts), default=checkpoint_ts)
        if not self._has_tables(checkpoint_ts):
            return last_ts
        earlier_ts = max((ts for ts in self._changes if ts < checkpoint_ts), default=0)
        # Nor has a reader come to the change that brought the first table again, where it has not
        # acknowledged anything above.
        if last_ts == checkpoint_ts and earlier_ts and not self._has_tables(checkpoint_ts - 1):
            return earlier_ts
        return checkpoint_ts

    def append(self, change: SchemaChange) -> None:
        """Take the next change."""
        assert change.commit_ts > self.last_ts, "changes come in the order of their commit_ts"
        self._changes[change.commit_ts] = change

    def at(self, ts: int) -> dict[str, tuple[int, TableRecord]]:
        """The tables in force for rows above `ts`, by name,
        with the commit_ts of the change that gave their schema.
        """
        tables: dict[str, tuple[int, TableRecord]] = {}
        for change in self._changes.values():
            if change.commit_ts > ts:
                break
            for name in change.dropped:
                tables.pop(name, None)
            for table in change.tables:
                tables[table.name] = change.commit_ts, table
        return tables

    def _has_tables(self, ts: int) -> bool:
        """Whether any table is in force for rows above `ts`; returns at the first one, as there may
        be a million.
        """
        gone: set[str] = set()
        for change in reversed(self._changes.values()):
            if change.commit_ts > ts:
                continue
            # For each name the latest change counts.
            if any(table.name not in gone for table in change.tables):
                return True
            gone |= {*change.dropped}
        return False

    def after(self, ts: int) -> list[SchemaChange]:
        """The changes above `ts`."""
        return [change for change in self._changes.values() if change.commit_ts > ts]

    def garbage(self, checkpoint_ts: int) -> Garbage:
        """The changes that can be dropped when all rows up to `checkpoint_ts` are at the target."""
        needed_ts = self.needed_from(checkpoint_ts)
        # A change at needed_ts itself stays, and so do the tables right before it: the reader may
        # have yet to take that change, and compares the tables on both sides of it.
        needed = {(ts, name) for name, (ts, _) in self.at(needed_ts - 1).items()}
        passed = [change for change in self._changes.values() if change.commit_ts < needed_ts]
        tables = tuple(
            (change.commit_ts, table)
            for change in passed
            for table in change.tables
            if (change.commit_ts, table.name) not in needed
        )
        kept = {ts for ts, _ in needed}
        return Garbage(
            tables, tuple(change.commit_ts for change in passed if change.commit_ts not in kept)
        )

    def forget(self, garbage: Garbage) -> None:
        """Remove the collected changes and tables."""
        gone: dict[int, set[str]] = {}
        for ts, table in garbage.tables:
            gone.setdefault(ts, set()).add(table.name)
        for ts, names in gone.items():
            change = self._changes[ts]
            kept = tuple(table for table in change.tables if table.name not in names)
            self._changes[ts] = replace(change, tables=kept)
        for ts in garbage.changes:
            del self._changes[ts]


def by_id(tables: Iterable[TableRecord]) -> tuple[TableRecord, ...]:
    """Tables in the order of a change."""
    return tuple(sorted(tables, key=lambda table: int(table.table_info["id"])))


def shortened(query: str) -> str:
    """A statement as it is kept: a very long one is cut."""
    return query if len(query) <= QUERY_CHARACTERS_MAX else query[:QUERY_CHARACTERS_MAX] + " …"


def table_json(table: TableRecord) -> bytes:
    """The value of a table's record."""
    doc = {"schema_name": table.schema_name, "table_info": table.table_info}
    return json.dumps(doc, separators=(",", ":")).encode()


def _table(value: bytes) -> TableRecord:
    doc = json.loads(value)
    return TableRecord(str(doc["schema_name"]), dict(doc["table_info"]))
