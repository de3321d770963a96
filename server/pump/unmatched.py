"""Finds the outcome of prewrites whose commit binlog never came, because TiDB died or the binlog
was lost: the store knows it.

When a prewrite has waited for a whole interval, its transaction is looked up at its primary key. If
it was committed or rolled back, the missing binlog is written, durably, as if TiDB had sent it, and
the commits behind it can be read. If there is no trace, the transaction may still be on its way, so
the prewrite waits for a time; then the lock resolver decides it. An outcome is never guessed: if
the store's GC may have removed it, the prewrite keeps waiting, and a warning says so.

Source: tidb-binlog pump/storage (resolver); Percolator's primary decides.
"""

import asyncio
from typing import Protocol

import structlog
from kvproto import kvrpcpb_pb2 as kvrpcpb
from tipb import binlog_pb2

from server.pump import metrics
from server.rpc.lock_resolver import LockResolver
from server.rpc.tikv import KvClient
from storage.model.errors import TidemarkError, UnavailableError
from storage.model.ts import physical_ms
from storage.pump.binlog import Binlog, outcome, parse
from storage.pump.storage import PumpStorage
from storage.tasks import gather
from storage.value_log import Pointer

ASKED_AT_ONCE = 64
_LOST_OUTCOME = (
    "a prewrite's outcome is not known any more: the store's GC has passed it; readers wait "
    "behind it"
)

_log = structlog.get_logger(__name__)


class OutcomeUnknownError(UnavailableError):
    """The store cannot say now whether a transaction was committed."""

    code = "ErrOutcomeUnknown"


class Coordinator(Protocol):
    """The part of `PdClient` that this needs."""

    async def tso(self, count: int = 1) -> int:
        """A new timestamp."""
        ...

    async def gc_safe_point(self) -> int:
        """The ts below which the store may have removed versions."""
        ...


def outcome_of(info: kvrpcpb.MvccInfo, start_ts: int) -> int | None:
    """The outcome that a primary key's records show: the transaction's commit_ts, 0 if it was
    rolled back, None if unknown.
    """
    for write in info.writes:
        if write.start_ts == start_ts:
            return 0 if write.type == kvrpcpb.Rollback else write.commit_ts
        # TiKV keeps a rollback in the write record of another transaction that committed at this
        # timestamp.
        if write.commit_ts == start_ts and write.has_overlapped_rollback:
            return 0
    return None


class UnmatchedPrewrites:
    """Finds the outcomes of one storage's unmatched prewrites."""

    def __init__(
        self, storage: PumpStorage, clock: Coordinator, kv: KvClient, txn_timeout_seconds: float
    ) -> None:
        self._storage = storage
        self._clock = clock
        self._kv = kv
        self._resolver = LockResolver(clock, kv)
        self._timeout_ms = txn_timeout_seconds * 1000
        self._waited: set[int] = set()

    async def run(self, interval_seconds: float) -> None:
        """Look after each interval, until cancelled."""
        while True:
            await asyncio.sleep(interval_seconds)
            try:
                await self.look()
            except TidemarkError as err:
                _log.warning("unmatched prewrites not resolved", error=str(err))

    async def look(self) -> int:
        """Write the outcomes of the prewrites that waited at the last look already and are decided;
        returns how many.
        """
        oldest = await self._storage.oldest_waiting(ASKED_AT_ONCE)
        # Only those that have waited for a whole interval: the outcome of most is on its way.
        unmatched = [
            (start_ts, pointer) for start_ts, pointer in oldest if start_ts in self._waited
        ]
        self._waited = {start_ts for start_ts, _ in oldest}
        if not unmatched:
            return 0
        now_ts = await self._clock.tso()
        answers = await gather(
            self._ask_outcome(start_ts, pointer, now_ts) for start_ts, pointer in unmatched
        )
        settled = [binlog for binlog in answers if isinstance(binlog, Binlog)]
        await self._storage.write(settled)
        self._report(
            [
                (txn[0], err)
                for txn, err in zip(unmatched, answers, strict=True)
                if isinstance(err, TidemarkError)
            ]
        )
        if settled:
            _log.info(
                "unmatched prewrites settled",
                count=len(settled),
                first_start_ts=settled[0].start_ts,
            )
        return len(settled)

    async def _ask_outcome(
        self, start_ts: int, pointer: Pointer, now_ts: int
    ) -> Binlog | TidemarkError | None:
        try:
            commit_ts = await self._outcome(start_ts, pointer, now_ts)
        except TidemarkError as err:
            metrics.UNMATCHED_CHECKS.labels("failed").inc()
            return err
        if commit_ts is None:
            metrics.UNMATCHED_CHECKS.labels("undecided").inc()
            return None
        metrics.UNMATCHED_CHECKS.labels("committed" if commit_ts else "rolled_back").inc()
        return parse(outcome(start_ts, commit_ts))

    @staticmethod
    def _report(failed: list[tuple[int, TidemarkError]]) -> None:
        if failed:
            start_ts, err = failed[0]
            _log.warning(
                "unmatched prewrites not resolved",
                count=len(failed),
                first_start_ts=start_ts,
                error=str(err),
            )

    async def _outcome(self, start_ts: int, pointer: Pointer, now_ts: int) -> int | None:
        prewrite = binlog_pb2.Binlog.FromString(await self._storage.read(pointer))
        if not prewrite.prewrite_key:
            raise OutcomeUnknownError(
                "the prewrite binlog names no key; write its commit or rollback by hand"
            )
        info = await self._info(prewrite.prewrite_key)
        commit_ts = outcome_of(info, start_ts)
        # A transaction without a trace may still be on its way to write its primary.
        too_young = physical_ms(now_ts) - physical_ms(start_ts) <= self._timeout_ms
        if commit_ts is not None or too_young:
            return commit_ts
        # No lock, no record, and GC has passed it: the record may have been collected, so "rolled
        # back" would be a guess.
        if info.lock.start_ts != start_ts and start_ts <= await self._clock.gc_safe_point():
            raise OutcomeUnknownError(_LOST_OUTCOME)
        lock = kvrpcpb.LockInfo(
            key=prewrite.prewrite_key, primary_lock=prewrite.prewrite_key, lock_version=start_ts
        )
        # Resolving rolls the primary back for good: without that the transaction could still commit
        # after we say that it did not.
        if await self._resolver.resolve([lock], 0):
            return None
        return outcome_of(await self._info(prewrite.prewrite_key), start_ts)

    async def _info(self, key: bytes) -> kvrpcpb.MvccInfo:
        request = kvrpcpb.MvccGetByKeyRequest(key=key)
        answer = await self._kv.router.call(key, lambda store: store.MvccGetByKey, request)
        if answer.error:
            raise OutcomeUnknownError(
                f"the store does not tell what became of a transaction: {answer.error}"
            )
        info: kvrpcpb.MvccInfo = answer.info
        return info
