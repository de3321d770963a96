"""A GC round from its safepoint to its end, as the GC leader runs it, and a dry run of it.

A round goes prepare → resolve locks → delete ranges → do gc. `GCLeader.run_round` runs one and
reports each step to a `Listener`; `make_plan` returns what a round begun now would do, and changes
nothing.

1. Before anything else the leader records that a round begins, on condition that it still leads and
   that no setting changed since it was read. All later steps rest on that record. A request may
   arrive late, even from a worker that has lost the lead: it deletes only what that round was
   allowed to delete.
2. The safepoint is saved before any step uses it (TiDB: "update the safepoint first, delete ranges
   after").
3. A safepoint counts as collected when a round has gone through all phases; until then the next
   round repeats them.
"""

import enum
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from gcsafepoint.worker.cluster import Cluster, LockPage, SafePointDecreasesError
from gcsafepoint.worker.config import CENTRAL, GCConfig, format_instant
from gcsafepoint.worker.delete_ranges import (
    DeleteRange,
    DueRanges,
    Report,
    delete_again,
    delete_first,
    load_due,
)
from gcsafepoint.worker.do_gc import CentralGC
from gcsafepoint.worker.election import (
    CoordinatorClock,
    Election,
    LeaseLostError,
    write_fenced,
)
from gcsafepoint.worker.records import (
    COLLECTED_TS,
    LAST_RUN_TIME,
    SAFE_POINT,
    SAFE_POINT_TS,
    Records,
    oldest_running,
    read_config,
    read_settings,
    read_ts,
    round_key,
    round_to_json,
    tidy_rounds,
)
from gcsafepoint.worker.resolve_locks import resolve_locks
from gcsafepoint.worker.round import (
    Phase,
    Result,
    Round,
    Rounds,
    SafePointBound,
    limited_by_service,
    target_safe_point,
)
from storage.model.errors import ConflictError, InvalidError, TidemarkError
from storage.model.span import KeyRange
from storage.model.ts import physical_ms

_ATTEMPTS = 3


class GCDisabledError(InvalidError):
    """GC is switched off."""

    code = "ErrGCDisabled"


class SettingsChangedError(ConflictError):
    """Settings changed again and again while a round began."""

    code = "ErrGCSettingsChanged"


class Stage(enum.StrEnum):
    """The timed stages of a round, by the names that TiDB gives them."""

    PREPARE = "prepare"
    RESOLVE_LOCKS = "resolve_locks"
    DELETE_RANGES = "delete_ranges"
    REDO_DELETE_RANGES = "redo_delete_ranges"
    UPLOAD_SAFE_POINT = "upload_safe_point"
    DO_GC = "do_gc"
    TOTAL = "total"


class Listener(Protocol):
    """Receives every event of a worker and its rounds; its methods must neither raise nor wait.

    `server.gc_worker.listener` writes logs and metrics of them.
    """

    def tick_ended(self, *, leads: bool) -> None:
        """A tick ended; `leads` says whether this worker leads."""
        ...

    def tick_failed(self, err: TidemarkError) -> None:
        """The coordinator or the metadata store could not be asked."""
        ...

    def configured(self, config: GCConfig) -> None:
        """The leader read this configuration at its tick."""
        ...

    def life_time_raised(self, configured_ms: int, least_ms: int) -> None:
        """Somebody wrote a shorter life time than may be set; the least one is used."""
        ...

    def store_not_limited(self, address: str, err: TidemarkError) -> None:
        """A store did not take its write rate."""
        ...

    def round_skipped(self, err: TidemarkError) -> None:
        """A round was due while another one had not reached Do GC."""
        ...

    def held_back(self, gc_round: Round, target_ts: int, *, moved: bool) -> None:
        """The safepoint is below the one that the life time alone would allow, or did not move at
        all.
        """
        ...

    def stage_began(self, stage: Stage, gc_round: Round) -> None:
        """A stage of a round begins."""
        ...

    def stage_ended(
        self, stage: Stage, gc_round: Round, seconds: float, err: TidemarkError | None
    ) -> None:
        """A stage has ended, with an error or without."""
        ...

    def page_resolved(self, locks: int, *, more: bool) -> None:
        """All locks of a page are resolved; `more`: the region has further pages."""
        ...

    def range_deleted(
        self, delete_range: DeleteRange, err: TidemarkError | None, *, redo: bool
    ) -> None:
        """A range was destroyed, or `err` says why not."""
        ...

    def region_collected(self, err: TidemarkError | None) -> None:
        """A region has dropped its old versions, or `err` says why not (mode central)."""
        ...

    def round_ended(self, gc_round: Round) -> None:
        """A round is over."""
        ...

    def round_not_recorded(self, gc_round: Round, err: TidemarkError) -> None:
        """A round could not be written to the history."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker's state: whether it leads, its rounds, and the coordinator's time."""

    election: Election
    rounds: Rounds
    clock: CoordinatorClock


