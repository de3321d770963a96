"""Callers of every kind on a cluster of coordinators, and the record of what they were answered.

Clients follow the leader as every daemon does. Probes ask every coordinator by itself, the deposed
and the stopped ones too: what those say counts like any other answer.
"""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import grpc.aio
from kvproto import metapb_pb2, pdpb_pb2
from kvproto.pdpb_pb2_grpc import PDStub

from server.rpc.pd import AlreadyBootstrappedError, PdClient, PdRefusedError, PdUnavailableError
from storage.model.ts import compose
from tests.integration.coordinator.history import GcSafePoint, Hold, Tso, faults_of

T = TypeVar("T")
SEED = int(os.environ.get("TIDEMARK_TEST_SEED", "4"))
CLIENT, GC_WORKER = "client", "gc worker"
NEVER_S = (1 << 63) - 1
_TTL_S = 600
_PROBE_S = 1.0
_PAUSE_S = 0.01


class Load:
    """What was asked and answered since the beginning;
    `seed` decides who asks when for how much.
    """

    def __init__(self, addresses: Sequence[str], seed: int) -> None:
        self.addresses = addresses
        self.seed = seed
        self.tsos: list[Tso] = []
        self.safe_points: list[GcSafePoint] = []
        self.holds: list[Hold] = []
        self.refusals: list[str] = []
        self._random = random.Random(seed)
        self._answer = asyncio.Event()

    def check(self) -> None:
        """Raises: AssertionError: the answers contradict each other; with the whole history."""
        if faults := faults_of(self.tsos, self.safe_points, self.holds):
            history = sorted([*self.tsos, *self.safe_points], key=lambda answer: answer.sent_s)
            told = "\n".join(map(str, [*history, *self.holds]))
            raise AssertionError(
                "\n".join([*faults, f"seed {self.seed}; the whole history:", told])
            )

    async def goes_on(self, answers: int = 5, seconds: float = 100) -> float:
        """Wait until clients' calls of all kinds that are sent from now on are answered;
        returns how long it took.
        """
        began_s = time.monotonic()

        def fresh(answered: Sequence[Any], asked: str = CLIENT) -> int:
            return sum(
                answer.sent_s > began_s and answer.asked == asked for answer in answered[-1000:]
            )

        try:
            async with asyncio.timeout(seconds):
                while (
                    min(fresh(self.tsos), fresh(self.safe_points)) < answers
                    or not fresh(self.safe_points, GC_WORKER)
                    or not self._held_since(began_s)
                ):
                    self._answer.clear()
                    await self._answer.wait()
        except TimeoutError:
            raise AssertionError(
                f"no answers for {seconds} s; refusals: {self.refusals[-5:]}"
            ) from None
        return time.monotonic() - began_s

    def longest_silence_s(self, since_s: float) -> float:
        """The longest time since then in which no client, following the leader,
        received a timestamp.
        """
        received = (
            tso.received_s for tso in self.tsos if tso.asked == CLIENT and tso.received_s > since_s
        )
        times = [since_s, *sorted(received)]
        return max(later - earlier for earlier, later in pairwise(times))

    async def take_timestamps(self, pd: PdClient) -> None:
        while True:
            count = self._random.choice((1, 10, 5000))
            sent_s = time.monotonic()
            if (last := await self._answered(pd.tso(count))) is not None:
                self.tsos.append(Tso(sent_s, time.monotonic(), CLIENT, last - count + 1, last))
            await self._pause()

    async def hold_history(self, pd: PdClient, service_id: str) -> None:
        """A changefeed: its service safe point follows the present, and GC must not pass it."""
        at: int | None = None
        while True:
            if (wanted := await self._answered(pd.tso())) is None:
                continue
            if at is not None:  # from here on the old safe point is held only perhaps
                self.holds[at] = replace(self.holds[at], until_s=time.monotonic())
            minimum = await self._answered(
                pd.update_service_gc_safe_point(service_id, _TTL_S, wanted)
            )
            if minimum is not None and minimum.safe_point <= wanted:
                at = len(self.holds)
                self.holds.append(Hold(service_id, wanted, time.monotonic(), float("inf")))
            else:
                at = None
            await asyncio.sleep(self._random.uniform(0, 0.3))

    async def collect_garbage(self, pd: PdClient) -> None:
        """A GC worker: as far as all services allow."""
        while True:
            now = await self._answered(pd.tso())
            if now is not None:
                minimum = await self._answered(
                    pd.update_service_gc_safe_point("gc_worker", NEVER_S, now)
                )
                sent_s = time.monotonic()
                if minimum is not None:
                    held = await self._answered(pd.update_gc_safe_point(minimum.safe_point))
                    if held is not None:
                        self.safe_points.append(
                            GcSafePoint(sent_s, time.monotonic(), GC_WORKER, held)
                        )
            await self._pause()

    async def poll_safe_point(self, pd: PdClient) -> None:
        while True:
            sent_s = time.monotonic()
            if (held := await self._answered(pd.gc_safe_point())) is not None:
                self.safe_points.append(GcSafePoint(sent_s, time.monotonic(), CLIENT, held))
            await self._pause()

    async def probe(self, address: str, cluster_id: int) -> None:
        header = pdpb_pb2.RequestHeader(cluster_id=cluster_id)
        async with grpc.aio.insecure_channel(
            address, options=[("grpc.max_reconnect_backoff_ms", 500)]
        ) as channel:
            stub: Any = PDStub(channel)
            while True:
                with suppress(grpc.aio.AioRpcError):
                    await self._probe_safe_point(stub, address, header)
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await self._probe_timestamps(stub, address, header)
                await self._pause()

    async def _probe_safe_point(
        self, stub: Any, address: str, header: pdpb_pb2.RequestHeader
    ) -> None:
        sent_s = time.monotonic()
        answer = await stub.GetGCSafePoint(
            pdpb_pb2.GetGCSafePointRequest(header=header), timeout=_PROBE_S
        )
        self.safe_points.append(GcSafePoint(sent_s, time.monotonic(), address, answer.safe_point))

    async def _probe_timestamps(
        self, stub: Any, address: str, header: pdpb_pb2.RequestHeader
    ) -> None:
        """Several answers on one stream, so that the stream of a deposed leader is asked, too."""
        stream = stub.Tso(timeout=_PROBE_S)
        while True:
            sent_s = time.monotonic()
            await stream.write(pdpb_pb2.TsoRequest(header=header, count=3))
            answer = await stream.read()
            if not isinstance(answer, pdpb_pb2.TsoResponse):
                return
            last = compose(answer.timestamp.physical, answer.timestamp.logical)
            self.tsos.append(Tso(sent_s, time.monotonic(), address, last - 2, last))
            await self._pause()

    async def _answered(self, call: Awaitable[T]) -> T | None:
        try:
            return await call
        except (PdUnavailableError, PdRefusedError) as err:
            self.refusals.append(err.message)
            await asyncio.sleep(_PAUSE_S)
            return None

    async def _pause(self) -> None:
        self._answer.set()
        await asyncio.sleep(self._random.uniform(0, 2 * _PAUSE_S))

    def _held_since(self, since_s: float) -> bool:
        return any(hold.since_s > since_s for hold in self.holds[-20:])


