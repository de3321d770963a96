"""The puller of a MySQL-protocol server's log: one connection brings the changes of all tables of a
changefeed.

Invariants:
1. Tables are resolved up to the last complete transaction, after all rows up to it were added.
2. After a fault the log is read again behind the last complete transaction, from the first server
   that has it; rows of the broken one were not added, or are added again as they were.
3. Nothing is kept here that the log and the saved positions do not give again.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

import numpy as np
import structlog

from server.changefeed.table import SourceTable
from server.puller import metrics
from server.puller.mysql.catalogue_check import CatalogueCheck, Followed
from server.puller.mysql.ddl.tree import CreateTable, TableName
from server.puller.mysql.ddl_changes import DdlChanges
from server.puller.mysql.listener import LogListener, TableCopier
from server.puller.mysql.log.heartbeat import HeartbeatWriter
from server.puller.mysql.log.opening import OpenLog, accepted_until_ms, oldest, open_log
from server.puller.mysql.log.position import STEP, LogPosition, TimeLimits
from server.puller.mysql.log.read_server import ReadServerRecord, StandstillCheck
from server.puller.mysql.log.saved_positions import (
    SAVE_EVERY_S,
    PositionStore,
    RetentionMonitor,
    TimeLimitsRecord,
)
from server.puller.mysql.log.stream import leased_server_id
from server.puller.mysql.rows import LogRows, TableMapMismatch
from server.puller.mysql.session.catalogue import (
    changes_alone,
    may_nest_savepoints,
    read_collations,
    read_definitions,
    schema_collation,
)
from server.puller.mysql.session.connection import QueryThreads, Session
from server.puller.mysql.session.errors import (
    BarrierInterruptedError,
    MySqlUnavailableError,
    ServerIdTakenError,
    TornTransactionError,
    XaUnknownError,
)
from server.puller.mysql.session.options import MySqlOptions
from server.puller.mysql.tables import CatalogFacts, Effect, Tables, statement_logged
from server.puller.mysql.transaction.commits import Commits
from server.puller.mysql.transaction.open_transaction import Torn, UnclearSavepoint
from server.puller.mysql.transaction.scanner import (
    FoundDefinition,
    LogAhead,
    log_end,
)
from server.puller.mysql.transaction.transactions import (
    HELD_BYTES,
    LogBegins,
    LoggedStatement,
    Transactions,
    UndecidedTimes,
    UnpreparedXaCommit,
    XaMoved,
)
from server.puller.source import Catalog, Rows
from storage.backoff import Backoff
from storage.meta.meta import Meta
from storage.model.errors import InvalidError, TidemarkError
from storage.model.ts import physical_ms
from storage.mysql.event import Events, EventType

T = TypeVar("T")
Barrier: TypeAlias = LoggedStatement | TableMapMismatch | UnpreparedXaCommit
"""What the log cannot be read beyond without a look at it on the event loop."""
_TAKE_S: Final = 0.25
_BACKOFF_S: Final = (0.1, 2.0)
_GIVE_UP_S: Final = 30.0
_MANY_TABLES: Final = 100
# who reads the log, the heart, who looks how long the log is kept, and who at the catalogue
_ASKERS: Final = 4
_RESOLVE_EVERY_S: Final = 0.05

_IS_HEARTBEAT: Final = np.isin(np.arange(256), [EventType.HEARTBEAT, EventType.HEARTBEAT_V2])
_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class OddTimes:
    """The transactions whose times do not count, since the puller began."""

    transactions: int = 0
    latest_ms: int = 0

    @property
    def warnings(self) -> Sequence[str]:
        """The warnings that `changefeed query` shows."""
        if not self.transactions:
            return ()
        latest = datetime.fromtimestamp(self.latest_ms / 1000, UTC).isoformat()
        text = (
            f"{self.transactions} transactions of the log have times that were to come by more "
            f"than max-clock-skew (the latest {latest}; SET timestamp, or the server's clock): "
            f"they move commit_ts on by {STEP} only"
        )
        return (text,)


@dataclass(frozen=True, slots=True)
class Upstream:
    """The source of a changefeed, as its puller needs it."""

    changefeed: str
    options: MySqlOptions
    meta: Meta
    listener: LogListener | None = None
    torn: Torn = field(default_factory=dict)
    """Where transactions begin that a server never ended, or that undid rows that were given
    (these); known as long as the source.
    """
    copying: TableCopier | None = None
    odd_times: OddTimes = field(default_factory=OddTimes)
    catalogue: CatalogueCheck | None = None
    """Compares the tables with the server's; None: nobody does."""


