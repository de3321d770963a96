"""A run over MariaDB: its changefeeds and lake jobs, its writers, and the comparison at the end."""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

import pymysql
from pyspark_tidemark.lake.cut_record import CutRecord
from tidemarkpb.v1 import changefeed_pb2 as pb

from tests.e2e.chaos import workload
from tests.e2e.chaos.checks import Checker
from tests.e2e.chaos.cluster import World, add_job, sink_uri
from tests.e2e.chaos.faults import Faults
from tests.e2e.chaos.history import Tables, Transaction, read
from tests.e2e.chaos.lakes import Lake, LakeError, tables_of
from tests.e2e.chaos.timeline import timeline
from tests.e2e.chaos.workload import COLUMNS, DATABASE, FILTER, Writer
from tests.mariadb import MariaDb

_WRITERS = 3
_FIRST_CUT_S, _CATCH_UP_S, _LOOK_S = 300.0, 300.0, 1.0


class MariaDbRun:
    """One run."""

    def __init__(self, world: World, dice: random.Random) -> None:
        assert world.server is not None
        self._world = world
        self._server: MariaDb = world.server
        self._dice = dice

    def run(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """From empty tables to the verdict."""
        workload.create(self._server)
        for target in self._world.plan.targets:
            self._create_changefeed(target)
        workload.fill(self._server)
        writers = self._start_writers(arguments.rate)
        for target in self._world.plan.targets:
            _wait(_FIRST_CUT_S, f"the first cut of {target}", lambda t=target: self._cuts(t))
        faults = self._faults(arguments)
        faults.run()
        healed_s = time.monotonic()
        self._wait_server()
        for writer in writers:
            writer.stop()
        history = self._history()
        last = history[-1].mark
        stuck = [
            target for target in self._world.plan.targets if not self._catches_up(target, last)
        ]
        caught_up_s = round(time.monotonic() - healed_s, 1)
        lakes = [self._check(target, history, writers) for target in self._world.plan.targets]
        return {
            "faults": dict(sorted(faults.done.items())),
            "isolated": self._world.rooms.isolated,
            "ended": dict(sorted(self._world.supervisor.ended.items())),
            "transactions": len(history),
            "lakes": lakes,
            "caught_up_s": caught_up_s,
            "stuck": stuck,
            "right": not stuck and all(lake["right"] for lake in lakes),
        }

    def _create_changefeed(self, target: str) -> None:
        uri = f"{self._server.uri}?idle-row-ms=1000&heartbeat-ms=500"
        request = pb.CreateChangefeedRequest(
            id=target, sink_uri=sink_uri(self._world, target), source_uri=uri, filter=FILTER
        )
        self._world.call("CreateChangefeed", request)
        add_job(self._world, target, target)

    def _start_writers(self, rate: float) -> list[Writer]:
        writers = [
            Writer(self._server, number, random.Random(self._dice.getrandbits(64)), _WRITERS / rate)
            for number in range(1, _WRITERS + 1)
        ]
        for writer in writers:
            writer.start()
        return writers

    def _faults(self, arguments: argparse.Namespace) -> Faults:
        planned = timeline(
            self._dice, self._world.victims(), arguments.minutes * 60, arguments.every
        )
        for fault in planned:
            print(fault, file=sys.stderr, flush=True)
        return Faults(self._world, planned)

    def _wait_server(self) -> None:
        """Until it answers again."""

        def answers() -> bool:
            try:
                return bool(self._server.execute("SELECT 1"))
            except pymysql.Error:
                return False

        _wait(_FIRST_CUT_S, "MariaDB", answers)

    def _history(self) -> list[Transaction]:
        self._server.execute("FLUSH BINARY LOGS")
        files = sorted((self._world.directory / "mariadb" / "data").glob("binlog.[0-9]*"))
        marked = [each for each in read(files, DATABASE) if each.mark is not None]
        assert marked, "the log has no transactions of the workload"
        return marked

    def _cuts(self, target: str) -> list[CutRecord]:
        return self._world.cuts(target)

    def _lake(self, target: str) -> Lake:
        scratch = self._world.directory / "read"
        return Lake(target, self._world.lake(target), DATABASE, COLUMNS, scratch)

    def _catches_up(self, target: str, last: int | None) -> bool:
        lake = self._lake(target)

        def has_last() -> bool:
            cuts = self._cuts(target)
            shown = lake.tables_at(cuts, cuts[-1])
            newest = lake.versions_of({("marks", shown["marks"])}) if "marks" in shown else {}
            return any(last in rows for rows in newest.values())

        return _wait(_CATCH_UP_S, "", has_last)

    def _check(
        self, target: str, history: Sequence[Transaction], writers: Sequence[Writer]
    ) -> dict[str, Any]:
        checker = Checker(history)
        cuts, lake = self._cuts(target), self._lake(target)
        try:
            versions = lake.versions(cuts)
            for cut in cuts:
                shown = tables_of(lake.tables_at(cuts, cut), versions, COLUMNS)
                checker.check(cut.start_ts, cut.end_ts, shown)
        except LakeError as err:
            checker.verdict.fault(err)
        committed = [mark for writer in writers for mark in writer.committed]
        verdict = checker.end(self._selected(), committed)
        applied = [datetime.fromisoformat(cut.applied_at) for cut in cuts]
        gaps = [(two - one).total_seconds() for one, two in pairwise(applied)]
        return {
            "target": target,
            "cuts": verdict.cuts,
            "rows": verdict.rows,
            "longest_standstill_s": round(max(gaps, default=0.0), 1),
            "faults": verdict.faults,
            "wrong": verdict.wrong,
            "right": verdict.faults == 0,
        }

    def _selected(self) -> Tables:
        """All tables as the server shows them now."""
        return {
            table: {
                row[0]: row
                for row in self._server.execute(
                    f"SELECT {', '.join(columns)} FROM {table}", database=DATABASE
                )
            }
            for table, columns in COLUMNS.items()
        }


def _wait(limit_s: float, what: str, probe: Any) -> bool:
    """Until it is so; where nothing is said of it, returns whether it is."""
    deadline = time.monotonic() + limit_s
    while not probe():
        if time.monotonic() > deadline:
            if what:
                raise TimeoutError(f"{what} does not come within {limit_s} s")
            return False
        time.sleep(_LOOK_S)
    return True
