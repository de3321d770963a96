"""Random transactions of a TiDB table that move, swap and shift keys,
over many batches and spills, against an oracle.

    python -m tests.fuzz.tidb.moves --seconds 120 [--seed N]

A life is one table without clustered key, so that a change of the key is an update of one record:
its rows go through a real sorter, which spills, and the sink's batches, which end anywhere; the
process dies now and then, and all above the checkpoint is pulled again. Columns are renamed,
swapped, added and dropped between, by the ids of TableInfo. A reader that applies cuts in their
order, by column id, must have the oracle's rows at the end of each, and is never told to insert a
key that it has, or to delete one that it has not.
"""

import argparse
import itertools
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from sink.manager import SinkManager
from sink.mounter import COLUMN_ID, DEFAULT
from sink.mounts import Mounting
from sink.tidb_mounter import TidbMounter
from sorter import Sorter, SorterSettings
from storage.model.event import DELETE, INSERT, UPDATE, raw_batch
from storage.model.span import Span
from storage.tidb.field_type import Flag
from storage.tidb.record import record_key
from storage.tidb.row import encode_row
from storage.tidb.schema import Column, Index, TableInfo

TABLE: Final = 9
SPAN: Final = Span(TABLE, b"t", b"u")
KEY: Final = 1
"""The id of the key's column."""
NAMES: Final = ("a", "b", "c", "d", "e")
STEPS: Final = 20
Row = dict[int, Any]
"""Values by column id."""


@dataclass(frozen=True)
class Change:
    """One transaction's rows as a puller has them, in no order; or the columns above a ts."""

    ts: int
    rows: tuple[tuple[int, bytes, bytes | None, bytes | None], ...] = ()
    columns: tuple[Column, ...] = ()


class WrongError(AssertionError):
    """The reader has other rows than the oracle."""


