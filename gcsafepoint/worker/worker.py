"""The GC worker: ticks for leadership, starts rounds when they are due, and takes each through its phases in order.

Per round: the safepoint is saved first, and only then are locks resolved, ranges deleted and versions collected, each
after the other (seed: "update the safepoint first, delete ranges after"). Every request is preceded by a look at the
lease. An error ends the round, not the worker: the next round does everything that was left.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from gcsafepoint.worker import safepoint
from gcsafepoint.worker.cluster import Cluster
from gcsafepoint.worker.config import GCConfig
from gcsafepoint.worker.delete_ranges import DeleteRange, delete_ranges
from gcsafepoint.worker.do_gc import do_gc
from gcsafepoint.worker.election import Election, LeaseLostError
from gcsafepoint.worker.guarded import GuardedCluster
from gcsafepoint.worker.records import (
    LAST_RUN_TIME,
    SAFE_POINT,
    SAFE_POINT_TS,
    Records,
    oldest_running_ts,
    read_config,
)
from gcsafepoint.worker.resolve_locks import resolve_locks
from gcsafepoint.worker.round import GCRunningError, Phase, Round, Rounds
from gcsafepoint.worker.times import format_instant, parse_instant_ms
from storage.model.errors import TidemarkError, UnavailableError
from storage.model.ts import physical_ms

NOTHING_NEW = "no new safepoint"
DONE = "done"
LOST = "lost the lease"
FAILED = "failed"
STOPPED = "stopped"


class WorkerStoppedError(UnavailableError):
    """The worker is starting or stopping."""

    code = "ErrGCWorkerStopped"

    def __init__(self) -> None:
        super().__init__("this gc worker is starting or stopping; ask again, or ask the next leader")


class Listener(Protocol):
    """Who hears what the worker does: logs, metrics."""

    def led(self, *, leads: bool) -> None:
        """After each tick."""
        ...

    def tick_failed(self, err: TidemarkError) -> None:
        """The coordinator or the metadata store could not be asked."""
        ...

    def round_skipped(self, err: TidemarkError) -> None:
        """A round came while another one was in its first phases."""
        ...

    def phase_ended(self, phase: Phase, seconds: float) -> None:
        """A phase was gone through."""
        ...

    def range_deleted(self, it: DeleteRange, err: TidemarkError | None) -> None:
        """A range was destroyed, or could not be."""
        ...

    def locks_resolved(self, locks: int) -> None:
        """A region's page of locks is gone."""
        ...

    def round_ended(self, it: Round, outcome: str, err: TidemarkError | None) -> None:
        """A round is over; `outcome` is one of the constants of this module."""
        ...


