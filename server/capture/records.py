"""The changefeeds' records in the metadata, written by the capture that runs them only: every
write is fenced (`server.capture.fence`).
"""

import glob
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from gcsafepoint.explain.names import CREATING_PREFIX, feed_of
from gcsafepoint.state.records import GcKeys, parse_service_safe_points
from server.capture.audit import Audit, Finding
from server.capture.errors import ChangefeedExistsError
from server.capture.fence import Fence, FencedMeta
from server.capture.job_report import JobReport
from server.capture.readers import ReaderRecord
from server.changefeed import keys
from server.changefeed.history import SchemaChange
from server.changefeed.info import (
    ChangefeedIdInvalidError,
    ChangefeedInfo,
    check_id,
    read_checkpoint,
    read_info,
    status_json,
    unreadable_info,
)
from server.changefeed.records import SchemaRecords, delete_all, delete_others, head_put, parts
from server.changefeed.table import TableRecord
from server.dump.job import DumpRecords, Job
from storage.codec import prefix_end
from storage.meta.meta import Compare, Delete, KeyValue, Meta, Op, Put
from storage.model.errors import CorruptError

RELEASED_S: Final = 86_400
_REPEATED_S: Final = 86_400
"""For how long a change is not made again by a request that is repeated."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ChangefeedRecord:
    """A changefeed as the metadata has it."""

    info: ChangefeedInfo
    """Stands for one that cannot be read (`unreadable_info`) where `error` says so."""
    checkpoint_ts: int
    error: CorruptError | None = None
    """Why it cannot run: its record, or its checkpoint, cannot be read."""


def changefeed_record(pair: KeyValue, status: bytes | None) -> ChangefeedRecord:
    """Parse a changefeed's two records; `status` is None where there is none."""
    changefeed = pair.key.removeprefix(keys.INFOS).decode()
    info, checkpoint_ts = unreadable_info(changefeed), 0
    try:
        if status is not None:
            checkpoint_ts = read_checkpoint(changefeed, status)
        info = read_info(pair.key, pair.value)
    except CorruptError as err:
        return ChangefeedRecord(info, checkpoint_ts, err)
    return ChangefeedRecord(info, info.start_ts if status is None else checkpoint_ts)