@dataclass
class Life:
    """One table's life, made by one seed."""

    seed: int
    directory: Path
    told: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        """Raises WrongError with the seed."""
        self.random = random.Random(self.seed)
        self.columns = [
            replace(Column.bigint("id"), id=KEY, flags=Flag.NOT_NULL),
            replace(Column.bigint("a"), id=2),
            replace(Column.varchar("b", 20), id=3),
        ]
        self.free_id, self.ts = 4, 10
        self.stored: dict[int, bytes] = {}  # by handle
        self.handles: dict[int, int] = {}  # by key
        self.oracle: dict[int, Row] = {}
        self.history: list[Change] = [Change(0, columns=tuple(self.columns))]
        self.lake: dict[int, Row] = {}
        self.at_ts = self.acked_ts = 0
        self.next_handle = itertools.count(1)
        self._begin()
        try:
            for _ in range(STEPS):
                self._step()
            self._read_to(self.ts)
            self._compare()
        finally:
            self._end()
        self.told["lives"] += 1

    # Daemons

    def _begin(self) -> None:
        """A capture that has nothing, and pulls all above the checkpoint."""
        directory = self.directory / "sorter"
        shutil.rmtree(directory, ignore_errors=True)
        memory, block = (
            self.random.choice((0, 0, 64 << 10, 1 << 20)),
            self.random.choice((4, 16, 128)) << 10,
        )
        self.sorter = Sorter(
            directory,
            SorterSettings(memory_bytes=memory, shards=1, clean_interval_s=0, block_bytes=block),
        )
        quota = self.random.choice((32 << 10, 256 << 10, 16 << 20))
        self.manager = SinkManager(
            self.sorter, memory_quota_bytes=quota, workers=1, split_txn=self.random.random() < 0.7
        )
        start_ts = self.acked_ts
        in_force = [each for each in self.history if each.columns and each.ts <= start_ts]
        self.sorter.add_table(SPAN, start_ts)
        self.manager.add_table(SPAN, start_ts, _mounting(in_force[-1].columns))
        if self.random.random() < 0.5:
            self.manager.start()
        for change in self.history:
            if change.ts > start_ts:
                self._pull(change)
        self.sorter.resolve(SPAN, max(self.ts, start_ts))

    def _end(self) -> None:
        self.manager.stop()
        self.sorter.close()

    def _pull(self, change: Change) -> None:
        if change.columns:
            self.sorter.resolve(SPAN, change.ts)
            self.manager.change_table(SPAN, change.ts, _mounting(change.columns))
            return
        rows = list(change.rows)
        self.random.shuffle(rows)
        while rows:
            size = self.random.choice((1, 50, 1000, 5000))
            part, rows = rows[:size], rows[size:]
            ops, keys, values, olds = (list(each) for each in zip(*part, strict=True))
            count = len(part)
            batch = raw_batch([change.ts] * count, [change.ts - 1] * count, ops, keys, values, olds)
            self.sorter.add(SPAN, batch)

    # Steps

    def _step(self) -> None:
        dice = self.random.random()
        if dice < 0.08:
            self.told["kills"] += 1
            self._end()
            self._begin()
        elif dice < 0.2 and self.oracle:
            self._alter()
        elif dice < 0.5:
            self._read_to(self.random.randint(self.at_ts, self.ts))
        else:
            self._transact()

    def _transact(self) -> None:
        """One transaction: what it makes of the rows, record by record."""
        self.ts += self.random.choice((1, 2, 10))
        before, kind = dict(self.oracle), "fill"
        if before:
            kind = self.random.choice(
                ("shift", "shift", "swap", "cycle", "scatter", "write", "delete", "mixed", "fill")
            )
        self.told[kind] += 1
        moved = self._moved(kind, list(before))
        new = {moved.get(key, key): row | {KEY: moved.get(key, key)} for key, row in before.items()}
        handles = {moved.get(key, key): handle for key, handle in self.handles.items()}
        touched = {new_key for key, new_key in moved.items() if key != new_key}
        gone: list[int] = []
        if kind in ("delete", "mixed"):
            gone = [key for key in new if self.random.random() < 0.2]
        if kind in ("write", "mixed"):
            for key in new:
                if self.random.random() < 0.3:
                    new[key] |= {
                        each.id: self._value(each) for each in self.columns if each.id != KEY
                    }
                    touched.add(key)
        gone_handles = [handles.pop(key) for key in gone]
        for key in gone:
            del new[key]
        touched -= {*gone}  # their keys may be given out again below
        if kind in ("fill", "mixed"):
            for key in self._fresh(new):
                new[key] = {each.id: self._value(each) for each in self.columns} | {KEY: key}
                handles[key] = next(self.next_handle)
                touched.add(key)
        self._commit(new, handles, touched, gone_handles)

    def _moved(self, kind: str, keys: list[int]) -> dict[int, int]:
        count = len(keys)
        if kind in ("shift", "mixed"):
            step = self.random.choice((1, -1, 7))
            return {key: key + step for key in keys}
        if kind == "swap":
            return dict(zip(keys, reversed(keys), strict=True))
        if kind == "cycle":
            return {key: keys[(place + 1) % count] for place, key in enumerate(keys)}
        if kind == "scatter":
            return dict(zip(keys, self.random.sample(range(-count, 3 * count), count), strict=True))
        return {}

    def _fresh(self, there: dict[int, Row]) -> list[int]:
        """New keys, of deleted rows among them."""
        count = self.random.choice((1, 20, 400, 2000))
        return [
            key for key in self.random.sample(range(-count, 4 * count), count) if key not in there
        ]

    def _value(self, column: Column) -> Any:
        if self.random.random() < 0.1:
            return None
        return (
            f"v{self.random.randrange(1000)}" * 2
            if column.is_text
            else self.random.randrange(-99, 1 << 20)
        )

    def _commit(
        self, new: dict[int, Row], handles: dict[int, int], touched: set[int], gone: list[int]
    ) -> None:
        changes: list[tuple[int, bytes, bytes | None, bytes | None]] = [
            (DELETE, record_key(TABLE, handle), None, self.stored.pop(handle)) for handle in gone
        ]
        for key in touched:
            handle = handles[key]
            was, now = self.stored.get(handle), self._encoded(new[key])
            op = INSERT if was is None else UPDATE
            changes.append((op, record_key(TABLE, handle), now, was))
            self.stored[handle] = now
        self.oracle, self.handles = new, handles
        self.told["rows"] += len(changes)
        change = Change(self.ts, tuple(changes))
        self.history.append(change)
        self._pull(change)
        self.sorter.resolve(SPAN, self.ts)

    def _encoded(self, row: Row) -> bytes:
        cells = {each.id: _cell(row[each.id]) for each in self.columns}
        return encode_row(cells)

    def _alter(self) -> None:
        """A DDL: other columns above this ts, by id."""
        self.ts += 3
        columns, kind = (
            list(self.columns),
            self.random.choice(("rename", "swap", "add", "drop", "move", "again")),
        )
        others = [place for place, each in enumerate(columns) if each.id != KEY]
        unused = [name for name in NAMES if name not in {each.name for each in columns}]
        if kind == "rename" and others and unused:
            place = self.random.choice(others)
            columns[place] = replace(columns[place], name=self.random.choice(unused))
        elif kind == "swap" and len(others) > 1:
            one, two = self.random.sample(others, 2)
            names = columns[one].name, columns[two].name
            columns[one], columns[two] = (
                replace(columns[one], name=names[1]),
                replace(columns[two], name=names[0]),
            )
        elif kind == "drop" and len(others) > 1:
            del columns[self.random.choice(others)]
        elif kind == "move":
            self.random.shuffle(columns)
        elif kind == "again" and others:  # DROP v, ADD v
            place = self.random.choice(others)
            columns[place] = self._added(columns[place].name)
        elif kind == "add" and unused:
            columns.insert(
                self.random.randint(0, len(columns)), self._added(self.random.choice(unused))
            )
        self.told[f"DDL {kind}"] += 1
        held = {
            each.id: None if each.origin_default is None else int(each.origin_default)
            for each in columns
        }
        self.columns = columns
        self.oracle = {
            key: {each.id: row.get(each.id, held[each.id]) for each in columns}
            for key, row in self.oracle.items()
        }
        change = Change(self.ts, columns=tuple(columns))
        self.history.append(change)
        self._pull(change)

    def _added(self, name: str) -> Column:
        number, self.free_id = self.free_id, self.free_id + 1
        default = self.random.choice((None, "5", "-7"))
        return replace(Column.bigint(name), id=number, origin_default=default, default=default)

    # The reader

    def _read_to(self, end_ts: int) -> None:
        """Cut by cut, never across a DDL."""
        ends = [each.ts for each in self.history if each.columns and self.at_ts < each.ts <= end_ts]
        for end in dict.fromkeys((*ends, end_ts)):
            if end > self.at_ts:
                for batch in self.manager.read(SPAN, self.at_ts, end):
                    self._apply(batch)
                self.at_ts = end
            if any(each.columns and each.ts == end for each in self.history):
                self._follow(next(each for each in self.history if each.columns and each.ts == end))
        if self.random.random() < 0.6:
            self.acked_ts = max(self.acked_ts, self.manager.ack(self.at_ts, SPAN))
        self.told["cuts"] += 1

    def _apply(self, batch: pa.RecordBatch) -> None:
        ids = {
            each.name: int(each.metadata[COLUMN_ID])
            for each in batch.schema
            if not each.name.startswith("_")
        }
        for change in batch.to_pylist():
            row = {ids[name]: value for name, value in change.items() if name in ids}
            key, op = row[KEY], change["_op"]
            if op == "delete":
                if self.lake.pop(key, None) is None:
                    raise WrongError(
                        f"seed {self.seed}: {key} is deleted at {change['_commit_ts']}, and is "
                        "not there"
                    )
                continue
            if (op == "insert") == (key in self.lake):
                raise WrongError(
                    f"seed {self.seed}: {op} of {key} at {change['_commit_ts']}, there: "
                    f"{key in self.lake}"
                )
            self.lake[key] = row

    def _follow(self, change: Change) -> None:
        """As a target: columns by id, new ones with what their field says."""
        schema = _mounter(change.columns).schema
        held = {
            int(each.metadata[COLUMN_ID]): json.loads(each.metadata.get(DEFAULT, b"null"))
            for each in schema
            if not each.name.startswith("_")
        }
        self.lake = {
            key: {number: row.get(number, held[number]) for number in held}
            for key, row in self.lake.items()
        }

    def _compare(self) -> None:
        if self.lake != self.oracle:
            lost, ghosts = self.oracle.keys() - self.lake, self.lake.keys() - self.oracle
            other = next((f"{key}: {self.lake[key]}, not {row}" for key, row in self.oracle.items()
                          if key in self.lake and self.lake[key] != row), "")  # fmt: skip
            raise WrongError(
                f"seed {self.seed}: lost {sorted(lost)[:3]}, ghosts {sorted(ghosts)[:3]}, {other}"
            )


