"""Saves a dump's progress in the metadata: what the durable checkpoint has reached,
and how fast each table is read.
"""

import asyncio
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import structlog

from server.dump.job import DumpRecords
from server.dump.metrics import TABLES_FAILED
from server.dump.progress import TableDump, TableProgress, TableState
from storage.model.errors import UnavailableError

_SETTLE_S: Final = 0.3
_MEASURE_S: Final = 3.0
_log = structlog.get_logger(__name__)


class Dumps(Protocol):
    """The tables of the job that is taken up."""

    def looking(self) -> AbstractContextManager[Any]:
        """Held while they are looked into."""
        ...

    def all_dumps(self) -> Collection[TableDump]:
        """Call it `looking`."""
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
        """Held while something is written: what is older is never written over what is newer."""

    def begin(self, durable: Mapping[int, TableProgress]) -> None:
        """A job is taken up, of which this is in the metadata."""
        self._written = dict(durable)
        self._measured.clear()
        self._count_failed()

    async def run(self) -> None:
        """Write what has become durable, until cancelled; as long as nobody answers, later."""
        try:
            while True:
                await asyncio.sleep(_SETTLE_S)
                await self._try_to_settle()
        finally:
            TABLES_FAILED.labels(self._changefeed).set(0)

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
        with self._dumps.looking():
            if not self._dumps.all_dumps():
                return
        # The checkpoint of the metadata, not the one in memory: progress above a checkpoint that a
        # crash takes back would skip rows.
        checkpoint_ts = await self._records.checkpoint_ts()
        with self._dumps.looking():
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
        """How fast a table is read, over some seconds."""
        table_id, rows, now_s = dump.durable.table_id, dump.durable.rows, time.monotonic()
        rows_before, before_s = self._measured.setdefault(table_id, (rows, now_s))
        passed_s, is_restarted = now_s - before_s, rows < rows_before
        if passed_s < _MEASURE_S and not is_restarted:
            return
        rows_per_s = max(rows - rows_before, 0) / max(passed_s, _SETTLE_S)
        dump.goes_at(int(rows_per_s))
        self._measured[table_id] = rows, now_s
