"""The cuts of a changefeed whose tables are in a catalog: rows of an Iceberg table of that catalog,
`tidemark_cuts.<changefeed>`, and the right to write in the summaries of its snapshots.

Wherever a driver runs, it needs nothing but the catalog. Each step of a driver (take over,
announce, commit) is one snapshot on top of its own last one, so the catalog itself refuses the step
of a driver that was overtaken. The state (`_State`) is in the summary of the newest snapshot.
Invariants, besides those of `lake.manifest`:
1. Taking over is a snapshot, too: from then on the former driver can neither announce nor commit.
2. A cut that was announced and not committed is announced by the successor with the same end: both
   drivers then write the same changes, and the fence of each table accepts one of them.
"""

import dataclasses
import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import SparkSession

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.jvm import java_items
from pyspark_tidemark.lake.cut_record import CutRecord, Shown, records, rolled, shown_by
from pyspark_tidemark.lake.iceberg.catalog import Catalog, Send
from pyspark_tidemark.lake.iceberg.files import read_columns, write_rows
from pyspark_tidemark.lake.iceberg.java_catalog import MultiTableCommit, commit_exactly
from pyspark_tidemark.lake.iceberg.storage import Storage
from pyspark_tidemark.lake.iceberg.types import with_field_ids
from pyspark_tidemark.lake.manifest import (
    SINGLE_TABLES,
    WHOLE_CUTS,
    check_follows,
    check_mode,
)

NAMESPACE: Final = "tidemark_cuts"
SCHEMA: Final = pa.schema(
    [
        ("start_ts", pa.int64()),
        ("end_ts", pa.int64()),
        ("applied_at", pa.timestamp("us", tz="UTC")),
        ("cut", pa.string()),
    ]
)
"""`cut` is a line of docs/format/lake-manifest.md."""
_LINES: Final = with_field_ids(pa.schema([SCHEMA.field("cut")]), {"cut": len(SCHEMA)})
_STATE: Final = "tidemark.state"
_ROLL_UP_CUTS: Final = 64
"""This many cuts in files of their own become one file; each is two snapshots until then."""
_STEPS: Final = 2
"""Snapshots of a cut: it is announced, then committed."""
_TAKE_TRIES: Final = 10
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclasses.dataclass(frozen=True)
class _State:
    """The state in the newest snapshot: the driver that made it, and the cut that it has begun."""

    driver: str
    begun: tuple[int, int] | None = None
    """The cut (start_ts, end_ts) that was announced and is not committed."""
    moved: tuple[int, ...] = ()
    """See `Manifest.note_moved`."""

    @classmethod
    def parse(cls, text: str | None) -> "_State":
        if text is None:
            return cls("")
        fields: dict[str, Any] = json.loads(text)
        begun = fields["begun"]
        return cls(fields["driver"], tuple(begun) if begun else None, tuple(fields["moved"]))


