"""The GC worker: ticks for leadership, starts rounds when they are due or asked for,
and resigns when it is stopped.

At every tick a worker claims or renews the lease (`gcsafepoint.worker.election`). A worker that
leads sends a changed write rate to the stores (`WriteLimiter`) and starts a round when one is due;
`gcsafepoint.worker.gc_leader` runs it. An error ends a round, not the worker: the next round does
everything that was left.
"""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from gcsafepoint.worker.cluster import Cluster, LeasedCluster
from gcsafepoint.worker.config import BOUNDS, Bounds, DurationError, parse_instant_ms
from gcsafepoint.worker.election import CoordinatorClock, Election
from gcsafepoint.worker.gc_leader import GCLeader, Listener, WorkerState
from gcsafepoint.worker.records import (
    LAST_RUN_TIME,
    MAX_WRITE_BYTES_KEY,
    Records,
    Settings,
    read_settings,
    tidy_rounds,
)
from gcsafepoint.worker.round import GCRunningError, Round, Rounds, round_is_due
from storage.defect import request_error
from storage.model.errors import TidemarkError, UnavailableError
from storage.model.ts import physical_ms
from storage.tasks import gather

Outcome: TypeAlias = Round | TidemarkError


class WorkerStoppedError(UnavailableError):
    """The worker is starting or stopping."""

    code = "ErrGCWorkerStopped"

    def __init__(self) -> None:
        super().__init__(
            "this gc worker is starting or stopping; ask again, or ask the next leader"
        )


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
        bounds: Bounds = BOUNDS,
    ) -> None:
        self.bounds = bounds
        self.election = election
        self.clock = CoordinatorClock(monotonic_s)
        self.rounds = Rounds(election.uuid)
        self._unguarded = cluster
        self._cluster = LeasedCluster(cluster, election.check)
        self._records = records
        self._listener = listener
        self.leader = GCLeader(
            self._cluster,
            records,
            WorkerState(election, self.rounds, self.clock),
            listener,
            least_life_time_ms=bounds.least_ms,
        )
        self._write_limiter = WriteLimiter(self._cluster, listener)
        self._led_at_last_tick = False
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self, tick_s: float) -> None:
        """Tick every `tick_s` seconds until cancelled; then give up the leadership."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await self._tick_for_ever(tick_s)
        finally:
            await self._resign()

    async def _tick_for_ever(self, tick_s: float) -> None:
        try:
            while True:
                ticked_s = self.clock.monotonic_s()
                if await self.tick():
                    await self._begin_due_round()
                # What the tick took is taken off: slow peers cost no lease.
                await asyncio.sleep(max(0.0, ticked_s + tick_s - self.clock.monotonic_s()))
        finally:
            # Before the group ends: no round may be started in it any more.
            self._tasks = None

    async def tick(self) -> bool:
        """Claim or renew the leadership; returns whether a round is due and ours to run."""
        try:
            # Marked before the time is asked for: however late the answer comes, the lease counts
            # from here. And without the lease check, for a worker that does not lead may claim.
            marked_s = self.clock.monotonic_s()
            now_ms = physical_ms(await self._unguarded.now_ts())
            self.clock.set(marked_s, now_ms)
            leads = await self.election.tick(marked_s, now_ms)
            self._listener.tick_ended(leads=leads)
            if leads and not self._led_at_last_tick:
                await tidy_rounds(self._records, self.rounds.running, now_ms, self.election.fence)
            self._led_at_last_tick = leads
            return leads and await self._is_due(now_ms)
        except TidemarkError as err:
            self._listener.tick_failed(err)
            if not self.election.leads:
                # Cut off from the coordinator: the lease ran out, and another worker may lead.
                self._led_at_last_tick = False
                self._listener.tick_ended(leads=False)
            return False

    async def settings_changed(self) -> None:
        """Send a new write rate to the stores at once if this worker leads;
        otherwise the leader's next tick does.
        """
        if self.election.leads:
            await self._write_limiter.apply(await read_settings(self._records))

    async def begin_round(self) -> "tuple[Round, asyncio.Task[Outcome]]":
        """Start a round now, due or not; it runs on even if the caller is cancelled. Returns the
        round, and the task that ends with it.

        Raises:
            WorkerStoppedError: the worker does not run.
            GCRunningError: one is in its first phases already.
            LeaseLostError: this worker does not lead.
        """
        round_id = await self._cluster.now_ts()
        if self._tasks is None:
            raise WorkerStoppedError
        gc_round = self.rounds.admit(round_id, physical_ms(round_id))
        return gc_round, self._tasks.create_task(self._outcome(round_id), name="gc round")

    async def run_round_now(self) -> Round:
        """Run a round now; returns it when it has ended.

        Raises:
            WorkerStoppedError: the worker was stopped meanwhile; beyond that as `begin_round` and
                `GCLeader.run_round`.
        """
        _, ended = await self.begin_round()
        # `wait` does not cancel the round when the caller is cancelled.
        await asyncio.wait([ended])
        if ended.cancelled():
            raise WorkerStoppedError
        outcome = ended.result()
        if isinstance(outcome, TidemarkError):
            raise outcome
        return outcome

    async def _outcome(self, round_id: int) -> Outcome:
        try:
            return await self.leader.run_round(round_id)
        except Exception as err:  # noqa: BLE001 - a round that fails is no reason to end the worker
            # Reported to the listener already; the next round does what is left.
            return request_error(err, "gc round")

    async def _begin_due_round(self) -> None:
        try:
            await self.begin_round()
        except GCRunningError as err:
            self._listener.round_skipped(err)
        except TidemarkError as err:
            self._listener.tick_failed(err)

    async def _is_due(self, now_ms: int) -> bool:
        settings = await read_settings(self._records)
        config = settings.config
        self._listener.configured(config)
        await self._write_limiter.apply(settings)
        recorded = await self._records.read(LAST_RUN_TIME)
        last_ms = _last_run_ms(recorded[LAST_RUN_TIME].value) if recorded else None
        return config.enable and round_is_due(now_ms, last_ms, config.run_interval_ms)

    async def _resign(self) -> None:
        try:
            await self.election.resign()
        except TidemarkError as err:
            self._listener.tick_failed(err)  # the lease runs out by itself


def _last_run_ms(text: str) -> int | None:
    """Return when the last round began; None: the text cannot be read, so a round is due."""
    try:
        return parse_instant_ms(text)
    except DurationError:
        return None


class WriteLimiter:
    """Sends gc.max-write-bytes-per-sec from the metadata store to the stores,
    which hold Do GC to it.

    Each store gets a change once, and keeps the limit over restarts. As long as no limit was ever
    set here, the stores' own settings apply.
    """

    def __init__(self, cluster: Cluster, listener: Listener) -> None:
        self._cluster = cluster
        self._listener = listener
        self._limited_at: dict[str, int] = {}

    async def apply(self, settings: Settings) -> None:
        """Limit the stores that have an older limit;
        one that fails is tried again at the next tick.
        """
        revision = settings.revisions[MAX_WRITE_BYTES_KEY]
        addresses = await self._cluster.store_addresses() if revision else ()
        await gather(
            self._limit(address, settings.config.max_write_bytes_per_s, revision)
            for address in addresses
            if self._limited_at.get(address) != revision
        )

    async def _limit(self, address: str, bytes_per_s: int, revision: int) -> None:
        try:
            await self._cluster.limit_writes(address, bytes_per_s)
        except TidemarkError as err:
            self._listener.store_not_limited(address, err)
        else:
            self._limited_at[address] = revision
