"""A whole cluster, and what is harmed of it."""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tidemarkpb.v1 import capture_pb2, dump_pb2
from tidemarkpb.v1 import changefeed_pb2 as pb
from tidemarkpb.v1.capture_pb2_grpc import CaptureServiceStub
from tidemarkpb.v1.changefeed_pb2_grpc import ChangefeedServiceStub
from tidemarkpb.v1.dump_pb2_grpc import DumpServiceStub

from gcsafepoint.worker.config import Bounds
from gcsafepoint.worker.records import write_config
from server.changefeed import keys
from server.changefeed.info import ChangefeedInfo
from server.gc_worker.view import MetaRecords
from storage.meta.client import EtcdMeta
from storage.model.errors import TidemarkError, leaves
from storage.model.ts import compose
from tests.sim.process import Process
from tests.sim.whole import machine as machines
from tests.sim.whole.history import TABLES, History
from tests.sim.whole.lake import Lake
from tests.sim.whole.machine import Machine
from tests.sim.whole.metadata import Metadata
from tests.sim.whole.transport import Net, SimChannel
from tests.sim.whole.workload import SCHEMA, SPLIT_KEYS, Bank

FEED, LIMITED = "bank", "limited"
"""A changefeed without an end, and one that is created at some time and has a target_ts."""
CLIENTS = ("joe", "kim")
_CREATED_BY_S = 90.0
_WRITTEN_BY_S = 1200.0
"""Where a clock was ahead, timestamps stand still until the others are there, and so does the age
of a lock that a dead client has left: nobody resolves it before, as with PD's own timestamps.
"""
_LEADERS_FIRST = 0.7
_RETAINED_S = 20
_MERGING, _MERGED = 0.5, 1 << 20
"""In how many clusters stores merge regions, and up to which size: all those that touch."""
_CAPTURES = (*machines.CAPTURES, machines.JOINING)


