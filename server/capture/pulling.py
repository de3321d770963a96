"""The pullers of a running changefeed: one for all tables of a log, else one for each, which begins and ends alone."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from server.capture.catalog.catalog import FeedCatalog
from server.puller.source import Puller, Rows, Source
from server.puller.table import SourceTable
from server.puller.tikv.puller import TablePuller
from storage.model.span import Span


@dataclass(frozen=True, slots=True)
class Intake:
    """Whose changes, and where they go."""

    changefeed: str
    source: Source
    catalog: FeedCatalog
    rows: Rows


class Pulling:
    """The pullers are children of `tasks`; the error of one ends them all."""

    def __init__(self, intake: Intake, tasks: asyncio.TaskGroup) -> None:
        self._intake = intake
        self._tasks = tasks
        self._running: dict[Span, tuple[Puller, asyncio.Task[None]]] = {}
        self._others: list[Puller] = []

    @property
    def table_pullers(self) -> list[TablePuller]:
        """Those that pull regions."""
        found: Iterable[Puller] = (*(puller for puller, _ in list(self._running.values())), *self._others)
        parts: Iterable[Puller] = (part for puller in found for part in getattr(puller, "table_pullers", (puller,)))
        return [puller for puller in parts if isinstance(puller, TablePuller)]

    def begin(self, tables: Sequence[SourceTable], start_ts: int) -> bool:
        """Pull the tables in force at `start_ts`, and the schema changes above it; returns whether these come apart."""
        source, catalog = self._intake.source, self._intake.catalog
        if source.per_table:
            self.add(tables, start_ts)
            schemas = source.schema_puller(start_ts, catalog)
            self._others = [schemas] if schemas is not None else []
        else:
            self._others = list(source.pullers(tables, start_ts, self._intake.rows, catalog))
        for puller in self._others:
            self._tasks.create_task(puller.run(), name=f"puller {self._intake.changefeed}")
        return source.per_table and bool(self._others)

    def add(self, tables: Sequence[SourceTable], start_ts: int) -> None:
        """Pull more tables above `start_ts`; a log takes them up by itself."""
        if not self._intake.source.per_table:
            return
        pullers = self._intake.source.pullers(tables, start_ts, self._intake.rows, self._intake.catalog)
        for table, puller in zip(tables, pullers, strict=True):
            task = self._tasks.create_task(puller.run(), name=f"puller {self._intake.changefeed} {table.span.table_id}")
            self._running[table.span] = puller, task

    async def end_passed(self, ends: Mapping[Span, int]) -> None:
        """Pull those tables no more that have come to their end."""
        passed = [span for span, end_ts in ends.items() if span in self._running and self._at(span) >= end_ts]
        for span in passed:
            await self.end(span)

    async def end(self, span: Span) -> None:
        """Pull a table no more; returns when nothing of it is left."""
        running = self._running.pop(span, None)
        if running is not None:
            running[1].cancel()
            await asyncio.wait([running[1]])

    def _at(self, span: Span) -> int:
        return self._running[span][0].resolved_ts
