"""A dump against a model: any interleaving of log, chunks, watermarks, DDL,
acknowledgements, crashes and restarts.

The source is a dict, its log a list. What a reader has applied must at every cut hold nothing but
rows as the source had them there, no row may go back in time, and once the dump is done the reader
has every row.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest

from server.dump.mysql.window import HIGH, LOW, Chunk, Windows
from server.dump.progress import Cell, ChunkRead, Range, TableDump, TableProgress, TableState
from storage.model.event import DELETE

TABLE = 7
KEYS = 10
WALKS = 300
Rows = dict[int, str]


def key_of(number: int) -> bytes:
    return b"%03d" % number


@dataclass
class Event:
    """One transaction of the log; the source after it."""

    kind: str
    rows: Rows
    schema: int
    changes: list[tuple[int, str | None]] = field(default_factory=list)
    watermark: tuple[str, int] = ("", 0)
    xa: tuple[str, bool] = ("", False)
    """An XA transaction that waits from here on, or was committed."""


@dataclass
class Round:
    """One under way, as the engine has it."""

    low: str
    high: str
    filled: bool = False
    xa_prepared: frozenset[str] = frozenset()
    chunks: list[tuple[Chunk, ChunkRead]] = field(default_factory=list)


class Process:
    """What a crash takes: windows, cursors ahead of the durable ones, rows in the sorter."""

    def __init__(
        self, durable: dict[str, Any], position: int, schema: int, taken: set[str]
    ) -> None:
        self.windows = Windows(changed_bytes_max=40)
        self.table = TableDump(TableProgress.parse(durable))
        self.rounds: list[Round] = []
        self.sorter: list[tuple[int, int, bytes, str | None]] = []
        self.passed = position
        self.schema = schema
        self.taken = taken


class Model:
    def __init__(self) -> None:
        self.log: list[Event] = [Event("begin", dict.fromkeys(range(0, 10, 2), "s0 v000000"), 0)]
        self.versions = itertools.count(1)
        self.uuids = itertools.count()
        ranges = (Range(None, (Cell(3, key_of(4)),)), Range((Cell(3, key_of(4)),), None))
        begun = TableDump(TableProgress("shop.t", TABLE, "job"))
        begun.begin(ranges, 10)
        self.durable = begun.durable.to_doc()
        self.checkpoint = self.applied = 0
        self.target: dict[bytes, str] = {}
        self.process = Process(self.durable, 0, 0, set())
        self.committing: tuple[str, dict[int, str | None]] = ("", {})
        """An XA transaction that the log has committed, and no SELECT shows yet:
        what the rows were before.
        """

    # The source

    def append(
        self, kind: str, rows: Rows, changes: list[tuple[int, str | None]], **more: Any
    ) -> None:
        schema = more.pop("schema", self.log[-1].schema)
        self.log.append(Event(kind, rows, schema, changes, **more))

    @property
    def rows(self) -> Rows:
        return self.log[-1].rows

    @property
    def shown(self) -> Rows:
        """What SELECT shows."""
        shown = self.rows | self.committing[1]
        return {key: value for key, value in shown.items() if value is not None}

    def commit_xa(self, keys: list[int]) -> None:
        """One with two phases; it ends at `end_xa`. The same name comes again."""
        before = {key: self.rows.get(key) for key in keys}
        xid = f"x{next(self.uuids) % 2}"
        self.append("rows", dict(self.rows), [], xa=(xid, True))
        self.write(keys, keep=True)
        self.log[-1].xa = (xid, False)
        self.committing = (xid, before)

    def end_xa(self) -> None:
        self.committing = ("", {})

    def write(self, keys: list[int], keep: bool) -> None:
        version = next(self.versions)
        changes = [
            (key, f"s{self.log[-1].schema} v{version:06d}" if keep else None) for key in keys
        ]
        rows = {key: value for key, value in self.rows.items() if key not in keys}
        self.append(
            "rows", rows | {key: value for key, value in changes if value is not None}, changes
        )

    def move(self, old: int, new: int) -> None:
        if old in self.rows and new not in self.rows:
            rows = {key: value for key, value in self.rows.items() if key != old}
            value = f"s{self.log[-1].schema} v{next(self.versions):06d}"
            self.append("rows", rows | {new: value}, [(old, None), (new, value)])

    def truncate(self) -> None:
        self.append("truncate", {}, [])

    def move_rows(self, below: int) -> None:
        """A partition is emptied and another one brings rows: no event has any of them."""
        value = f"s{self.log[-1].schema} v{next(self.versions):06d}"
        kept = {key: value for key, value in self.rows.items() if key >= below}
        self.append("moved", kept | dict.fromkeys(range(0, below, 3), value), [])

    def alter(self) -> None:
        schema = self.log[-1].schema + 1
        rows = {key: f"s{schema} {value.split()[1]}" for key, value in self.rows.items()}
        self.append("alter", rows, [], schema=schema)

    # The dump

    def begin_round(self, lost: bool) -> None:
        uuid = next(self.uuids)
        begun = Round(f"low {uuid}", f"high {uuid}")
        self.process.windows.begin(begun.low, begun.high, [TABLE])
        self.append("rows", dict(self.rows), [], watermark=(begun.low, LOW))
        begun.xa_prepared = frozenset({self.committing[0]} - {""})
        if lost:
            self.process.windows.give_up(begun.high)
        else:
            self.process.rounds.append(begun)

    def read_chunk(self, limit: int) -> None:
        process = self.process
        begun = next(each for each in process.rounds if not each.filled)
        place = process.table.next_range(frozenset(read.place for _, read in begun.chunks))
        if place is None or process.table.durable.state is not TableState.DUMPING:
            return
        ahead, epoch = process.table.unread(place)
        after = ahead.after[0].data if ahead.after else b""
        until = ahead.until[0].data if ahead.until else b"\xff"
        found = sorted(
            (key_of(key), value)
            for key, value in self.shown.items()
            if after < key_of(key) <= until
        )
        taken = found[:limit]
        last = (Cell(3, taken[-1][0]),) if taken else None
        read = ChunkRead(place, epoch, last, len(found) < limit, len(taken), 10 * len(taken))
        version = process.windows.version(TABLE)
        # An engine reads by the columns it knows: of a table that has others by now it gets rows of
        # another shape.
        stale = self.log[-1].schema != process.schema
        values = pa.array(
            [(b"bad" if stale else b"") + value.encode() for _, value in taken], pa.binary()
        )
        chunk = Chunk(
            TABLE, version, read, pa.array([key for key, _ in taken], pa.binary()), values
        )
        process.table.note_read(read)
        begun.chunks.append((chunk, read))

    def end_round(self, lost: bool) -> None:
        process = self.process
        begun = next(each for each in process.rounds if not each.filled)
        begun.filled = True
        if lost:  # written, but the answer did not arrive
            process.windows.give_up(begun.high)
            process.rounds.remove(begun)
            for _, read in begun.chunks:
                process.table.set_back(read)
        else:
            process.windows.fill(
                begun.high, [chunk for chunk, _ in begun.chunks], begun.xa_prepared
            )
        self.append("rows", dict(self.rows), [], watermark=(begun.high, HIGH))

    # The log

    def pass_log(self, count: int) -> None:
        for _ in range(min(count, len(self.log) - 1 - self.process.passed)):
            self.pass_event()

    def pass_event(self) -> None:
        process = self.process
        process.passed += 1
        ts = process.passed
        event = self.log[ts]
        if event.kind in ("truncate", "moved"):
            process.windows.table_changed(TABLE)
            process.table.restart(TABLE)
            process.table.begin((Range(),), 0)
            process.sorter.append((ts, DELETE, b"", None))
        if event.kind == "moved":  # durable before the log goes on
            self.durable = process.table.durable.to_doc()
        if event.kind == "alter":
            process.windows.table_changed(TABLE)
            process.schema = event.schema
            process.sorter.append((ts, 0, b"", f"s{event.schema}"))
        if event.changes:
            process.windows.changed(
                TABLE, pa.array([key_of(key) for key, _ in event.changes], pa.binary())
            )
        for key, value in event.changes:
            process.sorter.append((ts, DELETE if value is None else 3, key_of(key), value))
        if event.xa[0]:
            process.windows.xa_moved(event.xa[0], waits=event.xa[1])
        if event.watermark[0]:
            self.pass_watermark(*event.watermark, ts)

    def pass_watermark(self, unique_identifier: str, kind: int, ts: int) -> None:
        process = self.process
        closed = process.windows.watermark(unique_identifier, kind, ts)
        if kind == HIGH:
            process.rounds = [each for each in process.rounds if each.high != unique_identifier]
        for each in closed:
            read = each.chunk.read
            if each.rows is None:
                process.table.set_back(read)
            elif process.table.count_chunk(read, ts):
                assert each.rows["commit_ts"].to_pylist() == [ts] * each.rows.num_rows
                pairs = zip(
                    each.rows["key"].to_pylist(), each.rows["value"].to_pylist(), strict=True
                )
                process.sorter += [(ts, 3, key, value.decode()) for key, value in pairs]

    # The reader

    def read_cut(self, share: int) -> None:
        """Apply a cut, and look at what is there then."""
        end = self.applied + max(0, self.process.passed - self.applied) * share // 4
        for ts, op, key, value in self.process.sorter:
            if self.applied < ts <= end:
                self.apply(op, key, value)
        self.applied = max(self.applied, end)
        source = {key_of(key): value for key, value in self.log[self.applied].rows.items()}
        for key, value in self.target.items():
            assert source.get(key) == value, (key, value, source.get(key), self.applied)

    def apply(self, op: int, key: bytes, value: str | None) -> None:
        if op == 0:
            self.target = {each: f"{value} {old.split()[1]}" for each, old in self.target.items()}
        elif not key:
            self.target.clear()
        elif value is None:
            self.target.pop(key, None)
        else:
            assert self.target.get(key, "s v").split()[1] <= value.split()[1], (
                "a row went back in time"
            )
            self.target[key] = value

    def acknowledge(self) -> None:
        self.checkpoint = max(self.checkpoint, self.applied)
        if self.process.table.settle(self.checkpoint):
            self.durable = self.process.table.durable.to_doc()

    # Faults

    def crash(self) -> None:
        """Begin again at the checkpoint; the reader has what it has,
        and asks for what comes behind that.
        """
        self.process = Process(
            self.durable, self.checkpoint, self.log[self.checkpoint].schema, set()
        )
        for event in self.log[
            : self.checkpoint + 1
        ]:  # as the log is read from a saved position before the checkpoint
            if event.xa[0]:
                self.process.windows.xa_moved(event.xa[0], waits=event.xa[1])

    def restart_dump(self) -> None:
        self.process.table.restart(TABLE)
        self.process.table.begin((Range(),), 0)
        self.durable = self.process.table.durable.to_doc()

    def what_is_durable_is_at_the_target(self) -> None:
        """Of ranges that count, no row that is in the source at the checkpoint and here is left
        out.
        """
        if self.applied < self.checkpoint:
            return
        source = self.log[self.applied].rows
        progress = TableProgress.parse(self.durable)
        if any(event.kind in ("truncate", "moved") for event in self.log):
            return  # what is durable may be of the table before
        for each in progress.ranges:
            low = each.after[0].data if each.after and not each.done else b""
            for key in source:
                inside = (
                    self.begin_of(each)
                    < key_of(key)
                    <= (each.until[0].data if each.until else b"\xff")
                )
                if inside and (each.done or key_of(key) <= low):
                    assert key_of(key) in self.target, (key, each)

    def begin_of(self, each: Range) -> bytes:
        return (
            key_of(4)
            if each.until is None and len(TableProgress.parse(self.durable).ranges) == 2
            else b""
        )

    def finish(self) -> None:
        """Without further faults the dump ends, and the reader has every row."""
        self.end_xa()
        for _ in range(60):
            if len(self.process.rounds) < 2 and all(each.filled for each in self.process.rounds):
                self.begin_round(lost=False)
            if any(not each.filled for each in self.process.rounds):
                self.read_chunk(3)
                self.read_chunk(3)
                self.end_round(lost=False)
            self.pass_log(len(self.log))
            while self.process.passed < len(self.log) - 1:
                self.pass_event()
            self.read_cut(4)
            self.acknowledge()
            if self.process.table.durable.state is TableState.DONE:
                break
        assert self.process.table.durable.state is TableState.DONE
        assert self.target == {key_of(key): value for key, value in self.rows.items()}


def step(model: Model, chance: random.Random) -> None:
    """One thing that can happen now."""
    process, key = model.process, chance.randrange
    if model.committing[0] and chance.random() < 0.3:
        model.end_xa()
    reads = any(not each.filled for each in process.rounds)
    actions: dict[str, Callable[[], None]] = {
        "write": lambda: model.write(
            chance.sample(range(KEYS), chance.choice((1, 1, 2, 5))), chance.random() < 0.7
        ),
        "move": lambda: model.move(key(KEYS), key(KEYS)),
        "truncate": model.truncate,
        "partitions": lambda: model.move_rows(key(KEYS)),
        "alter": model.alter,
        "cut": lambda: model.read_cut(chance.randint(1, 4)),
        "acknowledge": model.acknowledge,
        "crash": model.crash,
        "restart": model.restart_dump,
    }
    if model.committing[0]:  # it holds its locks
        for action in ("write", "move", "truncate", "alter"):
            del actions[action]
    else:
        actions["xa"] = lambda: model.commit_xa(chance.sample(range(KEYS), 2))
    if reads:
        actions["chunk"] = lambda: model.read_chunk(chance.randint(1, 4))
        actions["end"] = lambda: model.end_round(lost=chance.random() < 0.05)
    elif len(process.rounds) < 2:
        actions["round"] = lambda: model.begin_round(lost=chance.random() < 0.05)
    if process.passed < len(model.log) - 1:
        actions["log"] = lambda: model.pass_log(chance.randint(1, 6))
    chance.choices(list(actions.values()), [WEIGHTS[name] for name in actions])[0]()


WEIGHTS = {
    "write": 30,
    "move": 5,
    "truncate": 0.5,
    "partitions": 0.5,
    "alter": 2,
    "xa": 5,
    "round": 20,
    "chunk": 25,
    "end": 15,
    "log": 40,
    "cut": 12,
    "acknowledge": 12,
    "crash": 3,
    "restart": 0.5,
}


@pytest.mark.parametrize("seed", range(WALKS))
def test_any_interleaving_gives_the_source_and_never_an_older_row(seed: int) -> None:
    chance = random.Random(seed)
    model = Model()
    for _ in range(chance.choice((20, 60, 150))):
        step(model, chance)
        model.what_is_durable_is_at_the_target()
    model.finish()


def test_what_was_read_before_rows_moved_is_read_again_after_a_crash() -> None:
    """The checkpoint passes the statement before anything of the table that began anew is at the
    target.
    """
    model = Model()
    model.begin_round(lost=False)
    model.read_chunk(4)
    model.end_round(lost=False)
    model.pass_log(9)
    model.read_cut(4)
    model.acknowledge()
    model.move_rows(5)
    model.pass_log(9)
    model.read_cut(4)
    model.acknowledge()
    assert model.checkpoint == len(model.log) - 1
    assert model.target == {}
    model.crash()
    model.finish()