class Cluster:
    """All of it; `tell` gets what happens."""

    def __init__(self, chance: Random, directory: Path, tell: Callable[[str], None]) -> None:
        self.chance = chance
        self.net = Net(chance)
        self.metadata = Metadata(asyncio.get_running_loop().time)
        self.meta = EtcdMeta(self.metadata)
        self.history = History()
        self.bank = Bank(self.history, chance)
        self.defects: list[str] = []
        self.trace = hashlib.sha256()
        self._tell = tell
        merge_size = _MERGED if chance.random() < _MERGING else 0
        opens = {
            **{name: machines.coordinator(name) for name in machines.COORDINATORS},
            **{name: machines.store(name, SPLIT_KEYS, merge_size) for name in machines.STORES},
            **{name: machines.gc_worker(name) for name in machines.WORKERS},
            **{name: machines.capture(name, directory) for name in _CAPTURES},
        }
        self.machines = {
            name: Machine(name, each, self.metadata, chance) for name, each in opens.items()
        }
        self.clients = {name: Process(name) for name in CLIENTS}
        self.lakes: dict[str, Lake] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self.dumps = self.dumped_rows = 0
        self.time_jumped = False
        """Whether a coordinator's clock ever was wrong: timestamps, too, may have jumped ahead, at
        the latest when it was set right.
        """
        self._is_pausing = False
        self.target_ts = 0
        """Of the changefeed that has one; 0: it was not created."""
        self.has_target = asyncio.Event()

    def machine(self, name: str) -> Machine:
        """The machine of that name."""
        return self.machines[name]

    def tell(self, what: str) -> None:
        """Something happened: to be told, and to be the same whenever the seed is."""
        self.trace.update(f"{asyncio.get_running_loop().time():.6f} {what}\n".encode())
        self._tell(what)

    def captures(self) -> list[Machine]:
        """The captures that are there, stopped or not."""
        return [self.machines[name] for name in _CAPTURES if self.machines[name].is_up]

    async def pause(self, least_s: float, most_s: float) -> None:
        """Some time passes."""
        await asyncio.sleep(self.chance.uniform(least_s, most_s))

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start all machines, write the schema, create the changefeed, let GC begin."""
        self._tasks = tasks
        self.metadata.start(tasks)
        for each in self.machines.values():
            if each.name != machines.JOINING:
                each.start()
        await write_config(
            MetaRecords(self.meta),
            {"tikv_gc_life_time": "4s", "tikv_gc_run_interval": "5s"},
            Bounds(least_ms=1000),
        )
        async with asyncio.timeout(_CREATED_BY_S):
            await self._until(self._shared)
            await self._until(self.bank.open)
            await self._until(self._create)
        for name in CLIENTS:
            self.start_client(name)

    def start_client(self, name: str) -> None:
        """A client begins, or begins again."""
        self.clients[name] = Process(name)
        self.clients[name].start(self.bank.run())

    async def _until(self, attempt: Callable[[], Any]) -> None:
        while not await self._succeeds(attempt):  # noqa: ASYNC110 - it is asked again, later
            await asyncio.sleep(0.5)

    async def _succeeds(self, attempt: Callable[[], Any]) -> bool:
        succeeds = True
        try:
            await attempt()
        except* TidemarkError as group:
            self._tell(str(leaves(group)[0]))
            succeeds = False
        return succeeds

    async def _shared(self) -> None:
        """See that both stores serve some of the keys."""
        stores = [self.machines[name].parts.get("store") for name in machines.STORES]
        if not all(store is not None and list(store.gate.regions) for store in stores):
            raise AskedError("a store has no regions yet")

    async def _create(self) -> None:
        request = pb.CreateChangefeedRequest(
            id=FEED,
            sink_uri=f"delta:///{FEED}",
            filter=["bank.*"],
            region_threshold=2,
            retain_s=_RETAINED_S,
        )
        await self.asked("CreateChangefeed", request)

    async def asked(self, method: str, request: Any, stub: Any = ChangefeedServiceStub) -> Any:
        """A call to any capture.

        Raises:
            TidemarkError: it was refused, or there was no answer.
        """
        address = f"{self.chance.choice(machines.CAPTURES)}:8300"
        async with SimChannel(self.net, address) as channel:
            call = getattr(stub(channel), method)
            try:
                return await call(request, timeout=20.0)
            except Exception as err:
                raise AskedError(str(err)) from err

    # What happens

    async def kill(self) -> None:
        """A machine dies, or only its daemon, and comes back after a while."""
        chosen = self._victim()
        if not chosen.is_up:
            return
        with_power = self.chance.random() < 0.5
        self.tell(f"kill {chosen.name}{'' if with_power else ', and its power'}")
        await chosen.kill(with_power=with_power)
        await self.pause(0.0, 12.0)
        chosen.start()
        self.tell(f"{chosen.name} is back")

    async def lose_metadata(self) -> None:
        """The metadata's power fails for a while."""
        if not self.metadata.is_up:
            return
        self.tell("the metadata goes down")
        await self.metadata.stop(self.chance)
        await self.pause(0.2, 6.0)
        assert self._tasks is not None
        self.metadata.start(self._tasks)
        self.tell("the metadata is back")

    async def kill_client(self) -> None:
        """A client dies, whatever it was doing; another one comes."""
        name = self.chance.choice(CLIENTS)
        process = self.clients[name]
        if process.is_dead:
            return
        self.tell(f"kill {name}")
        await process.kill()
        await self.pause(0.0, 5.0)
        self.start_client(name)

    async def hang(self) -> None:
        """A machine stands still, for less or more than its lease."""
        chosen = self._victim()
        process = chosen.process
        self.tell(f"stop {chosen.name}")
        process.stop()
        await self.pause(0.1, 15.0)
        process.go_on()
        self.tell(f"{chosen.name} goes on")

    async def cut(self) -> None:
        """A machine does not reach some others for a while, nor perhaps the metadata."""
        chosen = self._victim()
        others = [
            name
            for name in (*self.machines, *CLIENTS)
            if name != chosen.name and self.chance.random() < 0.6
        ]
        self.net.cut_off(chosen.name, others)
        link = chosen.link
        if self.chance.random() < 0.5:
            link.is_cut = True
        self.tell(f"cut {chosen.name} from {', '.join(others)}")
        await self.pause(0.1, 15.0)
        self.net.heal(chosen.name)
        if chosen.is_up:
            link.is_cut = False
        self.tell(f"{chosen.name} is linked")

    async def lose(self) -> None:
        """Calls of a machine are lost, late or doubled, or their answers are."""
        chosen = self._victim()
        self.tell(f"{chosen.name} loses")
        self.net.losses[chosen.name] = 0.3
        link = chosen.link
        link.loses = 0.3
        await self.pause(1.0, 8.0)
        self.net.losses.pop(chosen.name, None)
        link.loses = 0.0
        self.tell(f"{chosen.name} loses no more")

    async def slow(self) -> None:
        """A machine's disk is slow."""
        chosen = self._victim()
        process = chosen.process
        process.disk_delay_s = self.chance.choice((0.05, 0.3, 1.0))
        self.tell(f"{chosen.name} has a slow disk")
        await self.pause(1.0, 8.0)
        process.disk_delay_s = 0.0

    async def fill(self) -> None:
        """A store's disk is full for a while."""
        chosen = self.machines[self.chance.choice(machines.STORES)]
        self.tell(f"{chosen.name} has a full disk")
        disk, disk.is_full = chosen.disk, True  # type: ignore[misc]
        await self.pause(0.5, 8.0)
        disk.is_full = chosen.disk.is_full = False

    async def jump(self) -> None:
        """A machine's wall clock jumps, and is set right again or not."""
        chosen = self._victim()
        ahead_s = self.chance.choice((-3600.0, -60.0, -5.0, -0.5, 5.0, 600.0))
        self.tell(f"the clock of {chosen.name} jumps by {ahead_s} s")
        chosen.process.clock_ahead_s += ahead_s
        self.time_jumped |= chosen.name in machines.COORDINATORS
        await self.pause(0.5, 3.0)
        if self.chance.random() < 0.5 and chosen.is_up:
            self.tell(f"kill {chosen.name}")
            await chosen.kill(with_power=True)
            await self.pause(0.0, 8.0)
            chosen.start()
            self.tell(f"{chosen.name} is back")
        await self.pause(0.5, 10.0)
        chosen.process.clock_ahead_s = 0.0

    async def pause_feed(self) -> None:
        """The changefeed is paused and resumed."""
        if self._is_pausing:
            return
        self._is_pausing = True
        self.tell("pause")
        await self._until(partial(self._moved, "PauseChangefeed", pb.PauseChangefeedRequest))
        await self.pause(0.1, 5.0)
        await self._until(partial(self._moved, "ResumeChangefeed", pb.ResumeChangefeedRequest))
        self.tell("resumed")
        self._is_pausing = False

    async def resume(self) -> None:
        """Let the changefeed run, if it does not."""
        with contextlib.suppress(TidemarkError):
            await self._moved("ResumeChangefeed", pb.ResumeChangefeedRequest)

    async def write_last(self) -> int:
        """Commit a row above all that was done before; its commit_ts. With it the lake crosses the
        last DDL, too, also where timestamps are ahead of the clock and make no empty cuts.
        """
        async with asyncio.timeout(_WRITTEN_BY_S):
            await self._until(self.bank.write_one)
        return self.history.newest_ts

    async def _moved(self, method: str, request: Any) -> None:
        """Make a call until the changefeed is as it asks: an earlier one may have had no answer."""
        pair = await self.meta.get(keys.info(FEED))
        assert pair is not None
        is_running = ChangefeedInfo.from_json(pair.value).state.is_running
        if is_running != (method == "ResumeChangefeed"):
            await self.asked(method, request(id=FEED))

    async def ddl(self) -> None:
        """A table is altered or truncated."""
        self.tell("ddl")
        await self.bank.change()

    async def limit(self) -> None:
        """One more changefeed is created, which ends soon."""
        if self.target_ts:
            return
        ahead_ms = self.chance.randint(1000, 12_000)
        self.target_ts = self.history.newest_ts + compose(ahead_ms)
        self.tell(f"{LIMITED}: to {self.target_ts}")
        self.has_target.set()
        request = pb.CreateChangefeedRequest(
            id=LIMITED,
            sink_uri=f"delta:///{LIMITED}",
            filter=["bank.*"],
            region_threshold=2,
            target_ts=self.target_ts,
        )
        with contextlib.suppress(AskedError):
            await self.asked("CreateChangefeed", request)

    async def dump(self) -> None:
        """All rows are read once more, beside the changes."""
        self.tell("dump")
        with contextlib.suppress(AskedError):
            await self.asked(
                "StartDump", dump_pb2.StartDumpRequest(changefeed_id=FEED), DumpServiceStub
            )
            self.dumps += 1

    async def dump_is_over(self) -> bool:
        """Whether all that was to be dumped is in the lake."""
        request = dump_pb2.GetDumpStatusRequest(changefeed_id=FEED)
        with contextlib.suppress(AskedError):
            answer = await self.asked("GetDumpStatus", request, DumpServiceStub)
            self.dumped_rows = answer.dump.rows_done
            return bool(answer.dump.state == "finished")
        return False

    async def resign(self) -> None:
        """The owner lets another capture be elected."""
        self.tell("resign")
        with contextlib.suppress(AskedError):
            request = capture_pb2.ResignOwnerRequest()
            await self.asked("ResignOwner", request, CaptureServiceStub)

    async def drain(self) -> None:
        """A capture is to be left, and is asked back."""
        name = self.chance.choice(self.captures()).name if self.captures() else machines.JOINING
        self.tell(f"drain {name}")
        for cancel in (False, True):
            with contextlib.suppress(AskedError):
                request = capture_pb2.DrainCaptureRequest(id=name, cancel=cancel)
                await self.asked("DrainCapture", request, CaptureServiceStub)
            await self.pause(0.5, 6.0)

    async def carry_over(self) -> None:
        """All tables go to one capture, and then to the other one, while nobody reads."""
        lake = self.lakes[FEED]
        self.tell("tables go to and fro")
        lake.is_resting = True
        for name in machines.CAPTURES:
            for cancel in (False, True):
                with contextlib.suppress(AskedError):
                    request = capture_pb2.DrainCaptureRequest(id=name, cancel=cancel)
                    await self.asked("DrainCapture", request, CaptureServiceStub)
                await self.pause(4.0, 7.0)
        lake.is_resting = False

    async def move_table(self) -> None:
        """Somebody has a capture take a table over, whoever has it now."""
        name = self.chance.choice(_CAPTURES)
        table = f"{SCHEMA}.{self.chance.choice(TABLES)}"
        self.tell(f"{table} is to go to {name}")
        with contextlib.suppress(AskedError):
            await self.asked("MoveTable", pb.MoveTableRequest(id=FEED, table=table, capture=name))

    async def join(self) -> None:
        """One more capture joins for a while, and goes by being killed or, first, drained."""
        joining = self.machines[machines.JOINING]
        if joining.is_up:
            return
        self.tell(f"{joining.name} joins")
        joining.start()
        await self.pause(2.0, 20.0)
        is_drained = self.chance.random() < 0.5
        if is_drained:
            self.tell(f"drain {joining.name}")
            with contextlib.suppress(AskedError):
                request = capture_pb2.DrainCaptureRequest(id=joining.name)
                await self.asked("DrainCapture", request, CaptureServiceStub)
            await self.pause(0.0, 8.0)
        self.tell(f"{joining.name} goes")
        if joining.is_up:
            await joining.kill(with_power=True)

    async def split(self) -> None:
        """Regions of the tables are split."""
        self.tell("regions are split")
        await self.bank.split()

    async def rest(self) -> None:
        """The lake job stands still, for longer than GC keeps what nobody protects."""
        lake = self.lakes[FEED]
        self.tell("the lake job rests")
        lake.is_resting = True
        await self.pause(3.0, 15.0)
        lake.is_resting = False

    def _victim(self) -> Machine:
        """A machine to harm; of the coordinators most often the one that leads."""
        kinds = (machines.COORDINATORS, machines.STORES, _CAPTURES, machines.WORKERS)
        chosen = [self.machines[name] for name in self.chance.choice(kinds)]
        leading = [each for each in chosen if each.leads]
        if leading and self.chance.random() < _LEADERS_FIRST:
            return leading[0]
        return self.chance.choice(chosen)


class AskedError(TidemarkError):
    """A call was refused, or has no answer."""

    code = "ErrAsked"


HARM = (
    *("kill", "kill", "kill_client", "hang", "hang", "cut", "lose", "slow", "fill", "jump"),
    *("limit", "pause_feed", "rest", "ddl", "ddl", "dump", "resign", "drain", "carry_over"),
    *("lose_metadata", "move_table", "move_table", "join", "split", "split"),
)
