"""A dump's job, and how it is kept with its progress in the metadata: docs/format/dump.md.

    …/changefeed/source/<id>/dump/job            one document
    …/changefeed/source/<id>/dump/table/<id>     one for each table, of the job it names

The job is written by any capture, in a transaction that compares; tables by the capture that runs
the changefeed: its `ProgressSaver` writes what the durable checkpoint has reached, and how fast
each table is read. Both go with the changefeed.
"""

import asyncio
import glob
import json
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Final, Protocol, Self

import structlog

from server.changefeed import keys
from server.changefeed.info import checkpoint_of
from server.dump.metrics import TABLES_FAILED
from server.dump.progress import TableDump, TableProgress, TableState
from storage.meta.meta import Compare, Delete, Meta, Put
from storage.model.errors import ConflictError, CorruptError, UnavailableError

RUNNING, PAUSED = "running", "paused"
PARALLEL_MAX = 16
_STEP_MIN = 64
_SETTLE_S: Final = 0.3
_MEASURE_S: Final = 3.0
_log = structlog.get_logger(__name__)


class DumpStateError(ConflictError):
    """The dump's state does not allow it."""

    code = "ErrDumpStateRefused"


@dataclass(frozen=True, slots=True)
class Job:
    """One dump of a changefeed; its id is new each time it begins anew."""

    id: str
    state: str = RUNNING
    tables: tuple[str, ...] = ()
    """Patterns of `schema.table`, `*` and `?` as in a shell; empty: all tables."""
    where: Mapping[str, str] = field(default_factory=dict)
    """Conditions by `schema.table`."""
    priority: Mapping[str, int] = field(default_factory=dict)
    """Priorities by name or pattern of `schema.table`; 0 for all others."""
    rows_per_s: int = 0
    """0: as fast as the log lets it."""
    bytes_per_s: int = 0
    parallel: int = 4
    """The number of chunks read at the same time."""
    verify: bool = False
    """Each chunk is compared with sums of the server."""
    attempt: int = 0
    """Grows each time it is resumed: tables that have failed are tried again."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """The DDL because of which a table is read again without a command, by `schema.table`: it
    changed rows without logging them.
    """
    since_ts: Mapping[str, int] = field(default_factory=dict)
    """The commit_ts of these DDLs; one that the checkpoint has not passed is not over."""

    def takes(self, name: str) -> bool:
        """Whether the table is part of the dump."""
        return not self.tables or any(fnmatchcase(name, pattern) for pattern in self.tables)

    def including(self, names: Iterable[str]) -> Self:
        """The same job, which also takes these tables."""
        missing = [glob.escape(name) for name in names if not self.takes(name)]
        return replace(self, tables=(*self.tables, *missing)) if missing else self

    def rows_at_once(self, rows: int) -> int:
        """Limit the size of a chunk of `rows` rows to what the job allows in a second."""
        return (
            min(rows, max(self.rows_per_s // self.parallel, _STEP_MIN)) if self.rows_per_s else rows
        )

    def priority_of(self, name: str) -> int:
        """Return the priority of its name, else the greatest of the patterns that match it."""
        if name in self.priority:
            return self.priority[name]
        return max(
            (each for pattern, each in self.priority.items() if fnmatchcase(name, pattern)),
            default=0,
        )

    def most_urgent(self, dumps: Iterable[TableDump]) -> list[TableDump]:
        """Of the tables that have something to read now, those of the greatest priority."""
        ready = [
            each
            for each in dumps
            if each.durable.state is TableState.DUMPING and each.next_range() is not None
        ]
        greatest = max((self.priority_of(each.durable.name) for each in ready), default=0)
        return [each for each in ready if self.priority_of(each.durable.name) == greatest]

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """Read the document of `to_json`.

        Raises:
            CorruptError: it is not one.
        """
        try:
            doc: dict[str, Any] = json.loads(text)
            return cls(
                id=str(doc["id"]),
                state=str(doc["state"]),
                tables=tuple(map(str, doc["tables"])),
                where={str(name): str(condition) for name, condition in doc["where"].items()},
                priority={
                    str(name): int(number) for name, number in doc.get("priority", {}).items()
                },
                rows_per_s=int(doc["rows_per_s"]),
                bytes_per_s=int(doc["bytes_per_s"]),
                parallel=int(doc["parallel"]),
                verify=bool(doc.get("verify", False)),
                attempt=int(doc["attempt"]),
                reasons={str(name): str(why) for name, why in doc.get("reasons", {}).items()},
                since_ts={str(name): int(ts) for name, ts in doc.get("since_ts", {}).items()},
            )
        except (AttributeError, KeyError, TypeError, ValueError) as err:
            raise CorruptError(f"not a dump's job: {err!r}; restart the dump") from err

    def to_json(self) -> bytes:
        """The document in the metadata."""
        doc: dict[str, Any] = {
            "id": self.id,
            "state": self.state,
            "tables": list(self.tables),
            "where": dict(self.where),
            "rows_per_s": self.rows_per_s,
            "bytes_per_s": self.bytes_per_s,
            "parallel": self.parallel,
            "attempt": self.attempt,
        }
        # A job is changed by comparing its bytes (`put_job`). Members that came later are left out
        # while they ask for nothing: a job that an earlier version wrote keeps its bytes.
        if self.priority:
            doc["priority"] = dict(self.priority)
        if self.verify:
            doc["verify"] = True
        if self.reasons:
            doc["reasons"] = dict(self.reasons)
        if self.since_ts:
            doc["since_ts"] = dict(self.since_ts)
        return json.dumps(doc, separators=(",", ":"), ensure_ascii=False).encode()


class DumpRecords:
    """The records of one changefeed's dump; every call raises `MetaUnavailableError` if the
    metadata does not answer.
    """

    def __init__(self, meta: Meta, changefeed: str) -> None:
        self._meta = meta
        self._changefeed = changefeed
        self._job = keys.source(changefeed) + b"dump/job"
        self._tables = keys.source(changefeed) + b"dump/table/"

    async def job(self) -> Job | None:
        """The job in the metadata; None: the changefeed was never dumped."""
        pair = await self._meta.get(self._job)
        return Job.parse(pair.value) if pair else None

    async def put_job(self, before: Job | None, job: Job) -> None:
        """Replace the job `before` by `job`. Durable.

        Raises:
            DumpStateError: the metadata has another job than `before`.
        """
        # Any capture writes jobs, and so does a dump that reads tables again by itself: without the
        # comparison the later one would undo what it has never seen.
        unchanged = (
            Compare(self._job, "value", "==", before.to_json())
            if before is not None
            else Compare.absent(self._job)
        )
        if not (await self._meta.txn([unchanged], [Put(self._job, job.to_json())])).succeeded:
            raise DumpStateError(
                "somebody else has changed the dump just now; look at its status, and ask again"
            )

    async def tables(self, job: Job) -> list[TableProgress]:
        """The durable progress of the job's tables, by ascending id: tables that were there at the
        start come first.
        """
        tables = [parse_progress(pair.value) for pair in await self._meta.get_prefix(self._tables)]
        return sorted(
            (each for each in tables if each.job == job.id), key=lambda each: each.table_id
        )

    async def put_tables(self, tables: Iterable[TableProgress]) -> None:
        """Save the durable progress. Durable when it returns."""
        texts = [
            (each.table_id, json.dumps(each.to_doc(), separators=(",", ":"))) for each in tables
        ]
        await self._meta.write_all(
            [Put(self._tables + b"%d" % table_id, text.encode()) for table_id, text in texts]
        )

    async def delete_table(self, table_id: int) -> None:
        """Forget a table."""
        await self._meta.write_all([Delete(self._tables + b"%d" % table_id)])

    async def checkpoint_ts(self) -> int:
        """Return the ts up to which everything is at the target durably; 0 if nothing is known."""
        pair = await self._meta.get(keys.status(self._changefeed))
        return checkpoint_of(pair.value) if pair else 0


def parse_progress(text: bytes) -> TableProgress:
    """Read one table's document."""
    try:
        doc = json.loads(text)
    except ValueError as err:
        raise CorruptError(f"not a dump's progress: {err}; restart the dump") from err
    return TableProgress.parse(doc)


