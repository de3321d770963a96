"""The changefeeds' service GC safepoints: they protect the history that was not delivered yet.

They are set for sources whose history the coordinator keeps (`Source.keeps_history`); for others
every call does nothing.

The safe point is checkpoint_ts - 1, so that a read at checkpoint_ts stays possible.
Source: TiCDC's gc manager.
"""

from collections.abc import Iterable, Mapping

import structlog

from gcsafepoint.explain.names import (
    CREATING_TTL_S,
    FEED_TTL_S,
    creating_service,
    feed_of,
    left_over_services,
)
from server.capture.errors import GcTtlExceededError, SnapshotLostError, StartTsBeforeGcError
from server.changefeed.info import ChangefeedInfo
from server.puller.source import Source
from server.rpc.pd import PdClient
from storage.model.errors import TidemarkError

_log = structlog.get_logger(__name__)


class ChangefeedSafePoints:
    """Sets and deletes the safepoints at the coordinator. `sweep` is limited to the changefeed
    `only`, unless that is empty.
    """

    def __init__(self, pd: PdClient, only: str = "") -> None:
        self._pd = pd
        self._only = only

    @property
    def cluster_id(self) -> int:
        """The cluster whose GC is held back."""
        return self._pd.cluster_id

    async def protect_creation(self, source: Source, changefeed: str, start_ts: int) -> str:
        """Protect the history after `start_ts` while the changefeed is created or resumed; returns
        the id of the service, for `end_creation`.

        Raises:
            StartTsBeforeGcError: GC may have collected some of it.
            NotFoundError: the log of a source that the coordinator does not protect begins later.
        """
        if not source.keeps_history:
            await source.check_start(start_ts)
            return ""
        # The deletion of a service may be carried out late, if it got no answer. So each attempt
        # has a service id of its own, which no deletion for another attempt can hit.
        service = creating_service(changefeed, await self._pd.tso())
        lowest = await self._pd.update_service_gc_safe_point(service, CREATING_TTL_S, start_ts - 1)
        # PD answers the minimum over all services. At or above start_ts it says that ours was
        # refused; below, GC may still have passed start_ts before ours was set.
        if lowest.safe_point < start_ts:
            collected_to, holder = await self._pd.gc_safe_point(), "the GC safe point"
        else:
            collected_to, holder = lowest.safe_point + 1, f"the safe point of {lowest.service_id}"
        if collected_to > start_ts:
            await self.give_up_creation(service)
            raise StartTsBeforeGcError(
                f"the start {start_ts} is before {holder}; choose {collected_to} or later, or "
                "leave it out to start now"
            )
        return service

    async def end_creation(self, service: str) -> None:
        """The changefeed has a safepoint of its own by now; `service` as `protect_creation`
        returned it.
        """
        if service:
            await self._delete(service)

    async def give_up_creation(self, service: str) -> None:
        """The changefeed is not made. Raises nothing, so that the reason for that is raised: where
        the coordinator gives no answer, the service lapses, or is swept.
        """
        try:
            await self.end_creation(service)
        except TidemarkError as err:
            _log.warning("safepoint of a creation stays", service_id=service, error=str(err))

    async def hold(
        self, source: Source, info: ChangefeedInfo, checkpoint_ts: int, *, failed_s: float = 0.0
    ) -> None:
        """Protect the history after `checkpoint_ts` for 24 hours, which began `failed_s` seconds
        ago, when the lake job failed (0: now).

        Raises:
            SnapshotLostError: GC may have collected some of it.
            GcTtlExceededError: the 24 hours are over.
        """
        if not source.keeps_history:
            return
        # A job that has given up must not hold GC back for ever: the day runs from its failure.
        ttl_s = FEED_TTL_S - int(failed_s)
        if ttl_s <= 0:
            raise GcTtlExceededError(
                f"the lake job of changefeed {info.id} has given up more than "
                f"{FEED_TTL_S // 3600} h ago, and GC no longer waits for the checkpoint "
                f"{checkpoint_ts}. Mend what stopped the job, then resume the changefeed; if that "
                "is refused, as GC has passed the checkpoint by then, resume it with "
                "--overwrite-checkpoint-ts now to go on with a gap, or create it anew from a "
                "full copy"
            )
        lowest = await self._pd.update_service_gc_safe_point(
            info.gc_service, ttl_s, checkpoint_ts - 1
        )
        if lowest.safe_point > checkpoint_ts - 1:
            raise SnapshotLostError(
                f"the checkpoint {checkpoint_ts} of changefeed {info.id} is below the GC safe "
                f"point {lowest.safe_point} of {lowest.service_id}: what was not read yet may be "
                "collected. Resume it with --overwrite-checkpoint-ts to go on with a gap, or "
                "create it anew from a full copy"
            )

    async def renew(self, service: str, safe_point: int) -> None:
        """Renew the safepoint of `service` for 24 hours, for a changefeed whose records cannot be
        read.

        Raises:
            SnapshotLostError: GC may have collected some of its history.
        """
        lowest = await self._pd.update_service_gc_safe_point(service, FEED_TTL_S, safe_point)
        if lowest.safe_point > safe_point:
            raise SnapshotLostError(
                f"the records of changefeed {feed_of(service)} cannot be read, and its safe point "
                f"{safe_point} is below the GC safe point {lowest.safe_point} of "
                f"{lowest.service_id}: what was not read yet may be collected. Remove it, and "
                "create it anew from a full copy"
            )

    async def release(self, source: Source, services: Iterable[str]) -> None:
        """Keep nothing for a changefeed any more that has these services."""
        if source.keeps_history:
            for service in services:
                await self._delete(service)

    async def delete_all(self, services: Iterable[str]) -> None:
        """Delete these services, whatever their sources are: their changefeeds are gone."""
        for service in services:
            _log.info("safepoint of no changefeed is deleted", service_id=service)
            await self._delete(service)

    async def _delete(self, service: str) -> None:
        # A TTL of 0 deletes a service. Where the answer is lost, the request may be carried out
        # late: a changefeed that is made anew by then has another service (`gc_generation`).
        await self._pd.update_service_gc_safe_point(service, 0, 0)

    async def sweep(self, service_ids: Iterable[str], protected: Mapping[str, bool]) -> None:
        """Delete the services that an owner which died has left of creations and resumes; see
        `left_over_services`.
        """
        # Of other changefeeds this capture does not know which creations are under way.
        own = [each for each in service_ids if self._only in ("", feed_of(each))]
        for service_id in left_over_services(own, protected):
            _log.info("safepoint of an interrupted creation is deleted", service_id=service_id)
            await self._delete(service_id)
