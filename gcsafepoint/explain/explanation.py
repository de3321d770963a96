"""The answer to "who blocks GC?": all chains, the lowest first, and what would be if some were removed. Pure."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from gcsafepoint.explain.chain import chain_of
from gcsafepoint.explain.holder import Holder, holders
from gcsafepoint.explain.link import Chain, Kind
from gcsafepoint.explain.names import creating_service, feed_service, shown
from gcsafepoint.explain.situation import Situation
from gcsafepoint.rules import GC_WORKER
from storage.model.errors import InvalidError, NotFoundError

MOST_CHAINS = 100
_COMPARED = 1000


class BlockerUnknownError(NotFoundError):
    """Nothing of that name holds GC back."""

    code = "ErrBlockerUnknown"


class BlockerFixedError(InvalidError):
    """GC's own worker cannot be removed."""

    code = "ErrBlockerFixed"


@dataclass(frozen=True, slots=True)
class WhatIf:
    """How things stood without `removed`; `feeds`: changefeeds among them whose history would be given up."""

    removed: tuple[str, ...]
    feeds: tuple[str, ...]
    next: Chain


@dataclass(frozen=True, slots=True)
class Explanation:
    """`chains` has at least GC's own worker; its first is what GC waits for now."""

    situation: Situation
    chains: tuple[Chain, ...]
    left_out: int = 0
    what_if: WhatIf | None = None

    @property
    def lowest(self) -> Chain:
        """What GC waits for."""
        return self.chains[0]


def explain(situation: Situation, remove: Sequence[str] = (), most: int = MOST_CHAINS) -> Explanation:
    """All holders in order, at most `most` of them, and what if those of `remove` were gone.

    A name of `remove` is a service id, a changefeed's id, or the id of a chain.

    Raises:
        BlockerUnknownError: naming the nearest known one.
        BlockerFixedError: `gc_worker` is among them.
    """
    ordered = holders(situation)
    shown_now = range(min(len(ordered), max(1, most)))
    chains = tuple(chain_of(ordered, index, situation) for index in shown_now)
    what_if = _what_if(ordered, situation, remove) if remove else None
    return Explanation(situation, chains, len(ordered) - len(chains), what_if)


def _what_if(ordered: Sequence[Holder], situation: Situation, names: Sequence[str]) -> WhatIf:
    gone = {holder_id: None for name in names for holder_id in _named(ordered, situation, name)}
    feeds = [feed for feed in situation.feeds if feed_service(feed) in gone]
    rest = [holder for holder in ordered if holder.id not in gone]
    return WhatIf(tuple(gone), tuple(feeds), chain_of(rest, 0, situation))


def _named(ordered: Sequence[Holder], situation: Situation, name: str) -> list[str]:
    if name == GC_WORKER:
        raise BlockerFixedError("gc_worker is GC itself and cannot be removed; see `tidemark cli gc status`")
    known = {holder.id for holder in ordered if holder.kind is not Kind.GC_WORKER}
    if name in known:
        return [name]
    of_feed = [service for service in (feed_service(name), creating_service(name)) if service in known]
    if of_feed:
        return of_feed
    if name in situation.feeds:
        raise BlockerUnknownError(f"changefeed {shown(name)} has no live safe point: it holds nothing back")
    near = difflib.get_close_matches(name, [*known, *situation.feeds][:_COMPARED], n=1, cutoff=0.0)
    hint = f"did you mean {shown(near[0])}?" if near else "nothing but gc_worker does"
    raise BlockerUnknownError(f"no service and no changefeed {shown(name)!r} holds GC back; {hint}")
