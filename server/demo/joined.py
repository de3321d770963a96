"""A cluster that runs already, for `tidemark demo --join`: nothing is started, the checkpoint is the progress."""

import asyncio
import contextlib

import grpc.aio

from server.demo.changefeed import query
from server.demo.lake import Lake

_POLL_SECONDS = 0.5


class JoinedLake:
    """The lake of a changefeed whose Spark job somebody else runs."""

    def __init__(self, lake: Lake, capture: str, changefeed: str) -> None:
        self.lake = lake
        self.applied_ts = 0
        self.rows = 0
        self.cuts = 0
        self._capture = capture
        self._changefeed = changefeed
        self._moved = asyncio.Event()

    async def follow(self) -> None:
        """Ask for the checkpoint until cancelled."""
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):  # a capture that restarts is asked again
                status = await query(self._capture, self._changefeed)
                if status.checkpoint_ts > self.applied_ts:
                    self.applied_ts = status.checkpoint_ts
                    self.cuts += 1
                    self._moved.set()
            await asyncio.sleep(_POLL_SECONDS)

    async def wait_applied(self, ts: int) -> None:
        """Wait until the checkpoint has reached `ts`."""
        while self.applied_ts < ts:
            self._moved.clear()
            await self._moved.wait()
