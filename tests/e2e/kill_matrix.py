"""Exactly-once under kill -9: `python -m tests.e2e.kill_matrix --target T --kills N --seed S [--age
CUTS] [--write spark]`.

A real cluster (`tidemark up`) and a bank whose tellers never rest; the lake job is killed N times,
each time at a seeded step of a seeded cut or by the loss of a process beside it (a source worker of
Spark, the capture, a topic's broker). At last the tellers stop, the job runs to the store's newest
commit_ts, and every row of the lake is compared with the store at exactly that cut. With `--age`,
the lake first grows old: so many cuts in several lives that end by SIGTERM. The last line is the
result as JSON, with the longest time without a new cut from the first kill on; the exit status says
whether the lake is equal. A run that fails leaves its directory, with lake and logs, for whoever
looks for the cause.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tidemarkpb.v1 import changefeed_pb2 as pb

from server.demo import bank as tables
from server.demo.bank import Bank
from server.demo.client import connect
from server.demo.cluster import Cluster
from server.demo.lake import ensure_changefeed
from server.demo.workload import Tally, Teller, open_accounts
from storage.model.ts import physical_ms
from tests.e2e.kill_points import STEPS, STEPS_OF, STEPS_OF_TASKS, WAYS
from tests.e2e.kill_target import TARGETS, Lake, opened

_ACCOUNTS, _TELLERS, _CLIENT = 60, 2, "own"
_AGING_LIVES, _AGING_S = 4, 3600.0
_LIFE_S, _END_S = 180.0, 800.0
_OUTAGES, _OUTAGE_WITHIN_S = 0.4, 30.0
_CHANGEFEED = "bank"
_LOG_TOLD_CHARACTERS = 6000


@dataclass
class Matrix:
    """One run: its lake, its dice, and what was killed so far."""

    lake: Lake
    cluster: Cluster
    directory: Path
    dice: random.Random
    rate: float
    steps: tuple[str, ...] = STEPS
    age: int = 0
    write: str = "auto"
    killed: Counter[str] = field(default_factory=Counter)
    lives: int = 0
    bank: Bank = field(default_factory=partial(Bank, _ACCOUNTS))
    equal: bool = False
    """The lake was compared with the store, and is equal to it."""

    async def run(self, kills: int) -> dict[str, Any]:
        """Kill that often, then compare; returns the result."""
        await self.open_bank()
        async with self.tellers():
            await self.grow_old()
            began = datetime.now(UTC)
            while self.killed.total() < kills:
                await self._life()
        compared = await self.compare()
        applied = [datetime.fromisoformat(cut.applied_at) for cut in self.lake.cuts(_CHANGEFEED)]
        since = [at for at in applied if at >= began]
        return {
            "age": self.age,
            "cuts": len(applied),
            "longest_standstill_s": round(
                max((two - one).total_seconds() for one, two in pairwise([began, *since])), 1
            ),
            "kills": self.killed.total(),
            "killed": dict(sorted(self.killed.items())),
            "lives": self.lives,
            **compared,
        }

    async def compare(self) -> dict[str, Any]:
        """Bring the lake to the store's newest commit_ts, and compare all rows."""
        async with connect(_CLIENT, self.cluster.endpoints["coordinator"]) as client:
            end_ts = await client.now()
            await self.finish(end_ts)
            names = {
                name: [column.name for column in info.columns] for name, info in _infos().items()
            }
            found = await asyncio.to_thread(self.lake.rows, names)
            lost = duplicated = 0
            for name, span in tables.SPANS.items():
                held = [
                    tables.values(key, row)
                    for key, row in (await client.scan(*_bounds(span), end_ts)).items()
                ]
                lost += sum((Counter(held) - Counter(found[name])).values())
                duplicated += sum((Counter(found[name]) - Counter(held)).values())
        self.equal = lost == duplicated == 0
        rows = sum(len(rows) for rows in found.values())
        return {"rows": rows, "lost": lost, "duplicated": duplicated, "equal": self.equal}

    async def open_bank(self) -> None:
        """Give each account what it begins with."""
        async with connect(_CLIENT, self.cluster.endpoints["coordinator"]) as client:
            await open_accounts(self.bank, client)

    @asynccontextmanager
    async def tellers(self) -> AsyncIterator[None]:
        """Tellers that never rest, for the block."""
        async with asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(self._teller(number)) for number in range(_TELLERS)]
            yield
            for task in working:
                task.cancel()

    async def grow_old(self) -> None:
        """Lives of a driver that end as they should,
        until the lake has as many cuts as it is to be old.
        """
        async with asyncio.timeout(_AGING_S):
            while len(self.lake.cuts(_CHANGEFEED)) < self.age:
                process = await self.start("never", 0, 0, "driver")
                await self.lines(process, -(-self.age // _AGING_LIVES))
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                await self.lines(process, None)
                status = await process.wait()
                if status not in (0, 75):
                    raise RuntimeError(
                        f"an aging job ended with status {status}; see {self.directory}/job.log"
                    )
                await bury(process)

    async def _life(self) -> None:
        """One driver, from its start to its death."""
        step, cut, delay_ms = (
            self.dice.choice(self.steps),
            self.dice.randint(1, 4),
            self.dice.randint(1, 900),
        )
        beside = [self.dice.random() < share for share in (0.5, 0.25, 0.15)]
        way = self.dice.choices(WAYS, (7, 1))[0]
        if self.dice.random() < 0.1:
            shutil.rmtree(
                self._checkpoint / "query", ignore_errors=True
            )  # as a lost checkpoint directory
        process = await self.start(step, cut, delay_ms, way)
        async with asyncio.TaskGroup() as tasks:
            accident = tasks.create_task(self._accidents(process, *beside))
            outage = tasks.create_task(self._outage())
            try:
                async with asyncio.timeout(_LIFE_S):
                    status = await process.wait()
            except TimeoutError:
                step, status = "late", -signal.SIGKILL
            accident.cancel()
            await outage
        await bury(process)
        if status == -signal.SIGKILL:
            self.killed[f"driver at {step}"] += 1
        elif status != 75:  # EX_TEMPFAIL: a source worker's or the capture's death ended it
            raise RuntimeError(f"the job ended with status {status}; see {self.directory}/job.log")
        self._show()

    async def _accidents(self, process: Process, capture: bool, again: bool, worker: bool) -> None:
        """What happens to the others during a driver's life; with these dice,
        and at its first cuts.
        """
        for happens, kind in ((capture, "capture"), (worker, "source worker"), (again, "capture")):
            if happens and await self.lines(process, 1):
                self._kill(process.pid if kind == "source worker" else self.cluster_pid, kind)

    async def _outage(self) -> None:
        """The broker of a topic is killed at a random time in some lives, and comes back."""
        if self.lake.broker is None or self.dice.random() > _OUTAGES:
            return
        await asyncio.sleep(self.dice.uniform(0, _OUTAGE_WITHIN_S))
        self.lake.broker.kill()
        self.killed["broker"] += 1
        await asyncio.to_thread(self.lake.broker.start)

    def _kill(self, root: int, kind: str) -> None:
        mark = "capture" if kind == "capture" else "pyspark"
        found = [
            pid for pid in descendants(root) if mark in command(pid) and "java" not in command(pid)
        ]
        chosen = [
            pid for pid in found if kind != "capture" or command(pid).split()[3:4] == ["capture"]
        ]
        if chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.dice.choice(sorted(chosen)), signal.SIGKILL)
                self.killed[kind] += 1

    async def finish(self, end_ts: int) -> None:
        """Drivers without planned death until the lake is at `end_ts`."""
        async with asyncio.timeout(_END_S):
            while True:
                process = await self.start("never", 0, 0, "driver", "--until-ts", str(end_ts))
                await self.lines(process, None)
                if await process.wait() == 0:
                    return
                await bury(process)

    @staticmethod
    async def lines(process: Process, count: int | None) -> bool:
        """Read so many of the job's lines about cuts (None: all there are)."""
        assert process.stdout is not None
        while count is None or count > 0:
            line = await process.stdout.readline()
            if not line:
                return False
            if count is not None and b"end_ts" in line:
                count -= 1
        return True

    async def start(self, step: str, cut: int, delay_ms: int, way: str, *more: str) -> Process:
        self.lives += 1
        flight = self.cluster.endpoints["flight"]
        arguments = [
            step,
            str(cut),
            str(delay_ms),
            way,
            "--follow-parent",
            "--endpoint",
            f"grpc://{flight}",
        ]
        arguments += [
            "--changefeed",
            _CHANGEFEED,
            "--target",
            self.lake.uri,
            "--trigger",
            "0 seconds",
        ]
        arguments += ["--checkpoint-dir", str(self._checkpoint), "--compact-every", "8"]
        arguments += ["--write", self.write, *more]
        with (self.directory / "job.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.e2e.kill_points", *arguments),
                stdin=PIPE, stdout=PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip

    async def _teller(self, number: int) -> None:
        async with connect(_CLIENT, self.cluster.endpoints["coordinator"]) as client:
            first = (physical_ms(await client.now()) << 14) + (number << 30)
            await Teller(self.bank, client, self.dice.getrandbits(32), first, Tally()).work(
                1 << 30, _TELLERS / self.rate
            )

    @property
    def _checkpoint(self) -> Path:
        return self.directory / "checkpoint"

    @property
    def cluster_pid(self) -> int:
        assert self.cluster._process is not None
        return self.cluster._process.pid

    def _show(self) -> None:
        print(
            json.dumps({"kills": self.killed.total(), **self.killed}), file=sys.stderr, flush=True
        )


async def bury(process: Process) -> None:
    """The driver's JVM and workers die with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def command(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def _infos() -> dict[str, Any]:
    return {f"{tables.SCHEMA}.{info.name}": info for info in tables.TABLES.values()}


def _bounds(span: Any) -> tuple[bytes, bytes]:
    return span.start_key, span.end_key


@asynccontextmanager
async def laid_out(
    arguments: argparse.Namespace, steps: tuple[str, ...] = STEPS, age: int = 0
) -> AsyncIterator[Matrix]:
    """A cluster, its changefeed and an empty lake,
    in a directory of their own that stays unless the lake is equal.
    """
    directory = Path(tempfile.mkdtemp(prefix="tidemark-kills-"))
    (directory / "logs").mkdir()
    with logs_told(directory), opened(arguments.target, directory) as lake:
        async with Cluster.started(directory, any_ports=True) as cluster:
            await ensure_changefeed(cluster.endpoints["capture"], _CHANGEFEED, lake.uri, _wanted())
            matrix = Matrix(
                lake, cluster, directory, random.Random(arguments.seed), arguments.rate, steps, age
            )
            yield matrix
    if matrix.equal:
        shutil.rmtree(directory)


@contextmanager
def logs_told(directory: Path) -> Iterator[None]:
    """Print how the logs end if the block fails, wherever it does: there may be no job yet, and
    what is not there must not hide the error.
    """
    try:
        yield
    except BaseException:
        for log in sorted([*directory.glob("*.log"), *directory.glob("logs/*")]):
            if log.is_file():
                told = log.read_text(errors="replace")[-_LOG_TOLD_CHARACTERS:]
                print(f"--- {log}\n{told}", file=sys.stderr)
        raise


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run of the matrix."""
    began = time.monotonic()
    steps = STEPS_OF.get(arguments.target, STEPS)
    steps += STEPS_OF_TASKS if arguments.write == "spark" else ()
    async with laid_out(arguments, steps, arguments.age) as matrix:
        matrix.write = arguments.write
        result = await matrix.run(arguments.kills)
    seconds = round(time.monotonic() - began, 1)
    return {
        "target": arguments.target,
        "write": arguments.write,
        **result,
        "seed": arguments.seed,
        "seconds": seconds,
    }


def _wanted() -> list[pb.Table]:
    return [
        pb.Table(schema_name=tables.SCHEMA, table_info_json=info.to_json())
        for info in tables.TABLES.values()
    ]


def main() -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--age", type=int, default=0, help="cuts that the lake has before the first kill"
    )
    parser.add_argument(
        "--write", default="auto", help="who writes the rows: auto, driver or spark"
    )
    parser.add_argument(
        "--rate", type=float, default=10.0, help="transfers a second, all tellers together"
    )
    result = asyncio.run(run(parser.parse_args()))
    print(json.dumps(result))
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