def _cell(value: Any) -> bytes | None:
    if value is None:
        return None
    return value.encode() if isinstance(value, str) else value.to_bytes(8, "little", signed=True)


def _mounter(columns: tuple[Column, ...]) -> TidbMounter:
    placed = tuple(replace(each, offset=place) for place, each in enumerate(columns))
    (key,) = (each.offset for each in placed if each.id == KEY)
    primary = Index(1, "PRIMARY", (key,), unique=True, primary=True, public=True, whole=True)
    return TidbMounter(TableInfo(TABLE, "t", placed, (primary,)), "db")


def _mounting(columns: tuple[Column, ...]) -> Mounting:
    mounter = _mounter(columns)
    return Mounting(mounter.mount, split=mounter.split)


def lives(seconds: float, *, first: int, count: int = 1 << 30) -> Counter[str]:
    """Run tables' lives, of seeds one after the other; what happened, counted."""
    told: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory(prefix="tm-moves-") as directory:
            Life(seed, Path(directory), told).run()
        if time.monotonic() > deadline:
            break
    return told


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()
    first = random.randrange(1 << 31) if arguments.seed is None else arguments.seed
    print(f"first seed {first}", flush=True)
    print(dict(lives(arguments.seconds, first=first)))


if __name__ == "__main__":
    main()
