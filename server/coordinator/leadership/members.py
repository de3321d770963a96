"""Who serves this cluster, and who of them leads, as pictures of the metadata show it.

An old picture names no leader: who is asked says then that it does not know, and the client asks another member.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence

from kvproto import pdpb_pb2

from server.coordinator.errors import NotLeaderError
from server.coordinator.leadership.leader import Leadership

OLD_AFTER_S = 3.0


def member_at(address: str, *, tls: bool) -> pdpb_pb2.Member:
    """The member that is reached at `host:port`; its id stays when it restarts."""
    member_id = int.from_bytes(hashlib.sha256(address.encode()).digest()[:8])
    url = f"{'https' if tls else 'http'}://{address}"
    return pdpb_pb2.Member(name=f"tidemark-{address}", member_id=member_id, peer_urls=[url], client_urls=[url])


class Members:
    """The coordinators of one cluster as one of them, `me`, sees them; without pictures it sees only itself."""

    def __init__(self, me: pdpb_pb2.Member, clock: Callable[[], float] = time.monotonic) -> None:
        self.me = me
        self.leadership: Leadership | None = None
        """Our own, while we lead: it knows better than any picture."""
        self.listed: Sequence[pdpb_pb2.Member] = (me,)
        """All members; for some minutes also those that are gone."""
        self._leader: pdpb_pb2.Member | None = None
        self._old_at = 0.0
        self._clock = clock
        self._news = asyncio.Event()

    def introduce(self, me: pdpb_pb2.Member) -> None:
        """This is where we listen."""
        self.me, self.listed = me, (me,)

    @property
    def url(self) -> str:
        """Where we are reached."""
        return str(self.me.client_urls[0])

    @property
    def leader(self) -> pdpb_pb2.Member | None:
        """Who leads; None when nobody does, or we do not know."""
        if self.leadership is not None and self.leadership.held:
            return self.me
        if self._clock() >= self._old_at or self._leader is None or self._leader.member_id == self.me.member_id:
            return None
        return self._leader

    def show(self, leader: pdpb_pb2.Member | None, listed: Sequence[pdpb_pb2.Member], asked_at: float) -> None:
        """A picture, true at some time since `asked_at`; it ends a leadership of ours that it does not show."""
        ours = self.leadership
        if ours is not None and asked_at >= ours.since and (leader is None or leader.member_id != self.me.member_id):
            ours.end("the leader's key is gone, or another coordinator's")
        self._leader = leader
        self.listed = tuple(listed) or (self.me,)
        self._old_at = asked_at + OLD_AFTER_S
        self._news.set()

    async def leaderless(self) -> None:
        """Wait for a new picture without a leader."""
        while True:
            self._news.clear()
            await self._news.wait()
            if self._leader is None:
                return

    def not_leader(self) -> NotLeaderError:
        """How a call that only the leader answers is refused."""
        leader = self.leader
        return NotLeaderError(leader.client_urls[0] if leader and leader.client_urls else "")
