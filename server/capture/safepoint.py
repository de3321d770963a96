"""The changefeeds' service GC safepoints: what they have not handed on yet must not be collected.

Only where a changefeed's source keeps its history that way; for others nothing is done.

The safe point is checkpoint_ts - 1, so that a read at checkpoint_ts stays possible.
Source: seed 000; TiCDC's gc manager.
"""

from gcsafepoint.explain.names import CREATING_TTL_S, FEED_TTL_S, creating_service, feed_service
from server.capture.errors import SnapshotLostError, StartTsBeforeGcError
from server.puller.source import Source
from server.rpc.pd import PdClient


class Safepoints:
    """Sets them at the coordinator."""

    def __init__(self, pd: PdClient) -> None:
        self._pd = pd

    async def protect_creation(self, source: Source, changefeed: str, start_ts: int) -> None:
        """Keep the history after `start_ts` while the changefeed is being made or resumed.

        Raises:
            StartTsBeforeGcError: some of it may be gone.
        """
        if not source.keeps_history:
            return
        held = await self._pd.update_service_gc_safe_point(creating_service(changefeed), CREATING_TTL_S, start_ts - 1)
        if held.safe_point < start_ts:
            collected_to, holder = await self._pd.gc_safe_point(), "the GC safe point"
        else:
            collected_to, holder = held.safe_point + 1, f"the safe point of {held.service_id}"
        if collected_to > start_ts:
            await self.end_creation(source, changefeed)
            raise StartTsBeforeGcError(
                f"the start {start_ts} is before {holder}; choose {collected_to} or later, or leave it out to start now"
            )

    async def end_creation(self, source: Source, changefeed: str) -> None:
        """The changefeed has a safepoint of its own by now, or is not made."""
        if source.keeps_history:
            await self._pd.update_service_gc_safe_point(creating_service(changefeed), 0, 0)

    async def hold(self, source: Source, changefeed: str, checkpoint_ts: int) -> None:
        """Keep the history after `checkpoint_ts` for a day from now.

        Raises:
            SnapshotLostError: some of it may be gone.
        """
        if not source.keeps_history:
            return
        held = await self._pd.update_service_gc_safe_point(feed_service(changefeed), FEED_TTL_S, checkpoint_ts - 1)
        if held.safe_point > checkpoint_ts - 1:
            raise SnapshotLostError(
                f"the checkpoint {checkpoint_ts} of changefeed {changefeed} is below the GC safe point "
                f"{held.safe_point} of {held.service_id}: what was not read yet may be collected. Resume it with "
                "--overwrite-checkpoint-ts to go on with a gap, or create it anew from a full copy"
            )

    async def release(self, source: Source, changefeed: str) -> None:
        """Keep nothing for the changefeed any more."""
        if source.keeps_history:
            await self._pd.update_service_gc_safe_point(feed_service(changefeed), 0, 0)