class Records:
    """The records of all changefeeds in the metadata; `fence` decides which of them may
    be written.
    """

    def __init__(self, meta: Meta, fence: Fence) -> None:
        self.schemas = SchemaRecords(meta, self._write)
        self._meta = FencedMeta(meta, fence)

    async def load(self) -> list[ChangefeedRecord]:
        """All changefeeds; one whose records cannot be read has an error.

        A key that no changefeed can have is left out, and logged.
        """
        infos = await self._meta.get_prefix(keys.INFOS)
        statuses = await self._meta.get_prefix(keys.STATUSES)
        status_of = {pair.key.removeprefix(keys.STATUSES): pair.value for pair in statuses}
        return [
            changefeed_record(pair, status_of.get(pair.key.removeprefix(keys.INFOS)))
            for pair in infos
            if _is_changefeed(pair.key)
        ]

    async def load_one(self, changefeed: str) -> ChangefeedRecord | None:
        """One changefeed; None: there is none of that id."""
        pair = await self._meta.get(keys.info(changefeed))
        if pair is None:
            return None
        status = await self._meta.get(keys.status(changefeed))
        return changefeed_record(pair, None if status is None else status.value)

    async def settled_one(self, changefeed: str) -> ChangefeedRecord | None:
        """One changefeed, read when no earlier write of this capture can be carried out any more.

        Raises:
            MetaUnavailableError: the metadata does not answer.
            NotOwnerError: another capture writes the records by now.
        """
        await self._write([])
        return await self.load_one(changefeed)

    async def service_safe_points(
        self, cluster_id: int, service_ids: Collection[str]
    ) -> dict[str, int]:
        """The safe points that the coordinator keeps for services, expired ones included.

        Raises:
            SafePointRecordError: one cannot be read.
        """
        scope = _gc_keys(cluster_id).null
        pairs = [await self._meta.get(scope.service(each)) for each in service_ids]
        return parse_service_safe_points([pair for pair in pairs if pair is not None], scope)

    async def placed(self) -> frozenset[str]:
        """The changefeeds that the owner has placed on a capture: those of logs."""
        pairs = await self._meta.get_prefix(keys.PLACEMENTS)
        return frozenset(
            pair.key.removeprefix(keys.PLACEMENTS).decode(errors="replace") for pair in pairs
        )

    async def load_jobs(self, now_s: float) -> dict[str, JobReport]:
        """The saved reports of lake jobs that have given up, by changefeed. A record that cannot be
        read is left out, as nothing depends on it.
        """
        reports: dict[str, JobReport] = {}
        for pair in await self._meta.get_prefix(keys.JOBS):
            try:
                reports[pair.key.removeprefix(keys.JOBS).decode()] = JobReport.from_json(
                    pair.value, now_s
                )
            except (CorruptError, UnicodeDecodeError) as err:
                _log.warning(
                    "report of a lake job left out",
                    key=pair.key.decode(errors="replace"),
                    error=str(err),
                )
        return reports

    async def load_readers(self, changefeed: str) -> dict[str, ReaderRecord]:
        """Return the record of each named reader: the ts up to which it has the changes.

        Raises:
            CorruptError: a record cannot be read.
        """
        prefix = keys.readers(changefeed)
        return {
            pair.key.removeprefix(prefix).decode(): ReaderRecord.from_json(pair.value)
            for pair in await self._meta.get_prefix(prefix)
        }

    async def save_reader(
        self, changefeed: str, name: str, record: ReaderRecord | None, request: str = ""
    ) -> None:
        """Write where a reader is, or delete it; and that `request` is carried out, as it is meant
        in `is_carried_out`. Durable; raises as `save`.
        """
        key = keys.reader(changefeed, name)
        saved = Delete(key) if record is None else Put(key, record.to_json())
        await self._write([saved, *await self._carried_out(changefeed, request)])

    async def save_job(self, changefeed: str, report: JobReport | None, request: str = "") -> None:
        """Write why a changefeed's lake job has given up, or delete it; `request` as of
        `save_reader`. Durable; raises as `save`.
        """
        key = keys.job(changefeed)
        saved = Delete(key) if report is None else Put(key, report.to_json())
        await self._write([saved, *await self._carried_out(changefeed, request)])

    async def load_audits(self) -> dict[str, Audit]:
        """Return the results of audits by changefeed; unreadable records are left out, since
        nothing depends on them.
        """
        audits: dict[str, Audit] = {}
        for pair in await self._meta.get_prefix(keys.AUDITS):
            changefeed, _, table = (
                pair.key.removeprefix(keys.AUDITS).decode(errors="replace").partition("/")
            )
            audit = audits.get(changefeed, Audit())
            try:
                if table:
                    finding = Finding.from_json(pair.value)
                    audits[changefeed] = replace(audit, findings=(*audit.findings, finding))
                else:
                    audits[changefeed] = replace(audit, on_time=pair.value.decode(errors="replace"))
            except CorruptError as err:
                _log.warning(
                    "finding of an audit left out",
                    changefeed=changefeed,
                    table=table,
                    error=str(err),
                )
        return audits

    async def ids(self) -> list[str]:
        """The changefeeds that have a record."""
        pairs = await self._meta.get_prefix(keys.INFOS)
        return [pair.key.removeprefix(keys.INFOS).decode(errors="replace") for pair in pairs]

    async def clear(self, changefeed: str) -> None:
        """Delete what an interrupted creation or removal of that id has left, before a new source
        of that id saves anything. Durable.

        Raises:
            ChangefeedExistsError, NotOwnerError: as `create`.
        """
        key = keys.info(changefeed)
        # Only if there is no record: a changefeed that another owner has just created is not
        # touched.
        if not (await self._meta.txn([Compare.absent(key)], _all_but_info(changefeed))).succeeded:
            raise _exists(changefeed)

    async def create(
        self, info: ChangefeedInfo, tables: Sequence[TableRecord], request: str = ""
    ) -> None:
        """Write a new changefeed with its tables, its checkpoint, which is its start_ts, and the
        request that creates it. Durable.

        Raises:
            ChangefeedExistsError: the id is taken.
            NotOwnerError: another capture owns the changefeeds by now.
        """
        key = keys.info(info.id)
        start = SchemaChange(info.start_ts, tables=tuple(tables))
        # Tables may need several transactions. They are valid only with their head, which goes into
        # the same transaction as the record: a crash before it leaves nothing that counts.
        await self.schemas.write_tables(info.id, start)
        puts: list[Op] = [head_put(info.id, start), Put(key, info.to_json())]
        puts.append(Put(keys.status(info.id), status_json(info.start_ts)))
        if request:
            puts.append(Put(keys.creation(info.id), request.encode()))
        puts += await self._carried_out(info.id, request)
        if not (await self._meta.txn([Compare.absent(key)], puts)).succeeded:
            raise _exists(info.id)

    async def is_made_by(self, changefeed: str, request: str) -> bool:
        """Whether it was this request that has made the changefeed that there is now."""
        if not request:
            return False
        pair = await self._meta.get(keys.creation(changefeed))
        return pair is not None and pair.value == request.encode()

    async def is_carried_out(self, changefeed: str, request: str) -> bool:
        """Whether a request to change a changefeed was carried out within the last day: also one
        whose answer was lost, and by an earlier owner. The changefeed may be gone by now, and
        another one be there.
        """
        if not request:
            return False
        return await self._meta.get(keys.request(changefeed, request)) is not None

    async def _carried_out(self, changefeed: str, request: str) -> list[Op]:
        """What a change writes together with itself, so that it is made once."""
        if not request:
            return []
        lease = await self._meta.grant_lease(_REPEATED_S)
        return [Put(keys.request(changefeed, request), b"", lease.id)]

    async def move_tables(self, info: ChangefeedInfo) -> ChangefeedInfo:
        """Bring a record of version 0.1.0, which holds its tables itself, to today's form.

        Durable.
        """
        start = SchemaChange(info.start_ts, tables=info.tables)
        await self.schemas.write_tables(info.id, start)
        moved = info.without_tables()
        await self._write([head_put(info.id, start), Put(keys.info(info.id), moved.to_json())])
        return moved

    async def change_filter(self, info: ChangefeedInfo, change: SchemaChange) -> None:
        """Bring a new filter in force by a change whose tables are written already. Durable, all or
        nothing; raises as `save`.
        """
        head = head_put(info.id, change)
        await self._write([head, Put(keys.info(info.id), info.to_json())])

    async def dump_also(self, changefeed: str, tables: Mapping[int, str]) -> None:
        """Add tables, given by id, to the dump, and drop the progress that they had in it. Durable.

        Raises:
            DumpStateError: another call has just changed the dump.
        """
        dump = DumpRecords(self._meta, changefeed)
        for table_id in tables:
            await dump.delete_table(table_id)
        names = sorted(map(glob.escape, tables.values()))
        before = await dump.job()
        job = before or Job(uuid.uuid4().hex, tables=tuple(names))
        if (taking := job.including(tables.values())) != before:
            await dump.put_job(before, taking)

    async def restart(
        self, info: ChangefeedInfo, start: SchemaChange, readers: Iterable[str], request: str = ""
    ) -> None:
        """Let a changefeed and its named readers go on at another ts, with the tables of that time;
        `request` as of `save_reader`.

        Durable, all or nothing.

        Raises:
            NotOwnerError: another capture owns the changefeeds by now.
        """
        await self.schemas.write_tables(info.id, start)
        status = Put(keys.status(info.id), status_json(start.commit_ts))
        head = head_put(info.id, start)
        await self._write(
            [
                *delete_others(info.id, start.commit_ts),
                head,
                status,
                *(Put(keys.reader(info.id, name), status.value) for name in readers),
                Put(keys.info(info.id), info.to_json()),
                *await self._carried_out(info.id, request),
            ]
        )

    async def change(self, info: ChangefeedInfo, request: str = "") -> None:
        """Write the record of a changefeed that somebody has changed, and delete the results of an
        audit that there is no more; `request` as of `save_reader`. Durable; raises as `save`.
        """
        ops = [Put(keys.info(info.id), info.to_json()), *await self._carried_out(info.id, request)]
        await self._write(ops if info.audit_s else [*ops, _audit(info.id)])

    async def save(
        self,
        checkpoints: Mapping[str, int],
        infos: Mapping[str, ChangefeedInfo],
        readers: Mapping[str, Mapping[str, ReaderRecord]] | None = None,
    ) -> None:
        """Write checkpoints, records, and positions of named readers, of changefeeds that exist.
        Durable.

        Raises:
            NotOwnerError: another capture owns the changefeeds by now.
        """
        puts = [
            Put(keys.reader(changefeed, name), record.to_json())
            for changefeed, positions in (readers or {}).items()
            for name, record in positions.items()
        ]
        puts += [
            Put(keys.status(changefeed), status_json(ts)) for changefeed, ts in checkpoints.items()
        ]
        puts += [Put(keys.info(changefeed), info.to_json()) for changefeed, info in infos.items()]
        for part in parts(puts):
            await self._write(part)

    async def service_ids(self, cluster_id: int) -> list[str]:
        """The services whose safepoints the coordinator keeps for a cluster, also expired ones."""
        prefix = _gc_keys(cluster_id).null.services
        pairs = await self._meta.get_prefix(prefix)
        return [pair.key.removeprefix(prefix).decode(errors="replace") for pair in pairs]

    async def left_services(self, cluster_id: int) -> list[str]:
        """The services of changefeeds that do not exist any more."""
        services = await self.service_ids(cluster_id)
        # Services of creations under way have no record yet; they expire within an hour anyway.
        ours = [each for each in services if feed_of(each) and not each.startswith(CREATING_PREFIX)]
        # Afterwards: of a changefeed that was made meanwhile there is a record by now.
        there = set(await self.ids())
        return [each for each in ours if feed_of(each) not in there]

    async def remove(self, changefeed: str, gc_generation: int = 0, request: str = "") -> None:
        """Delete a changefeed; `request` as of `save_reader`. Durable; raises as `save`."""
        # As long as a request to delete its service may be on its way, and far longer.
        lease = await self._meta.grant_lease(RELEASED_S)
        released = Put(keys.released(changefeed), b"%d" % gc_generation, lease.id)
        noted = [released, *await self._carried_out(changefeed, request)]
        await self._write([Delete(keys.info(changefeed)), *_all_but_info(changefeed), *noted])

    async def next_gc_generation(self, changefeed: str) -> int:
        """Return the number that makes the service safepoint of a new changefeed different from
        that of a recently removed one of the same id.
        """
        released = await self._meta.get(keys.released(changefeed))
        return 0 if released is None else int(released.value) + 1

    async def _write(self, ops: Sequence[Op]) -> None:
        await self._meta.txn((), ops)


