"""Captures over one metadata server, readers of their changefeeds, and what happens to them."""

import asyncio
import contextlib
from collections.abc import Callable
from random import Random
from typing import Any

from server.capture.changefeeds import Changefeeds
from server.capture.creation import NewChangefeed
from server.capture.errors import NotOwnerError
from server.capture.feed import FeedFactory
from server.capture.fence import Fence, FencedMeta
from server.capture.maintainers import Maintainers
from server.capture.membership import Membership
from server.capture.owner import Owner, Placement
from server.capture.records import Records
from server.capture.routing import Router
from server.capture.worker.peers import PeerAccess
from server.rpc.credentials import SecurityConfig
from server.rpc.pd import MinSafePoint
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from storage.model.errors import TidemarkError
from tests.memory_kv import MemoryKV
from tests.sim.network import Link
from tests.sim.process import Process
from tests.sim.source import Log, SimProcessor, SimSource

CAPTURES = ("ann", "ben", "cat")
FEEDS = ("log0", "log1", "log2")
KEEPING = "log0"
"""The changefeed whose source keeps its history by a safepoint, as a pump does."""
_CREATED_BY_S = 60.0


class Pd:
    """Keeps safepoints for all captures; GC follows them."""

    cluster_id = 7

    def __init__(self) -> None:
        self.safepoints = {"gc_worker": 0}
        self.gc_ts = self.newest_tso = 0


class PdLink:
    """Implements what captures ask of `server.rpc.pd.PdClient`, over a capture's link."""

    cluster_id = 7

    def __init__(self, pd: Pd, link: Link) -> None:
        self._pd = pd
        self._link = link

    async def tso(self) -> int:
        async def take() -> int:
            self._pd.newest_tso += 1
            return self._pd.newest_tso

        return int(await self._link.call(take))

    async def gc_safe_point(self) -> int:
        async def read() -> int:
            return self._pd.gc_ts

        return int(await self._link.call(read))

    async def update_service_gc_safe_point(
        self, service_id: str, ttl_s: int, safe_point: int
    ) -> MinSafePoint:
        async def update() -> MinSafePoint:
            points = self._pd.safepoints
            if ttl_s <= 0:
                points.pop(service_id, None)
            elif safe_point >= min(points.values()):
                points[service_id] = safe_point
            least = min(points, key=lambda each: points[each])
            return MinSafePoint(least, ttl_s, points[least])

        answer: MinSafePoint = await self._link.call(update)
        return answer


class Capture:
    """One capture's parts, as `server.capture.daemon` puts them together."""

    def __init__(self, name: str, cluster: "Cluster") -> None:
        self.name = name
        self.process = Process()
        chance = cluster.chance
        self.link = Link(cluster.server, chance)
        meta: Any = EtcdMeta(self.link)
        pd: Any = PdLink(cluster.pd, self.link)

        def factory(fence: Fence) -> FeedFactory:
            fenced: Any = FencedMeta(meta, fence)

            def source(changefeed: str, _: str) -> Any:
                log = cluster.logs[changefeed]
                return SimSource(changefeed, log, fenced, keeps_history=changefeed == KEEPING)

            def processor(assignment: Any) -> Any:
                return SimProcessor(chance, assignment)

            return FeedFactory(Records(meta, fence), source, processor)

        fence = Fence()
        placement = Placement(meta, fence)
        owner = Owner(factory(fence), pd, placement)
        self.maintainers = Maintainers(
            meta,
            name,
            owner,
            lambda of, changefeed: Changefeeds(factory(of), pd, changefeed),
            placement.decided,
        )
        self.membership = Membership(meta, name, self.maintainers, fence)
        self.router = Router(self.maintainers, self.membership, PeerAccess(SecurityConfig()))

    @property
    def is_held(self) -> bool:
        """Whether its keys are surely its own."""
        lease = self.maintainers._lease
        return lease is not None and asyncio.get_running_loop().time() < lease.deadline

    @property
    def is_well(self) -> bool:
        """Whether nothing keeps it from doing what it should."""
        return self.is_held and not (self.process.is_stopped or self.link.is_cut or self.link.loses)

    def start(self) -> None:
        """Run it."""
        self.process.start(self.membership.run(f"{self.name}:1", f"{self.name}:2"))

    async def kill(self) -> None:
        """As `kill -9`."""
        self.link.is_cut = True
        await self.process.kill()


class Reader:
    """A lake job: it commits cuts to its lake, and acknowledges them, wherever the changefeed is.

    Tables of its lake: `rows` in the order in which they came, and the dump's `chunks`.
    """

    def __init__(self, changefeed: str, cluster: "Cluster") -> None:
        self.rows: list[int] = []
        self.chunks: set[int] = set()
        self.at_ts = 0
        self._name = changefeed
        self._cluster = cluster

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            await self._cluster.pause(0.05, 0.6)
            with contextlib.suppress(TidemarkError, TimeoutError):
                async with asyncio.timeout(20.0):
                    await self._cut()

    async def _cut(self) -> None:
        capture, sink = await self._sink()
        if not self.at_ts:
            self.at_ts = capture.maintainers.feed(self._name).info.start_ts
        end_ts = sink.resolved_ts()
        capture.maintainers.check_held()  # as CaptureFeeds.latest does
        if end_ts <= self.at_ts:
            return
        if self._cluster.chance.random() < 0.5:
            await self._cluster.pause(0.01, 0.5)
            capture, sink = await self._sink()
            if sink.resolved_ts() < end_ts:
                return
        rows, chunks = sink.read(self.at_ts, end_ts)
        capture.maintainers.check_held()
        # committed
        self.rows += rows
        self.chunks |= set(chunks)
        self.at_ts = end_ts
        await self._cluster.pause(0.01, 0.5)
        _, sink = await self._sink()
        if sink.resolved_ts() >= end_ts:
            sink.ack(end_ts)

    async def _sink(self) -> tuple[Capture, Any]:
        """The run that serves the changefeed, as far as some capture knows.

        Raises:
            TidemarkError: none does now.
        """
        asked = self._cluster.chance.choice(self._cluster.alive())
        await asked.process.runs()
        found = await asked.router.find(self._name, 2.0)
        capture = asked if found is None else self._cluster.captures[found.id]
        await capture.process.runs()
        sink = capture.maintainers.feed(self._name).processor.sink
        if sink is None or capture not in self._cluster.alive():
            raise NotOwnerError("it is not here")
        return capture, sink


