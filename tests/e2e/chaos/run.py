"""One run, whatever its source is: changefeeds and lake jobs, writers, faults, and the comparison
of each cut at the end.
"""

import argparse
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

from pyspark_tidemark.lake.cut_record import CutRecord
from tidemarkpb.v1 import changefeed_pb2 as pb

from tests.e2e.chaos.checks import Checker
from tests.e2e.chaos.cluster import World, add_job, sink_uri
from tests.e2e.chaos.faults import Faults
from tests.e2e.chaos.history import Tables
from tests.e2e.chaos.lakes import Lake, LakeError, tables_of
from tests.e2e.chaos.timeline import timeline

DATABASE = "chaos"
_FIRST_CUT_S, _CATCH_UP_S, _LOOK_S = 300.0, 300.0, 1.0


class Run(ABC):
    """From empty tables to the verdict."""

    columns: ClassVar[Mapping[str, tuple[str, ...]]]
    """Of the tables that are replicated; the first one is the key."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self._world = world
        self._dice = dice

    @abstractmethod
    def prepare(self) -> None:
        """Before there are changefeeds."""

    @abstractmethod
    def changefeed(self) -> pb.CreateChangefeedRequest:
        """What is to be replicated."""

    @abstractmethod
    def start_writers(self, rate: float) -> None:
        """Begin to write so many transactions a second, after what tables hold at first."""

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
        targets = self._world.plan.targets
        for target in targets:
            request = self.changefeed()
            request.id, request.sink_uri = target, sink_uri(self._world, target)
            self._world.call("CreateChangefeed", request)
            add_job(self._world, target, target)
        self.start_writers(arguments.rate)
        for target in targets:
            if not _wait(_FIRST_CUT_S, partial(self._has_cuts, target)):
                raise TimeoutError(f"{target} has no cut after {_FIRST_CUT_S} s")
        faults = self._faults(arguments)
        faults.run()
        healed_s = time.monotonic()
        self.stop_writers()
        checkers = {target: self.checker() for target in targets}
        stuck = [each for each in targets if not self._catches_up(each, checkers[each].last)]
        caught_up_s = round(time.monotonic() - healed_s, 1)
        lakes = [self._check(target, checkers[target]) for target in targets]
        return {
            "faults": dict(sorted(faults.done.items())),
            "isolated": self._world.rooms.isolated,
            "ended": dict(sorted(self._world.supervisor.ended.items())),
            "lakes": lakes,
            "caught_up_s": caught_up_s,
            "stuck": stuck,
            "right": not stuck and all(lake["right"] for lake in lakes),
        }

    def _faults(self, arguments: argparse.Namespace) -> Faults:
        planned = timeline(
            self._dice, self._world.victims(), arguments.minutes * 60, arguments.every
        )
        for fault in planned:
            print(fault, file=sys.stderr, flush=True)
        return Faults(self._world, planned)

    def _has_cuts(self, target: str) -> bool:
        return bool(self._world.cuts(target))

    def _lake(self, target: str) -> Lake:
        scratch = self._world.directory / "read"
        return Lake(target, self._world.lake(target), DATABASE, self.columns, scratch)

    def _catches_up(self, target: str, last: int) -> bool:
        lake = self._lake(target)

        def has_last() -> bool:
            cuts = self._world.cuts(target)
            version = lake.tables_at(cuts, cuts[-1]).get("marks")
            pairs = [] if version is None else [("marks", version)]
            return any(last in rows for rows in lake.versions_of(pairs).values())

        return _wait(_CATCH_UP_S, has_last)

    def _check(self, target: str, checker: Checker) -> dict[str, Any]:
        cuts, lake = self._world.cuts(target), self._lake(target)
        try:
            versions = lake.versions(cuts)
            for cut in cuts:
                shown = tables_of(lake.tables_at(cuts, cut), versions, self.columns)
                checker.check(cut.start_ts, cut.end_ts, shown)
        except LakeError as err:
            checker.verdict.fault(err)
        verdict = checker.end(self.at_source())
        return {
            "target": target,
            "transactions": checker.at,
            "cuts": verdict.cuts,
            "rows": verdict.rows,
            "longest_standstill_s": _longest_standstill_s(cuts),
            "faults": verdict.faults,
            "wrong": verdict.wrong,
            "right": verdict.faults == 0,
        }


def _longest_standstill_s(cuts: Sequence[CutRecord]) -> float:
    applied = [datetime.fromisoformat(cut.applied_at) for cut in cuts]
    gaps = [(two - one).total_seconds() for one, two in pairwise(applied)]
    return round(max(gaps, default=0.0), 1)


def _wait(limit_s: float, probe: Callable[[], bool]) -> bool:
    """Until it is so; returns whether it is."""
    deadline = time.monotonic() + limit_s
    while not probe():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True
