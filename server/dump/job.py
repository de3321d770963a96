"""What a dump was asked to do, and how it is kept with its progress in the metadata:
docs/format/dump.md.

    …/changefeed/source/<id>/dump/job            one document
    …/changefeed/source/<id>/dump/table/<id>     one for each table, of the job it names

The job is written by any capture, in a transaction that compares; tables by the capture that
runs the changefeed. Both go with the changefeed.
"""

import glob
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Self

from server.changefeed import keys
from server.changefeed.info import checkpoint_of
from server.dump.errors import DumpStateError
from server.dump.progress import TableDump, TableProgress, TableState
from storage.meta.meta import Compare, Delete, Meta, Put
from storage.model.errors import CorruptError

RUNNING, PAUSED = "running", "paused"
PARALLEL_MAX = 16
_STEP_MIN = 64


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
    """By name or pattern of `schema.table`; 0 for all others."""
    rows_per_s: int = 0
    """0: as fast as the log lets it."""
    bytes_per_s: int = 0
    parallel: int = 4
    """How many chunks are read at a time."""
    verify: bool = False
    """Each chunk is compared with sums of the server."""
    attempt: int = 0
    """Grows each time it is resumed: tables that have failed are tried again."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """By `schema.table` why a table is read again by itself:
    the DDL that changed its rows beside the log.
    """
    since_ts: Mapping[str, int] = field(default_factory=dict)
    """The commit_ts of these DDLs; one that the checkpoint has not passed is not over."""

    def takes(self, name: str) -> bool:
        """Whether the table is to be dumped."""
        return not self.tables or any(fnmatchcase(name, pattern) for pattern in self.tables)

    def also_taking(self, names: Iterable[str]) -> Self:
        """The same job, with these tables."""
        missing = [glob.escape(name) for name in names if not self.takes(name)]
        return replace(self, tables=(*self.tables, *missing)) if missing else self

    def step(self, rows: int) -> int:
        """So many rows of a chunk of `rows` as are no more than a second's share of what is
        allowed.
        """
        return (
            min(rows, max(self.rows_per_s // self.parallel, _STEP_MIN)) if self.rows_per_s else rows
        )

    def priority_of(self, name: str) -> int:
        """That of its name, else the greatest of the patterns that match it."""
        if name in self.priority:
            return self.priority[name]
        return max(
            (each for pattern, each in self.priority.items() if fnmatchcase(name, pattern)),
            default=0,
        )

    def foremost(self, dumps: Iterable[TableDump]) -> list[TableDump]:
        """The tables of the greatest priority among those that have something to read now."""
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
    """The records of one changefeed's dump; every call raises `MetaUnavailableError` when nobody
    answers.
    """

    def __init__(self, meta: Meta, changefeed: str) -> None:
        self._meta = meta
        self._changefeed = changefeed
        self._job = keys.source(changefeed) + b"dump/job"
        self._tables = keys.source(changefeed) + b"dump/table/"

    async def job(self) -> Job | None:
        """What was asked for; None: nothing yet."""
        pair = await self._meta.get(self._job)
        return Job.parse(pair.value) if pair else None

    async def put_job(self, before: Job | None, job: Job) -> None:
        """Ask for something else than `before`. Durable.

        Raises:
            DumpStateError: somebody else did, meanwhile.
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
        """What is durable of the job's tables, in the order of their ids,
        as those of the start come first.
        """
        tables = [parse_progress(pair.value) for pair in await self._meta.get_prefix(self._tables)]
        return sorted(
            (each for each in tables if each.job == job.id), key=lambda each: each.table_id
        )

    async def put_tables(self, tables: Iterable[TableProgress]) -> None:
        """Keep what is durable. Durable when it returns."""
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
        """Up to which everything is at the target, durably; 0 if nothing is known."""
        pair = await self._meta.get(keys.status(self._changefeed))
        return checkpoint_of(pair.value) if pair else 0


def parse_progress(text: bytes) -> TableProgress:
    """Read one table's document."""
    try:
        doc = json.loads(text)
    except ValueError as err:
        raise CorruptError(f"not a dump's progress: {err}; restart the dump") from err
    return TableProgress.parse(doc)
