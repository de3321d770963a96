"""A dump's progress as its status shows it: per table and in total, as shares, with the estimated
end. Pure.

Shares are of the rows that are durable at the target. What has failed or was dropped is in no sum:
it would hold the share of all below 100 for ever, or make the rest look further than it is.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from tidemarkpb.v1 import dump_pb2 as pb

from server.dump.job import PAUSED, Job
from server.dump.progress import TableProgress, TableState

ETA_UNKNOWN: Final = -1
_NEARLY: Final = 99.9
"""The highest percentage shown before the end, since estimates may be too low."""
_LOST: Final = frozenset({TableState.FAILED, TableState.DROPPED})


def is_over(job: Job, tables: Sequence[TableProgress], gone: Collection[str] = ()) -> bool:
    """Whether nothing more will be read of the known tables; `gone` are requested names that no
    table has any more.
    """
    # A job may have lost its tables before anything was noted of them: it must not run for ever.
    if not tables:
        return bool(job.tables) and all(pattern in gone for pattern in job.tables)
    return all(each.state.is_over for each in tables)


def dump_message(
    changefeed: str,
    job: Job,
    tables: Sequence[TableProgress],
    waits_for: str = "",
    gone: Collection[str] = (),
) -> pb.Dump:
    """The whole dump; `waits_for` is why nothing goes on, `gone` as in `is_over`."""
    over = is_over(job, tables, gone)
    counted = [each for each in tables if each.state not in _LOST]
    done = sum(each.state is TableState.DONE for each in counted)
    rows, estimated = sum(each.rows for each in counted), _estimated(counted)
    rate = sum(_rate(job, each) for each in counted)
    failed = sum(each.state is TableState.FAILED for each in tables)
    is_done = bool(counted) and done == len(counted)
    return pb.Dump(
        changefeed_id=changefeed,
        job_id=job.id,
        state=("failed" if failed else "finished") if over else job.state,
        tables=job.tables,
        where=dict(job.where),
        priority=dict(job.priority),
        rows_per_second_max=job.rows_per_s,
        bytes_per_second_max=job.bytes_per_s,
        parallel=job.parallel,
        rows_done=rows,
        rows_read=sum(each.rows_read for each in counted),
        rows_estimated=estimated,
        bytes_done=sum(each.bytes for each in counted),
        progress_percent=_share(rows, estimated, is_done=is_done),
        eta_seconds=_eta(estimated - rows, rate, is_done=is_done),
        rows_per_second=rate,
        tables_known=len(tables),
        tables_done=done,
        tables_failed=failed,
        waits_for="" if over else waits_for,
        verify=job.verify,
    )


def table_messages(
    changefeed: str,
    job: Job,
    tables: Sequence[TableProgress],
    others: Mapping[str, tuple[str, str]],
) -> list[pb.DumpStatus]:
    """Return the tables' status by name; `others` are requested but not read: their state, with the
    reason.
    """
    foremost = max(
        (job.priority_of(each.name) for each in tables if not each.state.is_over), default=0
    )
    messages = [_table(changefeed, job, each, foremost) for each in tables]
    messages += [
        pb.DumpStatus(
            changefeed_id=changefeed, table=name, state=state, error=why, eta_seconds=ETA_UNKNOWN
        )
        for name, (state, why) in others.items()
    ]
    return sorted(messages, key=lambda each: each.table)


def _table(changefeed: str, job: Job, each: TableProgress, foremost: int) -> pb.DumpStatus:
    is_done, priority = each.state is TableState.DONE, job.priority_of(each.name)
    waits = each.state is TableState.DUMPING and priority < foremost and not each.rows_read
    rate = _rate(job, each)
    return pb.DumpStatus(
        changefeed_id=changefeed,
        state=TableState.WAITING.value if waits else each.state.value,
        table=each.name,
        rows_done=each.rows,
        rows_estimated=each.rows_estimated,
        bytes_done=each.bytes,
        eta_seconds=_eta(each.rows_estimated - each.rows, rate, is_done=is_done),
        progress_percent=_share(each.rows, each.rows_estimated, is_done=is_done),
        error=each.error,
        chunks_done=each.chunks,
        rows_per_second=rate,
        high_ts=each.high_ts,
        rows_read=each.rows_read,
        priority=priority,
        chunks_verified=each.chunks_verified,
        chunks_repaired=each.chunks_repaired,
        reason=job.reasons.get(each.name, ""),
        since_ts=job.since_ts.get(each.name, 0),
    )


def _estimated(tables: Sequence[TableProgress]) -> int:
    """Estimate the total number of rows; 0 while it is unknown for a table."""
    if any(not each.rows_estimated for each in tables if each.state is not TableState.DONE):
        return 0
    return sum(
        each.rows if each.state is TableState.DONE else max(each.rows_estimated, each.rows)
        for each in tables
    )


def _share(rows: int, estimated: int, *, is_done: bool) -> float:
    if is_done:
        return 100.0
    return min(100.0 * rows / estimated, _NEARLY) if estimated else 0.0


def _eta(left: int, rate: int, *, is_done: bool) -> int:
    """Not known while nothing moves, and where there are more rows than were thought."""
    if is_done:
        return 0
    return -(-left // rate) if rate and left > 0 else ETA_UNKNOWN


def _rate(job: Job, each: TableProgress) -> int:
    return 0 if job.state == PAUSED or each.state.is_over else each.rows_per_s
