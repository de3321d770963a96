"""What the metadata keeps of a changefeed's log: where to begin for a checkpoint,
and which times were believed.

Invariants:
1. Whoever begins for a checkpoint takes the largest anchor at or below it, and drops all above:
   they are written again.
2. The distance of two anchors is at most a 32nd of their age, or `EVERY_S`: little is read twice,
   few are kept.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Final

from server.changefeed import keys
from server.puller.mysql.log.clock import Clock
from server.puller.mysql.log.position import Anchor
from storage.meta.meta import Compare, Delete, Meta, Put
from storage.model.errors import UnavailableError
from storage.model.ts import physical_ms

EVERY_S: Final = 10.0
_AGE_SHARE = 32


class Anchors:
    """Those of one changefeed."""

    def __init__(self, meta: Meta, changefeed: str, clock: Callable[[], float] = time.time) -> None:
        self._meta = meta
        self._prefix = prefix(changefeed)
        self._clock = clock
        self._kept: list[int] = []

    async def begin(self, start_ts: int) -> Anchor | None:
        """The anchor to begin with for that checkpoint; None: there is none at or below it.

        Raises:
            CorruptError, MetaUnavailableError: they cannot be read.
        """
        anchors = [
            Anchor.from_json(pair.value) for pair in await self._meta.get_prefix(self._prefix)
        ]
        usable = [anchor for anchor in anchors if anchor.ts <= start_ts]
        await self._meta.write_all(
            [Delete(self._key(anchor.ts)) for anchor in anchors if anchor.ts > start_ts]
        )
        self._kept = [anchor.ts for anchor in usable]
        return usable[-1] if usable else None

    async def put(self, anchor: Anchor) -> None:
        """Keep one, and let those go that lie closer than their age asks for. Durable."""
        await self._meta.put(self._key(anchor.ts), anchor.to_json())
        self._kept.append(anchor.ts)
        spare = spare_anchors(self._kept, int(self._clock() * 1000))
        await self._meta.write_all([Delete(self._key(ts)) for ts in spare])
        gone = set(spare)
        self._kept = [ts for ts in self._kept if ts not in gone]

    def _key(self, ts: int) -> bytes:
        return self._prefix + b"%020d" % ts


class ClockRecord:
    """The changefeed's clock in the metadata; of two captures that read one log,
    only one can write it.
    """

    def __init__(self, meta: Meta, changefeed: str) -> None:
        self._meta = meta
        self._key = keys.source(changefeed) + b"clock"
        self._revision = 0

    async def load(self) -> Clock | None:
        """What was decided; None: nothing yet.

        Raises:
            CorruptError, MetaUnavailableError: it cannot be read.
        """
        pair = await self._meta.get(self._key)
        self._revision = pair.mod_revision if pair else 0
        return Clock.from_json(pair.value) if pair else None

    async def save(self, clock: Clock) -> None:
        """Keep it. Durable.

        Raises:
            UnavailableError: somebody else has written it since it was loaded.
        """
        unchanged = Compare.unchanged(self._key, self._revision)
        result = await self._meta.txn([unchanged], [Put(self._key, clock.to_json())])
        if not result.succeeded:
            raise UnavailableError(
                "another capture has judged times of the log, which is read again by them"
            )
        self._revision = result.revision


def prefix(changefeed: str) -> bytes:
    """What the keys of a changefeed's anchors start with."""
    return keys.source(changefeed) + b"anchor/"


def spare_anchors(kept: Sequence[int], now_ms: int) -> list[int]:
    """Which of the ascending anchors are not needed: the first and the last always are. Pure."""
    spare: list[int] = []
    last = kept[0] if kept else 0
    for ts, following in itertools.pairwise(kept[1:]):
        age_ms = now_ms - physical_ms(last)
        if physical_ms(following) - physical_ms(last) <= age_ms // _AGE_SHARE:
            spare.append(ts)
        else:
            last = ts
    return spare