class GCWorker:
    """One worker of a cluster, leading or not."""

    def __init__(
        self,
        cluster: Cluster,
        records: Records,
        election: Election,
        listener: Listener,
        *,
        monotonic_s: Callable[[], float],
    ) -> None:
        self.rounds = Rounds()
        self.election = election
        self._unguarded = cluster
        self._cluster = GuardedCluster(cluster, election.check)
        self._records = records
        self._listener = listener
        self._monotonic_s = monotonic_s
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self, tick_s: float) -> None:
        """Tick every `tick_s` seconds until cancelled; then give up the leadership."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await self._tick_for_ever(self._tasks, tick_s)
        finally:
            await self._resign()

    async def _tick_for_ever(self, tasks: asyncio.TaskGroup, tick_s: float) -> None:
        try:
            while True:
                if await self.tick():
                    tasks.create_task(self._due_round(), name="gc round")
                await asyncio.sleep(tick_s)
        finally:
            self._tasks = None

    async def tick(self) -> bool:
        """Claim or renew the leadership; returns whether a round is due and ours to run."""
        try:
            marked_s = self._monotonic_s()
            now_ms = physical_ms(await self._unguarded.now_ts())
            leads = await self.election.tick(marked_s, now_ms)
            self._listener.led(leads=leads)
            return leads and await self._is_due(now_ms)
        except TidemarkError as err:
            self._listener.tick_failed(err)
            return False

    async def demand_round(self) -> Round:
        """Run a round now, due or not, to its end even if the caller goes away.

        Raises:
            WorkerStoppedError: the worker does not run, or was stopped meanwhile; beyond that as `run_round`.
        """
        if self._tasks is None:
            raise WorkerStoppedError
        ended: asyncio.Future[Round | TidemarkError] = asyncio.get_running_loop().create_future()
        self._tasks.create_task(self._demanded_round(ended), name="gc round on demand")
        outcome = await asyncio.shield(ended)
        if isinstance(outcome, TidemarkError):
            raise outcome
        return outcome

    async def run_round(self) -> Round:
        """Run a round; returns it when it has ended.

        Raises:
            GCRunningError: one is in its first phases already.
            LeaseLostError: this worker does not lead.
            TidemarkError: whatever ended the round early.
        """
        now_ts = await self._cluster.now_ts()
        number = self.rounds.admit(physical_ms(now_ts))
        try:
            result = await self._phases(number, now_ts)
        except TidemarkError as err:
            self._end(number, LOST if isinstance(err, LeaseLostError) else FAILED, err)
            raise
        except BaseException:
            self._end(number, STOPPED, None)
            raise
        return self._end(number, result, None)

    def _end(self, number: int, result: str, err: TidemarkError | None) -> Round:
        ended = self.rounds.end(number, result if err is None else f"{result}: {err}")
        self._listener.round_ended(ended, result, err)
        return ended

    async def _resign(self) -> None:
        try:
            await self.election.resign()
        except TidemarkError as err:
            self._listener.tick_failed(err)  # the lease runs out by itself

    async def _demanded_round(self, ended: "asyncio.Future[Round | TidemarkError]") -> None:
        outcome: Round | TidemarkError = WorkerStoppedError()
        try:
            outcome = await self.run_round()
        except TidemarkError as err:
            outcome = err
        finally:
            ended.set_result(outcome)  # also when it is cancelled: somebody waits

    async def _due_round(self) -> None:
        try:
            await self.run_round()
        except GCRunningError as err:
            self._listener.round_skipped(err)
        except TidemarkError:
            return  # the listener heard of it; the next round does what is left

    async def _is_due(self, now_ms: int) -> bool:
        config = await read_config(self._records)
        held = await self._records.read(LAST_RUN_TIME)
        last_ms = parse_instant_ms(held[LAST_RUN_TIME].value) if held else None
        return config.enable and safepoint.is_due(now_ms, last_ms, config.run_interval_ms)

    async def _phases(self, number: int, now_ts: int) -> str:
        config = await read_config(self._records)
        with self._timed(Phase.PREPARE):
            safe_point = await self._prepare(config, now_ts)
        if safe_point is None:
            return NOTHING_NEW
        self.rounds.aim(number, safe_point)
        self.rounds.enter(number, Phase.RESOLVE_LOCKS)
        with self._timed(Phase.RESOLVE_LOCKS):
            await resolve_locks(self._cluster, config, safe_point, self._page_counter(number))
        self.rounds.enter(number, Phase.DELETE_RANGES)
        with self._timed(Phase.DELETE_RANGES):
            await delete_ranges(
                self._cluster, self._records, lambda: self.election.fence, safe_point, self._range_counter(number)
            )
        self.rounds.enter(number, Phase.DO_GC)
        with self._timed(Phase.DO_GC):
            await do_gc(self._cluster, config, safe_point, lambda: self.rounds.superseded(number))
        return DONE

    async def _prepare(self, config: GCConfig, now_ts: int) -> int | None:
        """Decide the safepoint and save it, before anything is done in its name; None if it is not a new one."""
        asked = safepoint.wanted(now_ts, config.life_time_ms, await oldest_running_ts(self._records))
        held = await self._records.read(SAFE_POINT_TS)
        last = int(held[SAFE_POINT_TS].value) if held else 0
        if not safepoint.is_new(asked, last):
            return None
        safe_point = safepoint.granted(asked, await self._cluster.hold_safe_point(asked))
        saved: dict[str, str | None] = {
            LAST_RUN_TIME: format_instant(physical_ms(now_ts)),
            SAFE_POINT: format_instant(physical_ms(safe_point)),
            SAFE_POINT_TS: str(safe_point),
        }
        if not await self._records.write(saved, self.election.fence):
            raise LeaseLostError("another worker became GC leader while this one began a round")
        return safe_point

    def _page_counter(self, number: int) -> Callable[[int], None]:
        def count(locks: int) -> None:
            self.rounds.count(number, regions=1, resolved_locks=locks)
            self._listener.locks_resolved(locks)

        return count

    def _range_counter(self, number: int) -> Callable[[DeleteRange, TidemarkError | None], None]:
        def report(it: DeleteRange, err: TidemarkError | None) -> None:
            self.rounds.count(number, deleted_ranges=int(err is None), failed_ranges=int(err is not None))
            self._listener.range_deleted(it, err)

        return report

    @contextmanager
    def _timed(self, phase: Phase) -> Iterator[None]:
        began_s = self._monotonic_s()
        yield
        self._listener.phase_ended(phase, self._monotonic_s() - began_s)