class GCLeader:
    """Runs the rounds of one worker; `cluster` checks the lease before each request."""

    def __init__(
        self,
        cluster: Cluster,
        records: Records,
        state: WorkerState,
        listener: Listener,
        *,
        least_life_time_ms: int,
    ) -> None:
        self._least_life_time_ms = least_life_time_ms
        self._cluster = cluster
        self._records = records
        self._election = state.election
        self._rounds = state.rounds
        self._clock = state.clock
        self._listener = listener

    async def run_round(self, round_id: int) -> Round:
        """Run the admitted round `round_id` (the timestamp it began at);
        returns it when it has ended.

        Raises:
            GCDisabledError: nothing may be collected.
            LeaseLostError: this worker does not lead, or not any longer.
            TidemarkError: whatever ended the round early.
        """
        try:
            async with self._election.while_leading(), self._stage(Stage.TOTAL, round_id):
                result = await self._run_phases(round_id)
        except TidemarkError as err:
            lost = isinstance(err, LeaseLostError)
            await self._end(round_id, Result.LOST if lost else Result.FAILED, err)
            raise
        except BaseException:
            await self._end(round_id, Result.STOPPED, None)
            raise
        return await self._end(round_id, result, None)

    async def _run_phases(self, round_id: int) -> Result:
        await tidy_rounds(
            self._records, self._rounds.running, self._clock.now_ms(), self._election.fence
        )
        await self._record(self._rounds[round_id])
        async with self._stage(Stage.PREPARE, round_id):
            config, fresh = await self._prepare(round_id)

        # Without a fresh safepoint only ranges are due: those below the safepoint whose locks are
        # resolved already.
        resolved_ts = self._rounds[round_id].safe_point
        if not fresh:
            resolved_ts = await read_ts(self._records, COLLECTED_TS)
        ranges = await load_due(self._records, resolved_ts, physical_ms(round_id))
        if not fresh and not ranges:
            return Result.NOTHING_NEW

        await self._enter(round_id, Phase.RESOLVE_LOCKS)
        if fresh:
            await self._resolve_locks(round_id, config)
        # Locks come first: the record that decides a lock is at its primary key, which may lie in a
        # dropped range.
        await self._enter(round_id, Phase.DELETE_RANGES)
        await self._delete_ranges(round_id, ranges)
        if not fresh:
            return Result.NOTHING_NEW

        await self._enter(round_id, Phase.DO_GC)
        return await self._do_gc(round_id, config)

    async def _prepare(self, round_id: int) -> tuple[GCConfig, bool]:
        """Choose the safepoint and save it; returns the settings, and whether that safepoint is
        still to be collected.
        """
        config, target = await self._record_beginning(round_id)
        saved = await read_ts(self._records, SAFE_POINT_TS)
        bound = await self._ask_services(target) if target.ts >= saved else target
        moved = bound.ts > saved
        # A safepoint never goes back: transactions below the saved one have been refused already.
        self._rounds.set_safe_point(round_id, max(saved, bound.ts), bound.blocker)
        if bound.blocker or not moved:
            self._listener.held_back(self._rounds[round_id], target.ts, moved=moved)
        if moved:
            saved_time = format_instant(physical_ms(bound.ts))
            # TiDB refuses snapshots below this record, so it is written before the first lock
            # below it is resolved.
            await self._write({SAFE_POINT: saved_time, SAFE_POINT_TS: str(bound.ts)})
        return config, saved <= bound.ts != await read_ts(self._records, COLLECTED_TS)

    async def _ask_services(self, target: SafePointBound) -> SafePointBound:
        try:
            lowest = await self._cluster.hold_safe_point(target.ts)
        except SafePointDecreasesError:
            # An earlier leader has published a greater one: the safepoint stays until the target
            # is above that.
            return SafePointBound(0)
        return limited_by_service(target, lowest.safe_point, lowest.service_id)

    async def _record_beginning(self, round_id: int) -> tuple[GCConfig, SafePointBound]:
        """Record that the round begins with the settings it has read; returns these, and the
        safepoint to ask for.
        """
        for _ in range(_ATTEMPTS):
            settings = await read_settings(self._records)
            config = settings.config
            self._listener.configured(config)

            if not config.enable:
                raise GCDisabledError(
                    "gc is switched off; set tikv_gc_enable to true to run a round"
                )
            if config.life_time_ms < self._least_life_time_ms:
                self._listener.life_time_raised(config.life_time_ms, self._least_life_time_ms)

            life_time_ms = max(config.life_time_ms, self._least_life_time_ms)
            target = target_safe_point(round_id, life_time_ms, await oldest_running(self._records))
            began: dict[str, str | None] = {LAST_RUN_TIME: format_instant(physical_ms(round_id))}
            self._election.check()
            # The settings' revisions are a condition of the write: a round must not run under
            # settings that were changed while it began.
            if await self._records.write(began, {**self._election.fence, **settings.revisions}):
                return config, target
        # An empty write tells the two reasons apart: it raises if the leader changed, and not a
        # setting.
        await self._write({})
        raise SettingsChangedError(
            "the GC settings changed again and again while a round began; it begins anew later"
        )

    async def _resolve_locks(self, round_id: int, config: GCConfig) -> None:
        stores = await self._cluster.ranges_by_store()
        self._rounds.set_total(round_id, sum(map(len, stores.values())))

        def count(page: LockPage) -> None:
            self._rounds.count(round_id, regions=int(not page.more), resolved_locks=len(page.locks))
            self._listener.page_resolved(len(page.locks), more=page.more)

        async with self._stage(Stage.RESOLVE_LOCKS, round_id):
            await resolve_locks(
                self._cluster, config, stores, self._rounds[round_id].safe_point, count
            )

    async def _delete_ranges(self, round_id: int, ranges: DueRanges) -> None:
        self._rounds.set_total(round_id, len(ranges))
        async with self._stage(Stage.DELETE_RANGES, round_id):
            await delete_first(
                self._cluster,
                self._records,
                lambda: self._election.fence,
                ranges.first,
                physical_ms(round_id),
                self._range_report(round_id, redo=False),
            )
        async with self._stage(Stage.REDO_DELETE_RANGES, round_id):
            await delete_again(
                self._cluster,
                self._records,
                lambda: self._election.fence,
                ranges.again,
                self._range_report(round_id, redo=True),
            )

    def _range_report(self, round_id: int, *, redo: bool) -> Report:
        def report(delete_range: DeleteRange, err: TidemarkError | None) -> None:
            self._rounds.count(
                round_id, deleted_ranges=int(err is None), failed_ranges=int(err is not None)
            )
            self._listener.range_deleted(delete_range, err, redo=redo)

        return report

    async def _do_gc(self, round_id: int, config: GCConfig) -> Result:
        async with self._stage(Stage.UPLOAD_SAFE_POINT, round_id):
            # From here on stores collect below it: the locks there are resolved by now, so no
            # version that decides a lock's fate is lost.
            await self._cluster.publish_safe_point(self._rounds[round_id].safe_point)
        if config.mode == CENTRAL and not await self._collect(round_id, config):
            return Result.GAVE_WAY
        # Only after the work: a round that ends early is made up for by the next one, which finds
        # this record behind.
        await self._write({COLLECTED_TS: str(self._rounds[round_id].safe_point)})
        return Result.DONE

    async def _collect(self, round_id: int, config: GCConfig) -> bool:
        central = CentralGC(
            self._cluster,
            self._records,
            lambda: self._election.fence,
            lambda: self._rounds.superseded(round_id),
        )
        ranges = await central.plan(
            await self._cluster.ranges_by_store(), self._rounds[round_id].safe_point
        )
        self._rounds.set_total(round_id, len(ranges.store_ranges))

        def report(err: TidemarkError | None) -> None:
            self._rounds.count(round_id, collected_regions=int(err is None))
            self._listener.region_collected(err)

        async with self._stage(Stage.DO_GC, round_id):
            return await central.run(ranges, config, report)

    async def _enter(self, round_id: int, phase: Phase) -> None:
        await self._record(self._rounds.enter(round_id, phase, self._clock.now_ms()))

    async def _end(self, round_id: int, result: Result, err: TidemarkError | None) -> Round:
        ended = self._rounds.end(round_id, result, self._clock.now_ms(), str(err or ""))
        self._listener.round_ended(ended)
        await self._record(ended)
        return ended

    async def _record(self, gc_round: Round) -> None:
        """Write the round to the history; a failure to do so ends no round."""
        # The history is for people: what a round relies on is in records of its own.
        try:
            await self._records.write(
                {round_key(gc_round): round_to_json(gc_round)}, self._election.fence
            )
        except TidemarkError as err:
            self._listener.round_not_recorded(gc_round, err)

    async def _write(self, changes: dict[str, str | None]) -> None:
        await write_fenced(self._records, lambda: self._election.fence, changes)

    @asynccontextmanager
    async def _stage(self, stage: Stage, round_id: int) -> AsyncIterator[None]:
        self._listener.stage_began(stage, self._rounds[round_id])
        began_s = self._clock.monotonic_s()
        error: TidemarkError | None = None
        try:
            yield
        except TidemarkError as err:
            error = err
            raise
        finally:
            seconds = self._clock.monotonic_s() - began_s
            self._listener.stage_ended(stage, self._rounds[round_id], seconds, error)