class Dumps(Protocol):
    """The tables of the present job."""

    def locked(self) -> AbstractContextManager[Any]:
        """A lock to hold while a `TableDump` is read or changed."""
        ...

    def all_dumps(self) -> Collection[TableDump]:
        """The tables' dumps; to be called while `locked` is held."""
        ...


class ProgressSaver:
    """Saves the progress of one changefeed's dump; writes only what has changed."""

    def __init__(self, changefeed: str, records: DumpRecords, dumps: Dumps) -> None:
        self._changefeed = changefeed
        self._records = records
        self._dumps = dumps
        self._written: dict[int, TableProgress] = {}
        self._measured: dict[int, tuple[int, float]] = {}
        self._settling = asyncio.Lock()
        """Held while something is written, so that older progress never overwrites newer."""

    def begin(self, durable: Mapping[int, TableProgress]) -> None:
        """Follow another job; `durable` is its progress in the metadata, by table id."""
        self._written = dict(durable)
        self._measured.clear()
        self._count_failed()

    async def run(self) -> None:
        """Save progress that has become durable, until cancelled; tries again later if the metadata
        does not answer.
        """
        try:
            while True:
                await asyncio.sleep(_SETTLE_S)
                await self._try_to_settle()
        finally:
            # The changefeed is paused or removed, or goes on in another capture.
            TABLES_FAILED.remove(self._changefeed)

    async def _try_to_settle(self) -> None:
        try:
            await self.settle()
        except UnavailableError as err:
            _log.warning(
                "the dump's progress cannot be kept now",
                changefeed=self._changefeed,
                error=err.message,
            )

    async def settle(self) -> None:
        """Write what has changed; durable when it returns. Raises UnavailableError."""
        # One write at a time: an older state that is written late would overwrite a newer one.
        async with self._settling:
            await self._settle()

    async def _settle(self) -> None:
        with self._dumps.locked():
            if not self._dumps.all_dumps():
                return
        # The checkpoint of the metadata, not the one in memory: progress above a checkpoint that a
        # crash takes back would skip rows.
        checkpoint_ts = await self._records.checkpoint_ts()
        with self._dumps.locked():
            for dump in self._dumps.all_dumps():
                dump.settle(checkpoint_ts)
                self._measure(dump)
            now = {dump.durable.table_id: dump.durable for dump in self._dumps.all_dumps()}
        changed = {
            table_id: each for table_id, each in now.items() if self._written.get(table_id) != each
        }
        if changed:
            await self._records.put_tables(changed.values())
            self._written |= changed
            self._count_failed()

    def _count_failed(self) -> None:
        failed = sum(each.state is TableState.FAILED for each in self._written.values())
        TABLES_FAILED.labels(self._changefeed).set(failed)

    def _measure(self, dump: TableDump) -> None:
        """Set the rate of a table anew, by the rows of the last `_MEASURE_S` seconds."""
        table_id, rows, now_s = dump.durable.table_id, dump.durable.rows, time.monotonic()
        rows_before, before_s = self._measured.setdefault(table_id, (rows, now_s))
        passed_s, is_restarted = now_s - before_s, rows < rows_before
        if passed_s < _MEASURE_S and not is_restarted:
            return
        rows_per_s = max(rows - rows_before, 0) / max(passed_s, _SETTLE_S)
        dump.set_rate(int(rows_per_s))
        self._measured[table_id] = rows, now_s
