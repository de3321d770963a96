"""The puller of all pumps: reads each from the checkpoint on,
and adds their transactions in the order of commit_ts.

Invariants:
1. A table is resolved up to a ts only when every pump that may have a transaction up to it has sent
   it: the registry was read after that ts was taken, and no pump that is not offline is left out,
   wherever it is.
2. A schema change is reported when all rows up to it were added, before a row above it is.
3. Memory is bounded: a pump that has sent LANE_BYTES that nobody took is not read on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import structlog

from server.changefeed.table import SourceTable
from server.puller import metrics
from server.puller.pump.registry import Membership, PumpNode, read_membership
from server.puller.pump.stream import PumpStream
from server.puller.pump.transactions import Merge, Tables, Transaction, batches
from server.puller.source import Catalog, Peer, Rows, SourceContext
from server.puller.tidb.cluster import Schemas, unwritten_rows
from server.puller.tidb.schema_puller import table_change
from storage.meta.meta import Meta
from storage.model.errors import CorruptError, InvalidError, TidemarkError, UnavailableError
from storage.model.ts import compose, physical_ms

LANE_BYTES: Final = 32 << 20
_TAKE_BYTES: Final = 8 << 20
_REGISTRY_S: Final = 1.0
_SLOW_S: Final = 30

_log = structlog.get_logger(__name__)


class PumpOfflineError(InvalidError):
    """A pump went offline with binlogs that were not read."""

    code = "ErrPumpOfflineUnread"


@dataclass(frozen=True, slots=True)
class Feed:
    """The input and output of a puller: the changefeed, its tables, its start_ts, and where rows
    go.
    """

    changefeed: str
    tables: Sequence[SourceTable]
    start_ts: int
    rows: Rows
    catalog: Catalog


class PumpPuller:
    """Implements `server.puller.source.Puller` for all tables of a changefeed."""

    def __init__(
        self,
        context: SourceContext,
        meta: Meta,
        feed: Feed,
        register: Callable[[], Awaitable[None]],
    ) -> None:
        self.resolved_ts = feed.start_ts
        self._context = context
        self._meta = meta
        self._feed = feed
        self._register = register
        self._schemas = Schemas(context.pd, context.kv)
        self._merge = Merge(feed.start_ts)
        # up to where all pumps that may have transactions are in the merge
        self._known_ts = feed.start_ts
        self._streams: dict[str, tuple[PumpStream, asyncio.Task[None]]] = {}
        self._next_warning_ts = 0
        self._moved = asyncio.Event()
        self._taken = asyncio.Event()

    @property
    def slowest_peer(self) -> Peer | None:
        """See `server.puller.source.Merging`."""
        pump, position_ts = self._merge.slowest
        running = self._streams.get(pump)
        return Peer(pump, running[0].host if running else "", position_ts) if pump else None

    async def run(self) -> None:
        """See `Puller.run`.

        Raises:
            BinlogPurgedError, PumpOfflineError, HistoryLostError: binlogs or schemas that are
                needed are gone.
            BinlogInvalidError, PrewriteMissingError, MutationError, TableUnknownError: a binlog
                cannot be read.
            SchemaGapError, DdlUnsupportedError, TableIneligibleError: rows after a schema change
                cannot be read.
        """
        history = await self._schemas.at(self._feed.start_ts)
        tables = Tables(history, self._feed.tables)
        for table in self._feed.tables:
            await self._add_unwritten(table, self._feed.start_ts)
        # Before the first pull: a pump's GC keeps what registered readers need.
        await self._register()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_registry(tasks), name="pumps of the registry")
                tasks.create_task(self._deliver(tables), name="merge of pumps")
        finally:
            # The changefeed is paused or removed, or goes on in another capture.
            metrics.PUMP_BEHIND.remove(self._feed.changefeed)

    async def _watch_registry(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            try:
                membership = await read_membership(self._context.pd, self._meta)
                self._follow(membership, tasks)
                self._report_slowest(membership.ts)
                await self._register()
            except UnavailableError as err:
                # The streams go on; nothing is resolved beyond the last timestamp that was taken.
                _log.warning("registry of pumps not read", error=str(err))
            await asyncio.sleep(_REGISTRY_S)

    def _follow(self, membership: Membership, tasks: asyncio.TaskGroup) -> None:
        """Read every pump that may have binlogs for us;
        then all that have some up to the membership's ts are known.
        """
        for node in membership.nodes:
            # In any other state it may come back with binlogs.
            if node.is_offline:
                self._release(node, membership.ts)
            elif (running := self._streams.get(node.name)) is None or running[0].host != node.host:
                self._begin(node, tasks)
        # Only when every pump of the registry is in the merge: `take` goes up to here.
        self._known_ts = max(self._known_ts, membership.ts)
        self._moved.set()

    def _report_slowest(self, now_ts: int) -> None:
        """Log which pump the others wait for, once it takes long."""
        pump, position_ts = self._merge.slowest
        behind_s = max(0, physical_ms(now_ts) - physical_ms(position_ts)) / 1e3 if pump else 0.0
        metrics.PUMP_BEHIND.labels(self._feed.changefeed).set(behind_s)
        if behind_s > _SLOW_S and now_ts >= self._next_warning_ts:
            self._next_warning_ts = compose(physical_ms(now_ts) + _SLOW_S * 1000)
            _log.warning(
                "all wait for one pump",
                pump=pump,
                position_ts=position_ts,
                behind_s=round(behind_s),
            )

    def _begin(self, node: PumpNode, tasks: asyncio.TaskGroup) -> None:
        # A pump that came back elsewhere keeps its place in the merge, and is read on from there.
        if node.name not in self._merge:
            self._merge.add(node.name)
        self._end(node.name)
        last_ts, context = self._merge.position_ts(node.name), self._context
        stream = PumpStream(
            node.name,
            node.host,
            context.pd.cluster_id,
            context.security,
            last_ts,
            context.stream_silence_s,
        )
        self._streams[node.name] = (
            stream,
            tasks.create_task(self._read(stream), name=f"pump {node.name}"),
        )
        _log.info("pump is read", pump=node.name, host=node.host, state=node.state, last_ts=last_ts)

    def _release(self, node: PumpNode, ts: int) -> None:
        """Wait for an offline pump no more.

        Raises:
            PumpOfflineError: it has binlogs that were not read.
        """
        position_ts = self._merge.resolved_ts
        if node.name in self._merge:
            position_ts = self._merge.position_ts(node.name)
        if position_ts < node.max_commit_ts:
            raise PumpOfflineError(
                f"pump {node.name} is offline with binlogs up to {node.max_commit_ts}, of which "
                f"this feed has those up to {position_ts}: start the pump again, or set its state "
                "to paused, until they are read"
            )
        # It stays in the merge, since what it sent may not have come out; nothing more follows, so
        # its position moves with the clock.
        if node.name in self._merge:
            self._merge.heartbeat(node.name, ts)
            self._end(node.name)

    def _end(self, pump: str) -> None:
        if (running := self._streams.pop(pump, None)) is not None:
            running[1].cancel()

    async def _read(self, stream: PumpStream) -> None:
        async for transaction in stream.run():
            # One pump may be far ahead of the slowest one, which all have to wait for.
            while self._merge.waiting_bytes(stream.name) > LANE_BYTES:
                self._taken.clear()
                await self._taken.wait()
            if transaction.prewrite_value or transaction.ddl_job_id:
                self._merge.push(stream.name, transaction)
            else:
                self._merge.heartbeat(stream.name, transaction.commit_ts)
            self._moved.set()

    async def _deliver(self, tables: Tables) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._moved.wait()
            self._moved.clear()
            while True:
                before_ts = self._merge.resolved_ts
                taken = self._merge.take(self._known_ts, _TAKE_BYTES)
                self._taken.set()
                if self._merge.resolved_ts == before_ts:
                    break
                # Added before it is resolved; and the schema changes among them are in force then.
                await self._add_all(taken, tables)
                await loop.run_in_executor(
                    self._feed.rows.executor, self._resolve, tables, self._merge.resolved_ts
                )
                self.resolved_ts = self._merge.resolved_ts

    async def _add_all(self, transactions: Sequence[Transaction], tables: Tables) -> None:
        """Add rows up to each schema change, then bring it in force, and go on."""
        begin = 0
        for end, transaction in enumerate(transactions):
            if transaction.ddl_job_id:
                await self._add(transactions[begin:end], tables)
                try:
                    await self._change(transaction, tables)
                except (InvalidError, CorruptError) as err:
                    await self._refuse(transaction.commit_ts - 1, err, tables)
                begin = end + 1
        await self._add(transactions[begin:], tables)

    async def _refuse(self, ts: int, error: TidemarkError, tables: Tables) -> NoReturn:
        """Let everything before a schema change that cannot be followed be delivered,
        then raise `error`.
        """
        if ts > self.resolved_ts:
            await asyncio.get_running_loop().run_in_executor(
                self._feed.rows.executor, self._resolve, tables, ts
            )
            self.resolved_ts = ts
        await self._feed.catalog.refuse(ts, error)

    async def _add(self, transactions: Sequence[Transaction], tables: Tables) -> None:
        if transactions:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(
                self._feed.rows.executor, self._add_rows, transactions, tables
            )

    def _add_rows(self, transactions: Sequence[Transaction], tables: Tables) -> None:
        for span, batch in batches(transactions, tables):
            metrics.ROWS.inc(batch.num_rows)
            self._feed.rows.add(span, batch)

    def _resolve(self, tables: Tables, ts: int) -> None:
        for span in tables.spans:
            self._feed.rows.resolve(span, ts)

    async def _change(self, transaction: Transaction, tables: Tables) -> None:
        job = await self._schemas.job(transaction.ddl_job_id, transaction.commit_ts)
        change = tables.history.apply(job, transaction.commit_ts, late=True)
        taken = table_change(change, self._feed.catalog) if change else None
        if taken is None:
            return
        _log.info(
            "schema change", commit_ts=taken.commit_ts, job_id=job.id, tables=len(taken.tables)
        )
        # Durable before any row above it is added: after a crash, readers know the schema of what
        # they are given.
        await self._feed.catalog.change(taken)
        tables.drop(taken.dropped)
        for table in taken.tables:
            tables.take(table)
            await self._add_unwritten(table, taken.commit_ts)

    async def _add_unwritten(self, table: SourceTable, ts: int) -> None:
        loop = asyncio.get_running_loop()
        async for batch in unwritten_rows(self._schemas, table, ts, own_keys=True):
            await loop.run_in_executor(
                self._feed.rows.executor, self._feed.rows.add, table.span, batch
            )
