"""A cluster that runs already, for `tidemark demo --join`: nothing is started, the checkpoint is the progress."""

import asyncio
import contextlib

import grpc.aio

from server.demo.changefeed import query
from server.demo.lake import Applied, Lake

_POLL_SECONDS = 0.5


class JoinedLake(Applied):
    """The lake of a changefeed whose Spark job somebody else runs; its rows are not known here."""

    def __init__(self, lake: Lake, capture: str, changefeed: str) -> None:
        super().__init__(lake)
        self._capture = capture
        self._changefeed = changefeed

    async def follow(self) -> None:
        """Ask for the checkpoint until cancelled."""
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):  # a capture that restarts is asked again
                status = await query(self._capture, self._changefeed)
                if status.checkpoint_ts > self.applied_ts:
                    self._move_to(status.checkpoint_ts, rows=0)
            await asyncio.sleep(_POLL_SECONDS)
