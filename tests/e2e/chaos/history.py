"""What the source says happened: MariaDB's own log, told by MariaDB's own tool.

`mariadb-binlog` shares no code with the product. A transaction is one that ends with a commit; one
that a crash cut off in the middle of a file never was.
"""

import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Value = int | str | None
Row = tuple[Value, ...]
Tables = dict[str, dict[Value, Row]]
"""Rows by table, then by key, the first column."""
_GTID = re.compile(r"^#.*\bGTID (\d+-\d+-\d+)")
_CHANGE = re.compile(r"^### (?:INSERT INTO|UPDATE|DELETE FROM) `(\w+)`\.`(\w+)`")
_CELL = re.compile(r"^###   @\d+=(.*)$")


@dataclass
class Change:
    """One row of one table: what it was, and what it is; nothing where it was, or is, not there."""

    table: str
    old: list[Value] = field(default_factory=list)
    new: list[Value] = field(default_factory=list)


@dataclass
class Transaction:
    """One that committed."""

    gtid: str
    changes: list[Change] = field(default_factory=list)

    @property
    def mark(self) -> int | None:
        """Its number, if it is one of the workload's."""
        marks = [change.new[0] for change in self.changes if change.table == "marks"]
        return int(str(marks[0])) if marks else None

    def apply(self, tables: Tables) -> None:
        """Do it to rows, in the log's order.

        Raises:
            KeyError: it changes a row that is not there: the log is not read right.
        """
        for change in self.changes:
            rows = tables.setdefault(change.table, {})
            if change.old:
                del rows[change.old[0]]
            if change.new:
                rows[change.new[0]] = tuple(change.new)


def read(files: Sequence[Path], database: str) -> list[Transaction]:
    """All transactions that changed tables of a database, in the order of their commits."""
    command = ("mariadb-binlog", "--no-defaults", "--verbose", "--base64-output=decode-rows")
    transactions: list[Transaction] = []
    for file in files:
        # A file that a crash has cut off ends with an error, behind all that is whole.
        done = subprocess.run([*command, str(file)], capture_output=True, text=True, check=False)
        transactions += parse(done.stdout.splitlines(), database)
    return transactions


def parse(lines: Iterable[str], database: str) -> Iterator[Transaction]:
    """The transactions that one file's text has whole."""
    transaction = Transaction("")
    change = Change("")
    cells: list[Value] = []
    is_ours = False
    for line in lines:
        if found := _GTID.match(line):
            transaction = Transaction(found[1])
        elif found := _CHANGE.match(line):
            change, is_ours = Change(found[2]), found[1] == database
            if is_ours:
                transaction.changes.append(change)
        elif line == "### WHERE":
            cells = change.old
        elif line == "### SET":
            cells = change.new
        elif is_ours and (found := _CELL.match(line)):
            cells.append(_value(found[1]))
        elif line.startswith("COMMIT"):
            if transaction.changes:
                yield transaction
            transaction = Transaction("")


def _value(text: str) -> Value:
    if text == "NULL":
        return None
    if text.startswith("'"):
        return text[1:-1]
    # A negative number is told without its sign, too: -1 (4294967295).
    return int(text.partition(" ")[0])
