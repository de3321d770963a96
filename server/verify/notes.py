"""What may explain that a table differs, although nothing went wrong: told beside the difference."""

from collections.abc import Sequence
from typing import Final

from pyspark_tidemark.lake.mode import APPEND

from server.changefeed.info import ChangefeedInfo
from server.dump.job import DumpRecords, Job
from server.dump.progress import TableProgress, TableState
from server.verify.catalog import LakeCut, Table
from storage.meta.meta import Meta

_CHANGELOG: Final = (
    "the lake keeps changes, from which current rows were made; a change of all rows at once (TRUNCATE TABLE) is not "
    "among them, so rows from before one may be told as only in the lake"
)


async def notes_of(meta: Meta, info: ChangefeedInfo, cut: LakeCut, tables: Sequence[Table]) -> dict[str, str]:
    """For each table that has one, its note."""
    records = DumpRecords(meta, info.id)
    job = await records.job()
    dumps = {each.name: each for each in await records.tables(job)} if job is not None else {}
    found = {table.name: dump_note(table, job, dumps.get(table.name)) for table in tables}
    changelog = _CHANGELOG if cut.mode == APPEND else ""
    return {name: "; ".join(filter(None, (note, changelog))) for name, note in found.items()}


def dump_note(table: Table, job: Job | None, dump: TableProgress | None) -> str:
    """What the table's dump has to do with rows that are only upstream. Pure."""
    if job is None or not job.takes(table.name):
        return "the table was not dumped: rows that are older than the changefeed are only upstream"
    if dump is None or not dump.state.is_over or dump.high_ts > table.ts:
        return "its dump had not ended at the cut: rows that it had not brought yet are only upstream"
    if dump.state is not TableState.DONE:
        return f"its dump ended as {dump.state.value}: rows that it did not bring are only upstream"
    if table.name in job.where:
        return f"it was dumped where {job.where[table.name]}: other rows are only upstream"
    return ""
