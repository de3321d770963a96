"""A changefeed on its owner: its record, its checkpoint, and the processor that runs it."""

import asyncio
from dataclasses import dataclass, field

from server.capture.changefeed import ChangefeedInfo, State
from server.capture.processor import MakeProcessor, Processor
from server.capture.table import source_tables
from server.puller.table import SourceTable


@dataclass(slots=True, eq=False)
class Feed:
    """Changed on the event loop only; other threads may read it."""

    info: ChangefeedInfo
    checkpoint_ts: int
    """As the metadata has it."""
    tables: tuple[SourceTable, ...]
    processor: Processor
    task: asyncio.Task[None] | None = None
    info_saved: bool = True
    safepoint_ts: int = 0
    """The checkpoint that the service safepoint protects."""
    safepoint_time: float = field(default=0.0)
    """Loop time at which it was set; 0: not by this owner."""

    @classmethod
    def of(cls, info: ChangefeedInfo, checkpoint_ts: int, make: MakeProcessor) -> "Feed":
        """A changefeed that does not run yet; raises as `source_tables`."""
        tables = source_tables(info.tables)
        return cls(info, checkpoint_ts, tables, make(info.id, tables, checkpoint_ts, info.target_ts))

    @property
    def id(self) -> str:
        """Its id."""
        return self.info.id

    def restart_at(self, checkpoint_ts: int, make: MakeProcessor) -> None:
        """Begin elsewhere next time it runs."""
        self.checkpoint_ts = checkpoint_ts
        self.processor = make(self.id, self.tables, checkpoint_ts, self.info.target_ts)

    def recovered(self) -> bool:
        """Whether it runs well again after an error."""
        running = self.info.state is State.WARNING and self.processor.sink is not None
        return running and self.processor.resolved_ts > self.processor.start_ts

    async def stop(self) -> None:
        """End its task, and wait until it has ended."""
        task, self.task = self.task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