class LogPuller:
    """Implements `server.puller.source.Puller` for `tables`, the tables in force at `start_ts`."""

    def __init__(
        self,
        tables: Sequence[SourceTable],
        start_ts: int,
        upstream: Upstream,
        rows: Rows,
        catalog: Catalog,
    ) -> None:
        self.resolved_ts = start_ts
        self._start_ts = start_ts
        self._upstream = upstream
        self._sorter_rows = rows
        self._tables = Tables(tables)
        self._catalog = catalog
        self._was_without_tables = False
        self._log_rows = LogRows(self._tables, start_ts, rows, upstream.listener)
        self._ddl = DdlChanges(
            self._tables, self._log_rows, catalog, upstream.listener, upstream.copying
        )
        self._position_store = PositionStore(upstream.meta, upstream.changefeed)
        self._time_limits = TimeLimitsRecord(upstream.meta, upstream.changefeed)
        self._read_server = ReadServerRecord(upstream.meta, upstream.changefeed)
        self._saved_at = 0.0
        self._resolved_at = 0.0
        self._heard_at = 0.0
        self._is_quiet = True
        """Whether the last take brought nothing of the log."""
        self._transactions: Transactions | None = None
        self._ahead = LogAhead(upstream.options, fold_case=False)
        self._held_bytes = min(HELD_BYTES, rows.open_transactions.memory_bytes)
        self._asking = QueryThreads(_ASKERS, f"asks {upstream.changefeed}")

    async def run(self) -> None:
        """See `Puller.run`."""
        options = self._upstream.options
        if self._upstream.copying is not None:
            await self._upstream.copying.begin(self._start_ts)
        saved_position = await self._position_store.begin(self._start_ts)
        if saved_position is None:
            saved_position = await self._ask(oldest, options, self._start_ts)
            # Saved before anything is read: after a restart commit_ts go on from there, too.
            await self._position_store.put(saved_position)
        await self._read_server.load()
        time_limits = await self._time_limits.load() or TimeLimits.accepting(
            physical_ms(self._start_ts)
        )
        self._transactions = Transactions(
            LogPosition(saved_position),
            torn=self._upstream.torn,
            held_bytes=self._held_bytes,
            time_limits=time_limits,
            shared=self._sorter_rows.open_transactions,
        )
        heartbeats = HeartbeatWriter(self._upstream.changefeed, options)
        retention = RetentionMonitor(self._upstream.changefeed, options, self._upstream.meta)
        with self._showing_lag():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pull(), name=f"log {self._upstream.changefeed}")
                tasks.create_task(
                    heartbeats.run(lambda: self._position.ts, self._asking), name="heartbeat"
                )
                tasks.create_task(retention.run(self._asking), name="retention of the log")
                if self._upstream.catalogue is not None:
                    look = self._upstream.catalogue.run(self._catalog.wants, self._asking)
                    tasks.create_task(look, name="catalogue check")

    @contextmanager
    def _showing_lag(self) -> Iterator[None]:
        """Show how old what was read is, by the clock and not by what comes, for the block: a log
        that stands still would show its last lag for ever.
        """

        def lag_s() -> float:
            return max(0.0, time.time() - physical_ms(self.resolved_ts) / 1000)

        metrics.RESOLVED_LAG.labels(self._upstream.changefeed).set_function(lag_s)
        try:
            yield
        finally:
            # Paused or removed, or it goes on in another capture.
            metrics.RESOLVED_LAG.remove(self._upstream.changefeed)

    @property
    def _position(self) -> LogPosition:
        assert self._transactions is not None, "it runs"
        return self._transactions.position

    async def _pull(self) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        while True:
            lease = leased_server_id(
                self._upstream.meta, self._upstream.changefeed, self._upstream.options.server_id
            )
            async with lease as server_id:
                try:
                    await self._read(server_id)
                except ServerIdTakenError as err:
                    _log.warning(
                        "another reader has our server id", server_id=server_id, error=err.message
                    )
                    await asyncio.sleep(_BACKOFF_S[1])

    async def _read(self, server_id: int) -> None:
        """Read until our id is taken; raises what trying again at once does not help against."""
        backoff = Backoff(*_BACKOFF_S)
        while True:
            begun_at = self._heard_at
            try:
                await self._connect_and_follow(server_id)
            except MySqlUnavailableError as err:
                metrics.RECONNECTS.inc()
                silent_s = asyncio.get_running_loop().time() - self._heard_at
                _log.warning(
                    "log connection lost", changefeed=self._upstream.changefeed, error=err.message
                )
                if silent_s > _GIVE_UP_S:
                    raise
            if self._heard_at > begun_at:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _connect_and_follow(self, server_id: int) -> None:
        log = await self._open(server_id)
        try:
            await self._read_server.note(log.server, self._position.ts + 1)
            server, gtids = log.session.address, self._position.snapshot.gtids
            _log.info(
                "log opened",
                changefeed=self._upstream.changefeed,
                host=server.host,
                port=server.port,
                gtids=gtids,
            )
            await self._follow(log)
        except TornTransactionError as err:
            # Rows of it were given already: the next run, from the checkpoint, leaves them out.
            self._upstream.torn[err.transaction] = err.rows
            raise
        finally:
            log.close()

    async def _open(self, server_id: int) -> OpenLog:
        loop = asyncio.get_running_loop()
        saved_position, options = self._position.snapshot, self._upstream.options
        read_server = self._read_server.known
        opening = loop.run_in_executor(
            self._asking, open_log, options, saved_position, server_id, read_server
        )
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The thread cannot be stopped: close what it opens after the cancellation.
            opening.add_done_callback(_close_unwanted)
            raise

    async def _follow(self, log: OpenLog) -> None:
        assert self._transactions is not None, "it runs"
        self._transactions.reconnected(fold_case=log.fold_case, same_server=log.same_server)
        self._log_rows.connected(mariadb=log.session.flavor.is_mariadb)
        # Maybe another server: places in its log are others.
        self._ahead = LogAhead(self._upstream.options, fold_case=log.fold_case)
        waiting = log.first
        standstill = StandstillCheck(asyncio.get_running_loop().time)
        look_at_end = partial(self._ask, log_end, log.session)
        while True:
            self._is_quiet = True
            work = self._work(log, waiting)
            while (barrier := await self._call(next, work, None)) is not None:
                if isinstance(barrier, UndecidedTimes):
                    await self._decide_times(barrier, log)
                    continue
                # The position is already behind events that were not worked on yet: after a barrier
                # that failed, the log cannot go on from there.
                try:
                    await self._pass(barrier, log)
                except InvalidError as err:
                    await self._refuse(_before(barrier), err)
                except MySqlUnavailableError as err:
                    raise BarrierInterruptedError(
                        f"{err.message}; the log is read again from the checkpoint"
                    ) from err
            self._resolve_all()
            waiting = []
            self._heard_at = asyncio.get_running_loop().time()
            if self._is_quiet and log.stream.is_between_events:
                await standstill.look(look_at_end)
            else:
                standstill.note_arrival()
            await self._save_position()
            if self._upstream.catalogue is not None:
                self._upstream.catalogue.give(self._followed)

    def _followed(self) -> Followed:
        tables = {
            name: table.record.whole.table_info for name, table in self._tables.by_name.items()
        }
        place = (self._position.file, self._position.position)
        return Followed(place, tables, frozenset(self._log_rows.ignored))

    def _work(self, log: OpenLog, waiting: list[Events]) -> Iterator[Barrier | UndecidedTimes]:
        """One take of the log; runs in a thread, and stops at what needs the event loop."""
        assert self._transactions is not None, "it runs"
        for events in waiting or log.stream.take(_TAKE_S):
            self._is_quiet &= bool(_IS_HEARTBEAT[events.types].all())
            for item in self._transactions.take(events):
                if isinstance(item, LogBegins):
                    self._log_rows.log_begins()
                elif isinstance(item, Commits):
                    yield from self._log_rows.add(item)
                elif isinstance(item, XaMoved):
                    if self._upstream.listener is not None:
                        self._upstream.listener.xa_moved(item.xid, waits=item.waits)
                elif isinstance(item, UndecidedTimes):
                    yield item
                # What was brought in force up to the start is in the tables that we began with.
                elif item.commit_ts > self._start_ts:
                    if isinstance(item, UnclearSavepoint):
                        self._tables.check_savepoint(
                            item, nested=partial(may_nest_savepoints, log.session)
                        )
                        continue
                    yield item
        self._resolve()

    def _resolve(self) -> None:
        """Everything up to the last complete transaction was added;
        many tables are told less often.
        """
        ts, now = self._position.ts, time.monotonic()
        tables = self._tables.by_name.values()
        if ts <= self.resolved_ts or (
            len(tables) > _MANY_TABLES and now - self._resolved_at < _RESOLVE_EVERY_S
        ):
            return
        for table in tables:
            self._sorter_rows.resolve(table.span, ts)
        self.resolved_ts, self._resolved_at = ts, now

    def _resolve_all(self) -> None:
        """Resolve the changefeed as a whole, once it was without tables to resolve one by one."""
        self._was_without_tables |= not self._tables.by_name
        if self._was_without_tables:
            self._catalog.resolve(max(self._start_ts, self._position.ts))

    async def _refuse(self, ts: int, error: TidemarkError) -> NoReturn:
        """Let everything before a statement that cannot be followed be delivered,
        then raise `error`.
        """
        if ts > self.resolved_ts:
            # A table that began above `ts` is resolved there already.
            tables_at_ts = self._catalog.known(ts)
            began = (
                None if tables_at_ts is None else {table.span for table in tables_at_ts.values()}
            )
            for table in self._tables.by_name.values():
                if began is None or table.span in began:
                    await self._call(self._sorter_rows.resolve, table.span, ts)
            self.resolved_ts = ts
        await self._catalog.refuse(ts, error)

    async def _pass(self, barrier: Barrier, log: OpenLog) -> None:
        """A table is, or may be, another one from here on; or rows are missing."""
        if isinstance(barrier, UnpreparedXaCommit):
            raise _unknown(barrier)
        if isinstance(barrier, TableMapMismatch):
            names = list(barrier.table_maps)
            definitions = await self._ask(read_definitions, log.session, names)
            await self._ddl.apply_mismatch(barrier, definitions)
            return
        effect = self._ddl.effect_of(barrier)
        target = self._ddl.changed_by_statement(barrier)
        if target is not None and not await self._changes_alone(barrier, target, log):
            at = f"{barrier.file}:{barrier.position}"
            raise statement_logged(
                barrier.query.sql,
                at,
                barrier.commit_ts,
                "its table may be a view, or have triggers, that change rows of captured ones",
            )
        if not effect:
            return
        metrics.DDLS.inc()
        facts = await self._ask(partial(self._catalog_facts, log.session, barrier, effect))
        outcome = self._ddl.outcome(barrier, effect, facts)
        tree = barrier.statement.tree
        # IF NOT EXISTS leaves a table that is followed as it is: to look for it behind the
        # statement may take all of the log that is still to be read.
        may_be_new = isinstance(tree, CreateTable) and not tree.if_not_exists
        new = [
            name
            for name, table_id in effect.touched.items()
            if may_be_new or self._tables.by_id(table_id) is None
        ]
        seen = await self._seen_behind(barrier, list({*outcome.lost, *new}), log)
        await self._ddl.apply(barrier, effect, outcome, seen)

    async def _seen_behind(
        self, barrier: LoggedStatement, names: Sequence[TableName], log: OpenLog
    ) -> Mapping[TableName, FoundDefinition]:
        """What tables are right behind a statement that does not tell it."""
        if not names:
            return {}
        # After a restart the server has gone on: it would tell of a later statement, and readers
        # were given what it told first.
        definitions = self._ddl.known(barrier, names)
        if definitions is not None:
            return definitions
        place = (barrier.file, barrier.behind or barrier.position)
        return await self._ask(self._ahead.definitions, log.session, names, place)

    async def _changes_alone(
        self, barrier: LoggedStatement, target: TableName, log: OpenLog
    ) -> bool:
        """Whether the rows of a statement's table changed without triggers: the catalogue tells,
        unless the log has ended some since.
        """
        place = (barrier.file, barrier.behind or barrier.position)
        return await self._ask(changes_alone, log.session, target) and await self._ask(
            self._ahead.changed_alone, log.session, target, place
        )

    async def _decide_times(self, undecided: UndecidedTimes, log: OpenLog) -> None:
        """Decide by the present whether times count; durable before a commit_ts follows from it."""
        assert self._transactions is not None, "it runs"
        present_ms = await self._ask(accepted_until_ms, log.session, self._upstream.options)
        decision = self._transactions.time_limits.decide(
            undecided.previous_ts, undecided.times_ms, present_ms
        )
        await self._time_limits.save(decision.time_limits)
        self._transactions.time_limits = decision.time_limits
        if decision.odd_ms:
            odd = self._upstream.odd_times
            odd.transactions += len(decision.odd_ms)
            odd.latest_ms = max(odd.latest_ms, *decision.odd_ms)
            metrics.ODD_TIMES.inc(len(decision.odd_ms))
            _log.warning(
                "odd times in the log",
                changefeed=self._upstream.changefeed,
                warning=odd.warnings[0],
            )

    def _catalog_facts(
        self, session: Session, logged: LoggedStatement, effect: Effect
    ) -> CatalogFacts:
        """Ask the server what a statement leaves to it; runs in a thread."""
        tree = logged.statement.tree
        usual = schema_collation(session, tree.name[0]) if isinstance(tree, CreateTable) else ""
        return CatalogFacts(
            read_collations(session), usual, read_definitions(session, self._ddl.incomplete(effect))
        )

    async def _save_position(self) -> None:
        assert self._transactions is not None, "it runs"
        now = asyncio.get_running_loop().time()
        # Rows of a prepared XA transaction lie before the position: who began there would miss
        # them at its XA COMMIT.
        if now - self._saved_at >= SAVE_EVERY_S and self._transactions.is_at_rest:
            await self._position_store.put(self._position.snapshot)
            self._saved_at = now

    async def _ask(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a query of the server in a thread; a caller that is cancelled waits for no answer."""
        return await asyncio.get_running_loop().run_in_executor(self._asking, function, *arguments)

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run in a thread of this changefeed; whoever is cancelled waits for its end:
        nothing is added after.
        """
        calling = asyncio.get_running_loop().run_in_executor(
            self._sorter_rows.executor, function, *arguments
        )
        try:
            return await asyncio.shield(calling)
        except asyncio.CancelledError:
            if self._transactions is not None:
                self._transactions.end()
            await asyncio.wait([calling])
            raise


def _before(barrier: Barrier) -> int:
    """Up to where all is delivered that the log has before it: a change of columns that its rows
    show has the commit_ts before theirs, and is told again from here on.
    """
    return barrier.commit_ts - (2 if isinstance(barrier, TableMapMismatch) else 1)


def _unknown(item: UnpreparedXaCommit) -> XaUnknownError:
    return XaUnknownError(
        f"XA transaction {item.xid}, committed at {item.commit_ts}, was prepared before the "
        "changefeed's log begins: its rows are not known. Resume with --overwrite-checkpoint-ts "
        f"{item.commit_ts}, which is after it, then copy the tables by `tidemark cli changefeed "
        "dumpstart`; rows that it deleted are removed from the target by `tidemark cli verify "
        "--repair`"
    )


def _close_unwanted(opening: "asyncio.Future[OpenLog]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
