"""Who may connect: at most so many connections in all, and so many from one client address.

Where either is used up, connections without calls make room: those of the address itself for one
more of its own, those of the address with the most for one more of anybody's. Whose calls keep all
of them busy is refused.
"""

import heapq
import time
from collections.abc import Collection

import structlog

from server.rpc.http2 import metrics
from server.rpc.http2.link import Link
from server.rpc.limits import Limits

_EVICTED_AT_ONCE = 32
_NONE_IDLE_S = 0.1
"""After a search that met no idle connection, newcomers are refused for so long without another
one.
"""

_log = structlog.get_logger(__name__)


class _Client:
    """The connections of one address."""

    __slots__ = ("links", "none_idle_until_s", "warned")

    def __init__(self) -> None:
        self.links: set[Link] = set()
        self.none_idle_until_s = 0.0
        self.warned = False

    def evict_idle(self, serving: Collection[Link]) -> list[Link]:
        """Choose those that have been without calls for the longest time;
        `serving` are those that speak HTTP/2.
        """
        now_s = time.monotonic()
        if now_s < self.none_idle_until_s:
            return []
        idle = (link for link in self.links if link in serving and link.evictable)
        evicted = heapq.nsmallest(_EVICTED_AT_ONCE, idle, key=lambda link: link.called_s)
        if not evicted:
            self.none_idle_until_s = now_s + _NONE_IDLE_S
        return evicted


class Admission:
    """Counts a listener's connections from their accepting on,
    until they are over or make room for others.
    """

    def __init__(self, limits: Limits, serving: Collection[Link]) -> None:
        self._limits = limits
        self._serving = serving
        self._clients: dict[str, _Client] = {}
        self._address_of: dict[Link, str] = {}
        self._none_idle_until_s = 0.0

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._address_of)

    def refusal(self, address: str) -> str:
        """Why one more connection of this address is not taken; empty: it is,
        others have made room if need be.
        """
        client = self._clients.get(address)
        share = self._limits.most_connections_per_address
        if (
            address
            and client is not None
            and len(client.links) >= share
            and not self._evict(client)
        ):
            if not client.warned:
                client.warned = True
                _log.warning(
                    "an address has as many connections as it may have",
                    address=address,
                    connections=share,
                )
            return (
                f"your address has {share} connections with calls, as many as it may have; end "
                "some of them"
            )
        if self.connections >= self._limits.most_connections and not self._evict_largest():
            return "all connections are in use; try again later, or another server"
        return ""

    def add(self, link: Link, address: str) -> None:
        """Count a connection that was not refused."""
        self._clients.setdefault(address, _Client()).links.add(link)
        self._address_of[link] = address
        metrics.CONNECTIONS.inc()

    def remove(self, link: Link) -> None:
        """It is over, or leaves; again: nothing."""
        address = self._address_of.pop(link, None)
        if address is None:
            return
        metrics.CONNECTIONS.dec()
        client = self._clients[address]
        client.links.remove(link)
        if not client.links:
            del self._clients[address]

    def _evict_largest(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._none_idle_until_s:
            return False
        for client in sorted(
            self._clients.values(), key=lambda client: len(client.links), reverse=True
        ):
            if self._evict(client):
                return True
        self._none_idle_until_s = now_s + _NONE_IDLE_S
        return False

    def _evict(self, client: _Client) -> bool:
        evicted = client.evict_idle(self._serving)
        for link in evicted:
            self.remove(link)
            link.leave()
        metrics.EVICTED.labels("idle").inc(len(evicted))
        return bool(evicted)