@dataclass(frozen=True, slots=True)
class Plan:
    """The work that a round begun now would do."""

    config: GCConfig
    safe_point: int
    saved: int
    blocker: str
    fresh: bool
    """Whether the safepoint has not been collected yet; if it has, only ranges are deleted."""
    regions: int
    locks: int
    transactions: int
    ranges: tuple[DeleteRange, ...]


async def make_plan(cluster: Cluster, records: Records, least_life_time_ms: int) -> Plan:
    """Look at everything a round would look at; counting locks reads every region."""
    now_ts, config = await cluster.now_ts(), await read_config(records)
    life_time_ms = max(config.life_time_ms, least_life_time_ms)
    bound = target_safe_point(now_ts, life_time_ms, await oldest_running(records))
    if lowest := await cluster.lowest_service():
        bound = limited_by_service(bound, lowest.safe_point, lowest.service_id)
    saved, collected = await read_ts(records, SAFE_POINT_TS), await read_ts(records, COLLECTED_TS)
    fresh = config.enable and saved <= bound.ts != collected
    due = await load_due(records, bound.ts if fresh else collected, physical_ms(now_ts))
    stores = await cluster.ranges_by_store()
    regions = [within for ranges in stores.values() for within in ranges]
    locks, transactions = await _count_locks(cluster, regions, bound.ts) if fresh else (0, 0)
    return Plan(
        config=config,
        safe_point=max(bound.ts, saved),
        saved=saved,
        blocker=bound.blocker,
        fresh=fresh,
        regions=len(regions),
        locks=locks,
        transactions=transactions,
        ranges=(*due.first, *due.again),
    )


async def _count_locks(
    cluster: Cluster, regions: list[KeyRange], safe_point: int
) -> tuple[int, int]:
    locks, transactions = 0, set[int]()
    for within in regions:
        key: bytes | None = within.start_key
        while key is not None:
            page = await cluster.scan_locks(KeyRange(key, within.end_key), safe_point)
            locks += len(page.locks)
            transactions.update(lock.start_ts for lock in page.locks)
            key = page.next_key
    return locks, len(transactions)