def _all_but_info(changefeed: str) -> list[Op]:
    of_source = keys.source(changefeed)
    kept = (
        Delete(of_source, prefix_end(of_source)),
        Delete(keys.drainer(changefeed)),
        _audit(changefeed),
        Delete(keys.readers(changefeed), prefix_end(keys.readers(changefeed))),
    )
    return [
        Delete(keys.status(changefeed)),
        Delete(keys.job(changefeed)),
        delete_all(changefeed),
        *kept,
    ]


def _gc_keys(cluster_id: int) -> GcKeys:
    return GcKeys(f"/pd/{cluster_id}/gc/".encode())


def _is_changefeed(key: bytes) -> bool:
    try:
        check_id(key.removeprefix(keys.INFOS).decode())
    except (ChangefeedIdInvalidError, UnicodeDecodeError):
        # No version makes such a changefeed, and no path is to be made of such a name.
        _log.error("key of no changefeed left out", key=key.decode(errors="backslashreplace"))
        return False
    return True


def _audit(changefeed: str) -> Delete:
    prefix = keys.audit(changefeed)
    return Delete(prefix, prefix_end(prefix))


def _exists(changefeed: str) -> ChangefeedExistsError:
    return ChangefeedExistsError(
        f"changefeed {changefeed} exists already; choose another id or remove it"
    )
