"""How pumps know what this changefeed still needs: an entry beside Drainer's,
with the checkpoint that readers reached.

A pump that goes offline waits for it, and our own pump's GC stays behind it until the forced age.
The entry outlives the process: a changefeed that is down needs its binlogs all the more. It goes
with the changefeed's records, in their transaction; whoever still runs then does not write it
again.
"""

from typing import Final

from server.changefeed import keys
from server.changefeed.info import checkpoint_of
from server.puller.pump.nodes import drainer_entry
from server.rpc.pd import PdClient
from storage.meta.meta import Compare, Meta
from storage.model.ts import physical_ms

_RENEW_MS: Final = 10_000


class Registration:
    """The entry of one changefeed."""

    def __init__(self, changefeed: str, pd: PdClient, meta: Meta, start_ts: int) -> None:
        self._changefeed = changefeed
        self._pd = pd
        self._meta = meta
        self._start_ts = start_ts
        self._written = (-1, 0)

    async def renew(self) -> None:
        """Write the checkpoint of now, if it moved or the entry is old.

        Raises:
            UnavailableError: the metadata or the coordinator does not answer.
            CorruptError: the changefeed's status cannot be read.
        """
        checkpoint_ts, now_ts = await self._checkpoint_ts(), await self._pd.tso()
        now_ms = physical_ms(now_ts)
        if checkpoint_ts == self._written[0] and now_ms - self._written[1] < _RENEW_MS:
            return
        exists = Compare(keys.info(self._changefeed), "create_revision", ">", 0)
        await self._meta.txn(
            [exists], [drainer_entry(keys.drainer(self._changefeed), checkpoint_ts, now_ts)]
        )
        self._written = checkpoint_ts, now_ms

    async def _checkpoint_ts(self) -> int:
        pair = await self._meta.get(keys.status(self._changefeed))
        return self._start_ts if pair is None else checkpoint_of(pair.value)
