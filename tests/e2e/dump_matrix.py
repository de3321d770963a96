"""A dump under churn and kill -9: `python -m tests.e2e.dump_matrix --runs N --seed S [--kills N]`.

One MariaDB, one coordinator and one capture (until it is killed) for all runs. Each run, by its own
seed S, S + 1, …: a database with some tables, writers that never rest, a changefeed, a reader,
dumps that are started, paused, resumed and begun anew, and captures that die at steps of a chunk.
When the dumps are over, all that the reader was given is held against the history of the writers
(`dump_audit`), and the end against SELECT. The last line is the result as JSON; the exit status
says whether everything was equal. One seed alone: `--runs 1 --seed S`.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from server.changefeed import keys
from server.rpc.client import connect
from storage.meta.client import open_meta
from tests.e2e.dump_audit import Audit, Verdict, commit_ts_of, timed
from tests.e2e.dump_capture import Capture, Death
from tests.e2e.dump_points import STEPS
from tests.e2e.dump_reader import Reader
from tests.e2e.dump_tables import SHAPES, Table
from tests.e2e.dump_writer import History, base_of, writers_of
from tests.integration.capture.processes import Daemon
from tests.mariadb import MariaDb, running_mariadb

_DUMP_S, _READ_S = 300.0, 300.0
_FAULTS = ("lost", "duplicated", "backwards", "wrong", "unstable", "unequal")


@dataclass
class Totals:
    """Over all runs."""

    runs: int = 0
    rows: int = 0
    brought: int = 0
    cuts: int = 0
    reader_deaths: int = 0
    reread: int = 0
    schemas: int = 0
    commands: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[int] = field(default_factory=list)
    """Seeds."""


@dataclass
class House:
    """What lives through all runs."""

    server: MariaDb
    coordinator: str
    capture: Capture

    @classmethod
    @contextmanager
    def opened(cls, directory: Path) -> Iterator["House"]:
        """Started for the block."""
        with ExitStack() as parts:
            server = parts.enter_context(running_mariadb())
            coordinator = Daemon(
                directory, "coordinator", "--metadata", f"leveldb:{directory / 'metadata'}"
            )
            parts.callback(coordinator.kill)
            address = coordinator.endpoints["coordinator"]
            capture = Capture(directory, address)
            parts.callback(capture.close)
            yield cls(server, address, capture)

    def saved_position(self, changefeed: str) -> dict[str, Any]:
        """Where the changefeed began in the log: its first saved position."""
        return asyncio.run(self._anchor(changefeed))

    async def _anchor(self, changefeed: str) -> dict[str, Any]:
        async with open_meta(f"etcd://{self.coordinator}", connect) as meta:
            found = await meta.get_prefix(keys.source(changefeed) + b"anchor/")
            saved_position: dict[str, Any] = json.loads(found[0].value)
            return saved_position

    def binlogs(self) -> list[Path]:
        """The log's files, in order."""
        return sorted((self.server.directory / "data").glob("binlog.[0-9]*"))


