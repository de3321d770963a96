"""A link of a chain of blockers, and the chain. Pure."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from storage.model.ts import MAX_TS


class Kind(enum.StrEnum):
    """What a link is."""

    SERVICE = "service"
    GLOBAL_BARRIER = "global_barrier"
    GC_WORKER = "gc_worker"
    CHANGEFEED = "changefeed"
    CAPTURE = "capture"
    READER = "reader"
    TABLE = "table"
    REGION = "region"
    PUMP = "pump"
    LOCK = "lock"
    TRANSACTION = "transaction"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Something that stands at `ts` and keeps the link before it from moving on."""

    kind: Kind
    name: str
    ts: int
    reason: str
    state: str = ""
    owner: str = ""
    commands: tuple[str, ...] = ()
    """What ends it, the mildest first."""
    expires_ms: int | None = None
    """Unix milliseconds at which it ends by itself; None: it does not."""
    history_lost_s: int | None = None
    """Unix seconds from which GC may collect what it needs; None: that is not in sight."""
    next_ts: int = MAX_TS
    """Where the link before it would stand without this one."""


@dataclass(frozen=True, slots=True)
class Chain:
    """One blocker of GC and what holds it, down to the cause; `id` is what `--what-if remove=` takes."""

    id: str
    links: tuple[Link, ...]
    blocks: bool
    """Whether GC wants to be further than it lets it."""

    @property
    def ts(self) -> int:
        """How far it lets GC go."""
        return self.links[0].ts

    def released(self) -> Iterator[tuple[Link, int]]:
        """Each link, and where this blocker would let the minimum be without it: the links before it count, too."""
        low = MAX_TS
        for link in self.links:
            low = min(low, link.next_ts)
            yield link, low