@asynccontextmanager
async def load_on(addresses: Sequence[str], seed: int) -> AsyncIterator[Load]:
    """Callers on the coordinators for the block; checks the whole history at its end."""
    load = Load(addresses, seed)
    async with (
        PdClient.open(",".join(addresses)) as pd,
        PdClient.open(",".join(reversed(addresses))) as other,
    ):
        await _bootstrap(pd)
        async with asyncio.TaskGroup() as tasks:
            callers = [
                tasks.create_task(caller)
                for caller in (
                    load.take_timestamps(pd),
                    load.take_timestamps(other),
                    load.hold_history(pd, "ticdc-default-one"),
                    load.hold_history(other, "ticdc-default-two"),
                    load.collect_garbage(pd),
                    load.poll_safe_point(other),
                    *(load.probe(address, pd.cluster_id) for address in addresses),
                )
            ]
            await load.goes_on()
            try:
                yield load
            finally:
                await _end(callers)
    load.check()
    assert load.tsos
    assert load.safe_points[-1].safe_point > 0


async def _end(callers: Sequence[asyncio.Task[None]]) -> None:
    stuck: set[asyncio.Task[None]] = set(callers)
    for _ in range(60):  # gRPC may answer a cancelled task with the failure of its call
        for caller in stuck:
            caller.cancel()
        _, stuck = await asyncio.wait(callers, timeout=1)
        if not stuck:
            return
    raise AssertionError(f"callers that cannot be cancelled: {stuck}")


async def _bootstrap(pd: PdClient) -> None:
    store = metapb_pb2.Store(id=1, address="127.0.0.1:20160", version="8.5.0")
    epoch = metapb_pb2.RegionEpoch(conf_ver=1, version=1)
    region = metapb_pb2.Region(id=2, region_epoch=epoch, peers=[metapb_pb2.Peer(id=3, store_id=1)])
    with suppress(AlreadyBootstrappedError):
        await pd.bootstrap(store, region)