class Run:
    """One run, by its seed."""

    def __init__(self, house: House, seed: int, totals: Totals) -> None:
        self._house = house
        self._seed = seed
        self._dice = random.Random(seed)
        self._totals = totals
        self._name = f"run{seed}"

    def verdict(self) -> Verdict:
        """Do it; raises where a part of it does not do its work."""
        server, capture = self._house.server, self._house.capture
        database = server.database(self._name)
        history = self._history(database)
        with ExitStack() as ending:
            writers = writers_of(server, history, self._dice)
            for writer in writers:
                ending.callback(writer.stop)
            start_ts = self._created(f"{database}.*")
            saved_position = self._house.saved_position(self._name)
            reader = Reader(capture.flight, self._name, start_ts, self._dice, lambda: capture.life)
            ending.callback(reader.give_up)
            ending.callback(capture.disarm)
            self._dumps(history, reader)
            for writer in writers:
                writer.stop()
            commit_ts = commit_ts_of(saved_position, self._house.binlogs())
            reader.end_at(max(commit_ts.values()), _READ_S)
        audit = Audit(history.base, timed(history.entries, commit_ts), start_ts)
        for cut in reader.cuts:
            audit.follow(cut)
        for again in reader.again:
            audit.reread(again)
        found = audit.end(base_of(server, history.tables))
        self._count(found, reader, history)
        capture.changefeed("Remove", id=self._name)
        server.execute(f"DROP DATABASE {database}")
        return found

    def _history(self, database: str) -> History:
        """Tables, with the rows that are there before anything else."""
        server, dice = self._house.server, self._dice
        server.execute(f"SET GLOBAL log_bin_compress = {dice.choice(('ON', 'OFF'))}")
        history = History([Table(f"{database}.{name}", SHAPES[name]) for name in self._shapes()])
        server.execute(
            *(part for table in history.tables for part in (table.create(), table.fill(dice)))
        )
        history.base = base_of(server, history.tables)
        return history

    def _created(self, rule: str) -> int:
        """The changefeed; returns where it starts."""
        uri = f"{self._house.server.uri}?idle-row-ms=200"
        new = {"id": self._name, "sink_uri": "parquet:///lake", "source_uri": uri, "filter": [rule]}
        start_ts: int = self._house.capture.changefeed("Create", **new).changefeed.start_ts
        return start_ts

    def _shapes(self) -> list[str]:
        others = [name for name in SHAPES if name != "many"]
        return ["many", *self._dice.sample(others, self._dice.randint(2, 4))]

    def _deaths(self) -> list[Death]:
        """Each step comes first in its turn; others follow."""
        dice, steps = self._dice, (*STEPS, "any")
        first = steps[self._seed % len(steps)]
        chosen = [first, *dice.choices(steps, k=dice.choice((0, 0, 1, 2)))]
        return [
            (step, dice.randint(20, 1500) if step == "any" else dice.choice((1, 1, 2, 5)))
            for step in chosen
        ]

    def _dumps(self, history: History, reader: Reader) -> None:
        """Dumps in some order, while captures die; the last one is of everything, and ends."""
        dice, tables = self._dice, list(history.tables)
        history.may_alter.set()
        self._house.capture.arm(self._deaths())
        try:
            if dice.random() < 0.4:
                part = dice.sample(tables, 2)
                where = {part[0].name: "ver % 2 = 0"} if dice.random() < 0.5 else {}
                self._dump([table.name for table in part], where)
            self._dump([], {})
        except BaseException:
            reader.check()  # it may know why
            raise
        self._house.capture.disarm()

    def _dump(self, names: list[str], where: dict[str, str]) -> None:
        """One of them, from its start to its end."""
        dice = self._dice
        rate = dice.choice((0, 3000, 6000))
        options = {
            "tables": names,
            "where": where,
            "rows_per_second_max": rate,
            "parallel": dice.randint(1, 6),
        }
        self._command("Start", **options)
        for _ in range(dice.choice((0, 1, 1, 2, 3))):
            time.sleep(dice.random() * 0.6)
            verb = dice.choices(("Pause", "Resume", "Restart", "Start"), (50, 15, 25, 10))[0]
            self._command(verb, **(options if verb == "Start" else {}))
            if verb == "Pause":
                time.sleep(dice.random() * 0.4)
                assert self._status().dump.state in ("paused", "finished"), (
                    "a pause lasts until it is resumed"
                )
                self._command("Resume")
        self._wait_finished()

    def _command(self, verb: str, **options: Any) -> None:
        try:
            self._house.capture.dump(verb, self._name, **options)
        except grpc.RpcError as err:
            if err.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise
            self._totals.commands[f"{verb} refused"] += 1
        else:
            self._totals.commands[verb] += 1

    def _wait_finished(self) -> None:
        deadline = time.monotonic() + _DUMP_S
        while (status := self._status()).dump.state != "finished":
            if time.monotonic() > deadline:
                raise TimeoutError(f"the dump is not over: {status}")
            time.sleep(0.1)
        bad = [str(each) for each in status.status if each.state not in ("done", "dropped")]
        assert not bad, bad

    def _status(self) -> Any:
        return self._house.capture.dump("GetDumpStatus", self._name)

    def _count(self, found: Verdict, reader: Reader, history: History) -> None:
        totals = self._totals
        totals.rows += found.rows
        totals.brought += found.brought
        totals.cuts += len(reader.cuts)
        totals.reader_deaths += reader.deaths.total()
        totals.reread += len(reader.again)
        totals.schemas += sum(entry.schema is not None for entry in history.entries)
        totals.faults += found.counts


def run(runs: int, first_seed: int, directory: Path) -> dict[str, Any]:
    """All runs; returns the result."""
    began, totals = time.monotonic(), Totals()
    with House.opened(directory) as house:
        for seed in range(first_seed, first_seed + runs):
            run_began = time.monotonic()
            try:
                found = Run(house, seed, totals).verdict()
            except BaseException:
                print(
                    f"seed {seed} did not come to its end; see {directory}",
                    file=sys.stderr,
                    flush=True,
                )
                raise
            house.capture.check()
            totals.runs += 1
            if found.counts:
                totals.failed.append(seed)
                print("\n".join([f"seed {seed}:", *found.samples]), file=sys.stderr, flush=True)
            took, kills = round(time.monotonic() - run_began, 1), house.capture.killed.total()
            shown = {
                "seed": seed,
                "rows": found.rows,
                "brought": found.brought,
                "kills": kills,
                "seconds": took,
            }
            print(json.dumps(shown), flush=True)
        killed = house.capture.killed
    commands = totals.commands
    return {
        "runs": totals.runs,
        "seed": first_seed,
        "kills": killed.total(),
        "killed": dict(sorted(killed.items())),
        "starts": commands["Start"],
        "pauses": commands["Pause"],
        "resumes": commands["Resume"],
        "restarts": commands["Restart"],
        "refused": sum(count for verb, count in commands.items() if "refused" in verb),
        "schemas": totals.schemas,
        "reader_deaths": totals.reader_deaths,
        "reread": totals.reread,
        "cuts": totals.cuts,
        "rows": totals.rows,
        "brought": totals.brought,
        **{kind: totals.faults[kind] for kind in _FAULTS},
        "equal": not totals.faults,
        "failed": totals.failed,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--directory", type=Path, help="keeps logs; default: one that is removed again"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidemark-dumps-") as parent:
        directory = arguments.directory or Path(parent)
        directory.mkdir(parents=True, exist_ok=True)
        result = run(arguments.runs, arguments.seed, directory)
    print(json.dumps(result))
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
