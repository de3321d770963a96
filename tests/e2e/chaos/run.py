"""One run, whatever its source is: changefeeds and lake jobs, writers, faults, and the comparison
of each cut at the end.
"""

import argparse
import random
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from tidemarkpb.v1 import changefeed_pb2 as pb
from tidemarkpb.v1.dump_pb2 import GetDumpStatusRequest, StartDumpRequest
from tidemarkpb.v1.dump_pb2_grpc import DumpServiceStub

from tests.e2e.chaos.checks import Checker
from tests.e2e.chaos.cluster import World, add_job, sink_uri
from tests.e2e.chaos.faults import Faults
from tests.e2e.chaos.history import Tables
from tests.e2e.chaos.lakes import Lake, LakeError, lake_of
from tests.e2e.chaos.timeline import timeline

DATABASE = "chaos"
BULK_ROWS, _DUMP_ROWS_PER_S = 6000, 300
"""A dump of what tables hold at first lasts for some of the faults."""
_FIRST_CUT_S, _CATCH_UP_S, _LOOK_S = 600.0, 400.0, 1.0


class Run(ABC):
    """From empty tables to the verdict."""

    columns: ClassVar[Mapping[str, tuple[str, ...]]]
    """Of the tables that are replicated; the first one is the key."""
    fills: ClassVar[int]
    """In how many transactions tables are filled at first."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self._world = world
        self._dice = dice
        self.dumped = 0
        """How many transactions changefeeds have by a dump."""
        self._lakes: dict[str, Lake] = {}
        self._watch = Watch(world, self._lakes)

    @abstractmethod
    def prepare(self) -> None:
        """Before there are changefeeds."""

    @abstractmethod
    def changefeed(self) -> pb.CreateChangefeedRequest:
        """What is to be replicated."""

    @abstractmethod
    def fill(self) -> None:
        """Write what tables hold at first, in `fills` transactions."""

    @abstractmethod
    def start_writers(self, rate: float) -> None:
        """Begin to write so many transactions a second."""

    @abstractmethod
    def stop_writers(self) -> None:
        """Wait until the source answers again, and write no more."""

    @abstractmethod
    def checker(self) -> Checker:
        """A new one, which knows the history; writers have stopped."""

    @abstractmethod
    def at_source(self) -> Tables:
        """All tables as the source shows them now."""

    def run(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """Returns the verdict."""
        self.prepare()
        self.dumped = self.fills if arguments.dump else 0
        if arguments.dump:
            self.fill()
        targets = self._world.plan.targets
        for target in targets:
            request = self.changefeed()
            request.id, request.sink_uri = target, sink_uri(self._world, target)
            created = self._world.call("CreateChangefeed", request).changefeed
            if arguments.dump:
                dump = StartDumpRequest(changefeed_id=target, rows_per_second_max=_DUMP_ROWS_PER_S)
                self._world.call("StartDump", dump, DumpServiceStub)
            add_job(self._world, target, created.checkpoint_ts)
            lake = lake_of(target, self._world.lake(target), DATABASE, self.columns)
            self._lakes[target] = lake
        if not arguments.dump:
            self.fill()
        self.start_writers(arguments.rate)
        self._watch.start()
        for target in targets:
            if not _wait(_FIRST_CUT_S, partial(self._has_cuts, target)):
                raise TimeoutError(f"{target} has no cut after {_FIRST_CUT_S} s")
        self._watch.forget_standstills()
        faults = self._faults(arguments)
        faults.run()
        healed_s = time.monotonic()
        self.stop_writers()
        checkers = {target: self.checker() for target in targets}
        stuck = [each for each in targets if not self._catches_up(each, checkers[each].last)]
        self._watch.end()
        caught_up_s = round(time.monotonic() - healed_s, 1)
        lakes = [self._check(target, checkers[target]) for target in targets]
        return {
            "faults": dict(sorted(faults.done.items())),
            "isolated": self._world.rooms.isolated,
            "ended": dict(sorted(self._world.supervisor.ended.items())),
            "lakes": lakes,
            "caught_up_s": caught_up_s,
            "stuck": stuck,
            "looks": self._watch.looks,
            "ahead": self._watch.wrong[:5],
            "right": not stuck and not self._watch.wrong and all(lake["right"] for lake in lakes),
        }

    def _faults(self, arguments: argparse.Namespace) -> Faults:
        planned = timeline(
            self._dice, self._world.victims(), arguments.minutes * 60, arguments.every
        )
        for fault in planned:
            print(fault, file=sys.stderr, flush=True)
        return Faults(self._world, planned)

    def _has_cuts(self, target: str) -> bool:
        self._check_not_failed(target)
        return bool(self._lakes[target].cuts())

    def _catches_up(self, target: str, last: int) -> bool:
        def has_all() -> bool:
            self._check_not_failed(target)
            return last in self._lakes[target].newest("marks") and self._is_dumped(target)

        return _wait(_CATCH_UP_S, has_all)

    def _check_not_failed(self, target: str) -> None:
        if target in self._world.failed:
            raise RuntimeError(f"{target} has failed: {self._world.failed[target]}")

    def _is_dumped(self, target: str) -> bool:
        """Whether each row of the dump is at the target."""
        if not self.dumped:
            return True
        request = GetDumpStatusRequest(changefeed_id=target)
        dump = self._world.call("GetDumpStatus", request, DumpServiceStub).dump
        if dump.state == "failed":
            raise RuntimeError(f"the dump of {target} has failed: {dump}")
        return bool(dump.state == "finished")

    def _check(self, target: str, checker: Checker) -> dict[str, Any]:
        try:
            for (start_ts, end_ts), tables in self._lakes[target].at_each_cut():
                checker.check(start_ts, end_ts, tables)
        except LakeError as err:
            checker.verdict.fault(err)
        verdict = checker.end(self.at_source())
        return {
            "target": target,
            "transactions": checker.at,
            "cuts": verdict.cuts,
            "rows": verdict.rows,
            "longest_standstill_s": round(self._watch.standstill_s[target], 1),
            "faults": verdict.faults,
            "wrong": verdict.wrong,
            "right": verdict.faults == 0,
        }


class Watch:
    """Looks at changefeeds and lakes while all goes on: how long lakes stand still, by the
    harness's clock (those of nodes may jump), and that no checkpoint is ahead of its lake: what is
    acknowledged is durable, and what is not can still be read.
    """

    def __init__(self, world: World, lakes: Mapping[str, Lake]) -> None:
        self.standstill_s = dict.fromkeys(world.plan.targets, 0.0)
        self.looks = 0
        """How many checkpoints were compared."""
        self.wrong: list[str] = []
        self._world = world
        self._lakes = lakes
        self._newest = dict.fromkeys(self.standstill_s, (0, time.monotonic()))
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """From now on."""
        self._thread.start()

    def forget_standstills(self) -> None:
        """They count from now on."""
        now_s = time.monotonic()
        self._newest = {target: (count, now_s) for target, (count, _) in self._newest.items()}
        self.standstill_s = dict.fromkeys(self.standstill_s, 0.0)

    def end(self) -> None:
        """Up to now."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(_LOOK_S):
            # Asked before the lake is read: the lake may only be further by then.
            checkpoints = self._world.checkpoints()
            for target in self.standstill_s:
                cuts = self._lakes[target].cuts()
                self._time(target, len(cuts))
                for what, ts in checkpoints.get(target, ()):
                    self.looks += 1
                    if cuts and ts > cuts[-1][1]:
                        self.wrong.append(f"{what} is {ts}, {target} ends at {cuts[-1][1]}")

    def _time(self, target: str, cuts: int) -> None:
        count, since_s = self._newest[target]
        if cuts != count:
            self._newest[target] = cuts, time.monotonic()
        else:
            stands_s = time.monotonic() - since_s
            self.standstill_s[target] = max(self.standstill_s[target], stands_s)


def _wait(limit_s: float, probe: Callable[[], bool]) -> bool:
    """Until it is so; returns whether it is."""
    deadline = time.monotonic() + limit_s
    while not probe():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True