class CatalogManifest:
    """See `lake.manifest.Manifest`."""

    def __init__(self, catalog: Catalog, name: str, table: Any) -> None:
        """The manifest as it is in a table, without the right to write; see `opened`."""
        self._catalog = catalog
        self._name = name
        self._table = table
        self.multi_table_commit: MultiTableCommit | None = None
        """Where the tables of a cut wait for this manifest's commit; None: each has its own."""
        self._mine = 0
        self._state = _State("")
        self._since_tidied = 0
        self.last: CutRecord | None = None

    @classmethod
    @contextmanager
    def opened(
        cls,
        spark: SparkSession,
        root: str,
        changefeed: str,
        *,
        mode: str | None = None,
        idle_s: float = 0.0,
    ) -> Iterator["CatalogManifest"]:
        """The manifest for the block, made if there is none, and the right to write,
        taken from whoever has it, after `idle_s` in which nobody used it.

        Raises:
            SourceError: ErrTargetForeign, ErrTargetMode, ErrTargetBusy, and those of the catalog.
        """
        catalog, name = _catalog(spark, root, changefeed), _name(changefeed)
        table = catalog.load(name)
        if table is None:
            table = catalog.create(name, SCHEMA, ())
        catalog.check_own(table, name)
        # Fails where files cannot be written, before the takeover stops a job that can write.
        catalog.layout(table, ())
        manifest = cls(catalog, name, table)
        _check_idle(table, idle_s)
        check_mode(manifest._newest(), mode)
        manifest._take()
        yield manifest

    @property
    def commits(self) -> str:
        """See `Manifest`."""
        return SINGLE_TABLES if self.multi_table_commit is None else WHOLE_CUTS

    def announce(self, start_ts: int, end_ts: int, *, moved: bool = False) -> int:
        """See `Manifest`; ErrCutGap, too, where a cut was begun that starts elsewhere."""
        begun = self._state.begun
        if begun is not None and begun[0] != start_ts:
            raise SourceError(
                "ErrCutGap",
                f"a job has begun a cut at {begun[0]}, and the next one starts at {start_ts}: "
                "the changefeed's checkpoint was moved; start with a new changefeed and target",
            )
        if begun is not None and not moved:
            end_ts = begun[1]
        self._step(_nothing, dataclasses.replace(self._state, begun=(start_ts, end_ts)))
        return end_ts

    def commit(self, record: CutRecord) -> None:
        """See `Manifest`."""
        check_follows(self.last, record)
        assert self._state.begun == (record.start_ts, record.end_ts), "a cut is announced"
        self._append(record)
        self._since_tidied += 1

    def replace(self, record: CutRecord) -> None:
        """Write the newest cut anew, its tables repaired; durable when it returns.

        Raises:
            SourceError: ErrRepairUnsupported, a later cut was begun; ErrTargetBusy.
        """
        assert self.last is not None
        assert record.end_ts == self.last.end_ts, "a cut is never taken back"
        if self._state.begun is not None:
            raise SourceError(
                "ErrRepairUnsupported",
                "a job has begun a cut and not ended it: start the lake's job, stop it when it "
                "has applied a cut, and try again",
            )
        self._append(record)

    def note_moved(self, ts: int) -> None:
        """See `Manifest`."""
        if not self.moved_at(ts):
            moved = (*self._state.moved, ts)
            self._step(_nothing, dataclasses.replace(self._state, moved=moved))

    def moved_at(self, ts: int) -> bool:
        """See `Manifest`."""
        return ts in self._state.moved

    def cuts(self) -> list[CutRecord]:
        """See `Manifest`."""
        return _cuts(self._catalog, self._current())

    def each_cut(self) -> Iterator[CutRecord]:
        """See `Manifest`."""
        table = self._current()
        storage = self._catalog.storage(table)
        for file in _files(self._catalog, table):
            yield from _read(storage, [file])

    def shown(self) -> dict[str, Shown]:
        """See `Manifest`."""
        table = self._current()
        files = _files(self._catalog, table)
        # The first cut of a file of many names all tables.
        many = [place for place, file in enumerate(files) if _is_rolled_up(file)]
        newest = files[many[-1] if many else 0 :]
        return shown_by(_read(self._catalog.storage(table), newest))

    def tidy(self, horizon: datetime) -> None:
        """Once in `_ROLL_UP_CUTS`, put their files into one, forget files from before `horizon`,
        and the snapshots of the steps.
        """
        if self._since_tidied < _ROLL_UP_CUTS:
            return
        self._since_tidied = 0
        table = self._current()
        storage, files = self._catalog.storage(table), _files(self._catalog, table)
        single = [file for file in files if not _is_rolled_up(file)]
        if not single:
            # Jobs that ended before they committed a cut leave snapshots of steps only.
            self._expire()
            return
        older = [file for file in files if _is_rolled_up(file)]
        replaced = [*single, *self._outdated(older, horizon)]
        new = rolled(_read(storage, older[-1:]), _read(storage, single))
        self._step(lambda transaction: self._rewrite(transaction, replaced, new), self._state)
        self._expire()

    def _take(self) -> None:
        multi_table_commit = self._catalog.multi_table_commit()
        for _ in range(_TAKE_TRIES):
            transaction = self._catalog.begin(self._current())
            state = dataclasses.replace(_state(transaction.table()), driver=uuid.uuid4().hex)
            try:
                send = partial(multi_table_commit.first, self._catalog.identifier(self._name))
                self._commit(transaction, _nothing(transaction), state, send)
            except SourceError as err:
                # A step of the job that runs came between: again, on top of that.
                if err.code != "ErrTargetBusy":
                    raise
                continue
            self.last = self._newest()
            self._since_tidied = self._left_untidied()
            self.multi_table_commit = multi_table_commit if multi_table_commit.is_offered else None
            return
        raise SourceError(
            "ErrTargetBusy", "another job writes this lake; stop it first", retryable=True
        )

    def _step(
        self, update: Callable[[Any], Any], state: _State, send: Send = commit_exactly
    ) -> None:
        """Commit one snapshot on top of our last one.

        Raises:
            SourceError: ErrTargetBusy, there is another one by now.
        """
        # The table's metadata is the newest here, so a takeover shows before the commit; one that
        # comes later makes the commit fail, as it replaces exactly what the transaction began with.
        transaction = self._catalog.begin(self._current())
        if int(transaction.table().currentSnapshot().snapshotId()) != self._mine:
            raise _taken_over()
        try:
            self._commit(transaction, update(transaction), state, send)
        except SourceError as err:
            raise _taken_over() if err.code == "ErrTargetBusy" else err from None

    def _commit(
        self, transaction: Any, update: Any, state: _State, send: Send = commit_exactly
    ) -> None:
        text = json.dumps(dataclasses.asdict(state))
        self._mine = self._catalog.commit_last(transaction, update, {_STATE: text}, send)
        self._state = state

    def _append(self, record: CutRecord) -> None:
        file = self._written([record])
        send: Send = commit_exactly
        if self.multi_table_commit is not None:
            send = partial(self.multi_table_commit.commit, self._catalog.identifier(self._name))
        self._step(
            lambda transaction: transaction.newAppend().appendFile(file),
            dataclasses.replace(self._state, begun=None),
            send,
        )
        self.last = record

    def _rewrite(self, transaction: Any, replaced: Sequence[Any], new: Sequence[CutRecord]) -> Any:
        update = transaction.newOverwrite().addFile(self._written(new))
        for file in replaced:
            update.deleteFile(file)
        return update

    def _written(self, cuts: Sequence[CutRecord]) -> Any:
        columns = [
            [cut.start_ts for cut in cuts],
            [cut.end_ts for cut in cuts],
            [datetime.fromisoformat(cut.applied_at) for cut in cuts],
            [cut.to_json() for cut in cuts],
        ]
        arrays = [
            pa.array(column, kind) for column, kind in zip(columns, SCHEMA.types, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
        table = self._current()
        [file] = write_rows(self._catalog.layout(table, ()), iter([batch]))
        return self._catalog.java_files.data(table, file)

    def _left_untidied(self) -> int:
        """How many cuts' files and steps earlier runs of the job have left: a job that is often
        restarted would never roll them up by its own count.
        """
        table = self._current()
        single = sum(not _is_rolled_up(file) for file in _files(self._catalog, table))
        return max(single, len(table.snapshots()) // _STEPS)

    def _newest(self) -> CutRecord | None:
        table = self._current()
        cuts = _read(self._catalog.storage(table), _files(self._catalog, table)[-1:])
        return cuts[-1] if cuts else None

    def _current(self) -> Any:
        """The table; loaded anew where it came with credentials that end."""
        if self._catalog.storage(self._table).is_lent:
            self._table = self._catalog.load(self._name)
        return self._table

    def _outdated(self, older: Sequence[Any], horizon: datetime) -> list[Any]:
        """The files whose cuts were all applied before `horizon`, but for the last of these:
        it shows that time.
        """
        least = (horizon - _EPOCH) // timedelta(microseconds=1)
        field = self._table.schema().findField("applied_at")
        before = []
        for file in older:
            ends = self._catalog.java_files.bounds(file, field.fieldId(), field.type())
            if ends is None or int(ends[1]) >= least:
                break
            before.append(file)
        return before[:-1]

    def _expire(self) -> None:
        old = {int(snapshot.snapshotId()) for snapshot in java_items(self._table.snapshots())}
        self._catalog.expire(
            self._table, sorted(old - {self._mine} - self._catalog.marked(self._table))
        )


def cuts_in_catalog(spark: SparkSession, root: str, changefeed: str) -> list[CutRecord]:
    """The kept cuts of a changefeed in a catalog; empty: the only one that the catalog has.

    Raises:
        SourceError: ErrTargetInvalid, it has several; those of the catalog.
    """
    catalog = _catalog(spark, root, changefeed)
    if not changefeed:
        names = catalog.names(NAMESPACE)
        if len(names) > 1:
            raise SourceError(
                "ErrTargetInvalid",
                f"this catalog has the lakes of several changefeeds, {', '.join(names)}: say which",
            )
        changefeed = "".join(names)
    table = catalog.load(_name(changefeed)) if changefeed else None
    return [] if table is None else _cuts(catalog, table)


def _catalog(spark: SparkSession, root: str, changefeed: str) -> Catalog:
    return Catalog(spark, root, changefeed, kind="tidemark-cuts")


def _name(changefeed: str) -> str:
    return f"{NAMESPACE}.{changefeed}"


def _state(table: Any) -> _State:
    snapshot = table.currentSnapshot()
    return _State.parse(None if snapshot is None else snapshot.summary().get(_STATE))


def _nothing(transaction: Any) -> Any:
    """A snapshot without changes, for what its summary says."""
    return transaction.newAppend()


def _files(catalog: Catalog, table: Any) -> list[Any]:
    """The data files, in the order of their cuts."""
    return sorted(catalog.files(table), key=lambda file: int(file.dataSequenceNumber()))


def _is_rolled_up(file: Any) -> bool:
    return int(file.recordCount()) >= _ROLL_UP_CUTS


def _cuts(catalog: Catalog, table: Any) -> list[CutRecord]:
    return _read(catalog.storage(table), _files(catalog, table))


def _read(storage: Storage, files: Sequence[Any]) -> list[CutRecord]:
    """The cuts in files; of one that was written anew, the newest line."""
    lines: list[str] = []
    for file in files:
        lines += read_columns(storage, str(file.location()), _LINES)["cut"].to_pylist()
    return records(lines)


def _check_idle(table: Any, seconds: float) -> None:
    """Check that nobody writes for `seconds`: a courtesy, the catalog itself protects the lake."""
    if not seconds:
        return
    before = table.currentSnapshot()
    time.sleep(seconds)
    table.refresh()
    now = table.currentSnapshot()
    if now is not None and (before is None or now.snapshotId() != before.snapshotId()):
        raise SourceError("ErrTargetBusy", "a job writes to this lake; stop it first")


def _taken_over() -> SourceError:
    return SourceError(
        "ErrTargetBusy",
        "another job has taken this lake over, and this one has stopped; the newest one goes on: "
        "see that only one is started",
    )
