"""A log, the dump of its tables, and a processor that reads both, as far as the owner and the
maintainers can tell.

The log has a row for each ts. A dump has chunks: a run reads those that are not durable yet, and
puts each into the stream at a ts that is above all the log has. A chunk is durable once the
changefeed's checkpoint, in the metadata, has reached its ts. So a chunk counts that a reader took
from this very run, and none that it would have to take from another one.
"""

import asyncio
import json
from collections.abc import Sequence
from random import Random
from typing import Any

from server.capture.processor import Assignment, ProcessorPosition, ProcessorStats
from server.changefeed import keys
from server.changefeed.info import checkpoint_of
from server.puller.tidb.table import tidb_table
from storage.meta.meta import Meta
from storage.model.errors import UnavailableError
from storage.model.ts import compose
from storage.tidb.schema import Column, TableInfo
from tests.unit.server.capture.scripted_log import record_of

CHUNKS = 6
_PULL_S = (0.1, 0.6)
_CHUNK_SHARE = 0.12
"""How often a pull reads a chunk: the dump lasts for most of a life."""
_INFO = TableInfo.build(1, "accounts", [Column.bigint("id"), Column.bigint("balance")])
_RECORD = record_of(_INFO)
_TABLE = tidb_table(_RECORD)


class Log:
    """Of one upstream; `rows` are the commit_ts of its rows."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.head_ts = 0

    def next_ts(self) -> int:
        """A commit_ts above all before."""
        now_ms = int(asyncio.get_running_loop().time() * 1000)
        self.head_ts = max(self.head_ts + 1, compose(now_ms, 0))
        return self.head_ts

    def write(self) -> None:
        """Commit a row."""
        self.rows.append(self.next_ts())


class SimSource:
    """Implements `server.puller.source.Source`, as far as changefeeds need it."""

    warnings: Sequence[str] = ()
    per_table = False

    def __init__(self, changefeed: str, log: Log, meta: Meta, *, keeps_history: bool) -> None:
        self.keeps_history = keeps_history
        self.log = log
        self._meta = meta
        self._key = keys.source(changefeed) + b"chunks"
        self._status = keys.status(changefeed)

    async def now(self) -> int:
        return self.log.next_ts()

    async def check_start(self, ts: int) -> None:
        del ts

    async def snapshot(self, ts: int, before: Any = ()) -> Any:
        del ts, before
        return [_RECORD]

    def table(self, record: Any, before: Any = None) -> Any:
        del record, before
        return _TABLE

    async def durable_chunks(self) -> list[int]:
        pair = await self._meta.get(self._key)
        return json.loads(pair.value) if pair else []

    async def keep_chunks(self, chunks: list[int]) -> None:
        await self._meta.put(self._key, json.dumps(chunks).encode())

    async def checkpoint_ts(self) -> int:
        pair = await self._meta.get(self._status)
        return checkpoint_of(pair.value) if pair else 0


class SimSink:
    """What a run has for readers."""

    def __init__(self, log: Log, start_ts: int) -> None:
        self._log = log
        self._resolved_ts = self._checkpoint_ts = start_ts
        self.chunks: dict[int, int] = {}
        """The ts of each chunk of this run."""

    def resolved_ts(self, span: Any = None) -> int:
        del span
        return self._resolved_ts

    def checkpoint_ts(self, span: Any = None) -> int:
        del span
        return self._checkpoint_ts

    def resolve(self, ts: int) -> None:
        self._resolved_ts = ts

    def read(self, start_ts: int, end_ts: int) -> tuple[list[int], list[int]]:
        """The rows and the chunks of `(start_ts, end_ts]`."""
        rows = [ts for ts in self._log.rows if start_ts < ts <= end_ts]
        return rows, [chunk for chunk, ts in self.chunks.items() if start_ts < ts <= end_ts]

    def ack(self, ts: int) -> None:
        self._checkpoint_ts = max(self._checkpoint_ts, min(ts, self._resolved_ts))


class SimProcessor(ProcessorPosition):
    """Implements `server.capture.processor.Processor`."""

    table_pullers = ()
    repairing = ()
    damage = None
    sink: Any

    def __init__(self, chance: Random, assignment: Assignment) -> None:
        self.start_ts = assignment.checkpoint_ts
        self.sink = None
        self._source: Any = assignment.source
        self._chance = chance

    def stats(self) -> ProcessorStats:
        return ProcessorStats()

    def locations(self, span: Any) -> tuple[str, ...]:
        del span
        return ()

    def places(self, span: Any) -> tuple[str, ...]:
        del span
        return ()

    def wipe(self) -> None:
        pass

    async def run(self) -> None:
        sink = SimSink(self._source.log, self.start_ts)
        try:
            durable = await self._source.durable_chunks()
            self.sink = sink
            while True:
                await asyncio.sleep(self._chance.uniform(*_PULL_S))
                missing = [
                    chunk
                    for chunk in range(CHUNKS)
                    if chunk not in durable and chunk not in sink.chunks
                ]
                if missing and self._chance.random() < _CHUNK_SHARE:
                    # The watermark is written, so the log has it before anybody reads further.
                    sink.chunks[missing[0]] = self._source.log.next_ts()
                sink.resolve(self._source.log.head_ts)
                durable = await self._kept(sink, durable)
        finally:
            self.start_ts, self.sink = sink.checkpoint_ts(), None

    async def _kept(self, sink: SimSink, durable: list[int]) -> list[int]:
        try:
            checkpoint_ts = await self._source.checkpoint_ts()
            new = [
                chunk
                for chunk, ts in sink.chunks.items()
                if ts <= checkpoint_ts and chunk not in durable
            ]
            if new:
                await self._source.keep_chunks([*durable, *new])
        except UnavailableError:
            return durable
        return [*durable, *new]