class Cluster:
    """All of it; `tell` gets what happens."""

    def __init__(self, chance: Random, tell: Callable[[str], None]) -> None:
        self.chance = chance
        self.server = EmbeddedEtcd(MemoryKV(), clock=asyncio.get_running_loop().time)
        self.meta = EtcdMeta(self.server)
        self.pd = Pd()
        self.logs = {name: Log() for name in FEEDS}
        self.readers = {name: Reader(name, self) for name in FEEDS}
        self.captures = {name: Capture(name, self) for name in CAPTURES}
        self.tell = tell
        self._down: set[str] = set()

    def alive(self) -> list[Capture]:
        """The captures that are there, stopped or not."""
        return [each for name, each in self.captures.items() if name not in self._down]

    async def pause(self, least_s: float, most_s: float) -> None:
        """Some time passes."""
        await asyncio.sleep(self.chance.uniform(least_s, most_s))

    async def start(self) -> None:
        """Start all captures, and create the changefeeds."""
        for capture in self.captures.values():
            capture.start()
        async with asyncio.timeout(_CREATED_BY_S):
            for name in FEEDS:
                while not await self._created(name):  # noqa: ASYNC110 - captures are asked
                    await asyncio.sleep(0.1)

    async def _created(self, name: str) -> bool:
        new = NewChangefeed(
            id=name, sink_uri=f"delta:///{name}", source_uri="pump://", rules=["bank.*"]
        )
        for capture in self.captures.values():
            if capture.maintainers.owner.is_active:
                await capture.maintainers.owner.create(new)
                return True
        return False

    # What happens

    async def kill(self) -> None:
        """A capture dies, and comes back after a while."""
        name = self.chance.choice([each.name for each in self.alive()])
        if len(self.alive()) == 1:
            return
        self.tell(f"kill {name}")
        self._down.add(name)
        await self.captures[name].kill()
        await self.pause(0.0, 15.0)
        self.captures[name] = Capture(name, self)
        self.captures[name].start()
        self._down.discard(name)
        self.tell(f"{name} is back")

    async def hang(self) -> None:
        """A capture is stopped, for less or more than its lease."""
        capture = self.chance.choice(self.alive())
        self.tell(f"stop {capture.name}")
        capture.process.stop()
        await self.pause(0.1, 18.0)
        capture.process.go_on()
        self.tell(f"{capture.name} goes on")

    async def cut(self) -> None:
        """A capture does not reach the metadata for a while."""
        capture = self.chance.choice(self.alive())
        self.tell(f"cut {capture.name}")
        capture.link.is_cut = True
        await self.pause(0.1, 18.0)
        if capture in self.alive():
            capture.link.is_cut = False
        self.tell(f"{capture.name} is linked")

    async def lose(self) -> None:
        """Answers to a capture are lost, and requests of it are late."""
        capture = self.chance.choice(self.alive())
        self.tell(f"{capture.name} loses")
        capture.link.loses = 0.3
        await self.pause(1.0, 8.0)
        capture.link.loses = 0.0

    async def drain(self) -> None:
        """A capture is to be left, and is asked back."""
        capture, other = (self.chance.choice(self.alive()) for _ in range(2))
        self.tell(f"drain {capture.name}")
        with contextlib.suppress(TidemarkError, TimeoutError):
            async with asyncio.timeout(10.0):
                await other.membership.drain(capture.name)
                await self.pause(0.5, 8.0)
        while True:
            with contextlib.suppress(TidemarkError, TimeoutError):
                async with asyncio.timeout(10.0):
                    await self.chance.choice(self.alive()).membership.drain(
                        capture.name, cancel=True
                    )
                    return
            if capture not in self.alive():
                return
            await asyncio.sleep(0.5)

    async def resign(self) -> None:
        """The owner lets another one be elected."""
        self.tell("resign")
        for capture in self.alive():
            capture.membership.resign()

    async def pause_feed(self) -> None:
        """A changefeed is paused and resumed."""
        name = self.chance.choice(FEEDS)
        self.tell(f"pause {name}")
        await self._change(name, "pause")
        await self.pause(0.1, 3.0)
        await self._change(name, "resume")
        self.tell(f"{name} is resumed")

    async def _change(self, name: str, method: str) -> None:
        """Make a call until the changefeed is as it asks."""
        while True:
            for capture in self.alive():
                home = capture.maintainers.changefeeds_of(name)
                if name not in home.feeds or not capture.is_held or capture.process.is_stopped:
                    continue
                if home.feeds[name].info.state.is_running == (method == "resume"):
                    return
                with contextlib.suppress(TidemarkError, TimeoutError):
                    async with asyncio.timeout(20.0):
                        await home.carry_out(getattr(home, method)(name))
            await asyncio.sleep(0.2)


HARM = ("kill", "hang", "cut", "lose", "drain", "resign", "pause_feed")
