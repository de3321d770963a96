"""What is known of all transactions and DDL: the reference that lakes and stores are compared
with.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from storage.codec import encode_bytes
from storage.kv import Reader
from storage.mvcc.engine import Versions
from storage.mvcc.record import ROLLBACK

Row = dict[str, Any]
Tables = dict[str, dict[int, Row]]
"""Rows by number, by table."""
Writes = dict[tuple[str, int], Row | None]
TABLES = ("accounts", "transfers")


@dataclass(frozen=True, slots=True)
class Ddl:
    """What a DDL does to rows: a table gets a column, or, without one, is emptied."""

    table: str
    column: str = ""

    def apply(self, tables: Tables) -> None:
        """Let it come in force."""
        if not self.column:
            tables[self.table].clear()
        for number, row in tables[self.table].items():
            tables[self.table][number] = {self.column: None, **row}


@dataclass(slots=True, eq=False)
class Txn:
    """One transaction as its client knows it; `commit_ts` 0: it did not commit, None: unknown."""

    start_ts: int
    writes: Writes
    keys: list[bytes]
    """All that it writes, where it lies in the store."""
    ddl: Ddl | None = None
    commit_ts: int | None = None


@dataclass(slots=True)
class History:
    """All transactions, and their effects at any timestamp."""

    txns: list[Txn] = field(default_factory=list)
    doubtful: list[Txn] = field(default_factory=list)
    newest_ts: int = 0
    """The greatest timestamp that anybody was told."""

    def begin(self, txn: Txn) -> None:
        """A client is about to commit."""
        self.txns.append(txn)
        self.newest_ts = max(self.newest_ts, txn.start_ts)
        self.doubtful.append(txn)

    def end(self, txn: Txn, commit_ts: int) -> None:
        """The client knows the end."""
        txn.commit_ts = commit_ts
        self.newest_ts = max(self.newest_ts, commit_ts)
        self.doubtful.remove(txn)

    def at(self, ts: int) -> Tables:
        """The tables at `ts`; transactions that are doubtful by then are later than that."""
        tables: Tables = {name: {} for name in TABLES}
        done = [(txn.commit_ts, txn) for txn in self.txns if txn.commit_ts]
        for commit_ts, txn in sorted(done, key=lambda pair: pair[0]):
            # Rows up to a DDL's commit_ts have the old schema.
            if txn.ddl is not None and commit_ts < ts:
                txn.ddl.apply(tables)
            elif txn.ddl is None and commit_ts <= ts:
                apply(tables, txn.writes)
        return tables

    def settle(self, readers: Iterable[Reader]) -> None:
        """Look into the stores what became of transactions whose clients do not know."""
        states = [Versions(reader) for reader in readers]
        for txn in list(self.doubtful):
            ends = {_end(state, encode_bytes(key), txn) for state in states for key in txn.keys}
            if ends != {None}:
                self.end(txn, max(end for end in ends if end is not None))


def _end(versions: Versions, encoded: bytes, txn: Txn) -> int | None:
    """When a transaction committed, as the records of one key say; 0: it never will."""
    for commit_ts, write in versions.writes(encoded):
        if write.start_ts == txn.start_ts:
            return 0 if write.kind == ROLLBACK else commit_ts
        if commit_ts == txn.start_ts and write.overlapped_rollback:
            return 0
    return None


def apply(tables: Tables, writes: Writes) -> None:
    """Let one transaction's writes come in force."""
    for (table, number), row in writes.items():
        if row is None:
            tables[table].pop(number, None)
        else:
            tables[table][number] = row
