"""A long quiet life: `python -m tests.e2e.soak --target T --minutes 30 --restart-every 300`.

A real cluster, a bank whose tellers write all the time, and a lake job. Every few minutes all is
restarted, by SIGTERM and by kill -9 in turn. At the end every row of the lake is compared with the
store. The last line is the result as JSON: for each process the memory, open files and threads that
it had at most in each life, so that what grows with the lake's age is seen; the exit status says
whether the lake is equal.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from asyncio.subprocess import Process
from collections import defaultdict
from pathlib import Path
from typing import Any

from server.process import drain
from tests.e2e.kill_matrix import Matrix, bury, command, descendants, laid_out
from tests.e2e.kill_target import TARGETS

_SAMPLE_S, _STOP_S = 5.0, 60.0
_PAGE_MIB = 4096 / (1 << 20)
Peaks = dict[str, dict[str, list[int]]]
"""Of each process, by measure: the most that was seen in each life."""


class Soak:
    """Lives of a cluster and its lake job, one after another."""

    def __init__(self, matrix: Matrix, life_s: float) -> None:
        self._matrix = matrix
        self._life_s = life_s
        self._peaks: Peaks = defaultdict(lambda: defaultdict(list))
        self._cuts: list[int] = []

    async def run(self, lives: int) -> dict[str, Any]:
        """Live that often, then compare; returns the result."""
        await self._matrix.open_bank()
        for life in range(lives):
            if life:
                await self._matrix.cluster.start()
            await self._life(gentle=life % 2 == 0)
            print(json.dumps(self._told()), file=sys.stderr, flush=True)
        await self._matrix.cluster.start()
        return {**self._told(), **await self._matrix.compare()}

    async def _life(self, *, gentle: bool) -> None:
        job = await self._matrix.start("never", 0, 0, "driver")
        async with asyncio.TaskGroup() as tasks:
            cuts = tasks.create_task(_cuts(job))
            async with self._matrix.tellers():
                await self._watch(job)
            if gentle:
                await drain(job, _STOP_S)
            await bury(job)
        self._cuts.append(cuts.result())
        await (self._matrix.cluster.stop() if gentle else self._matrix.cluster.kill())

    async def _watch(self, job: Process) -> None:
        """Look at all processes until the life is over."""
        until_s = time.monotonic() + self._life_s
        peaks: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        while (left_s := until_s - time.monotonic()) > 0:
            if job.returncode is not None:
                raise RuntimeError(
                    f"the job ended with status {job.returncode}; see "
                    f"{self._matrix.directory}/job.log"
                )
            for pid in [*descendants(self._matrix.cluster_pid), job.pid, *descendants(job.pid)]:
                name = _name(command(pid))
                for measure, value in _measured(pid).items():
                    peaks[name][measure] = max(peaks[name][measure], value)
            await asyncio.sleep(min(_SAMPLE_S, left_s))
        for name, measures in peaks.items():
            for measure, value in measures.items():
                self._peaks[name][measure].append(value)

    def _told(self) -> dict[str, Any]:
        return {"cuts": self._cuts, "peaks": self._peaks}


async def _cuts(job: Process) -> int:
    """How many cuts the job tells of, up to its end."""
    assert job.stdout is not None
    return sum([b'"end_ts"' in line async for line in job.stdout])


def _name(words: str) -> str:
    """What a process is called in the result."""
    if "java" in words.split(" ", maxsplit=1)[0]:
        return "jvm"
    for name in ("coordinator", "store", "capture", "pump", "gc-worker"):
        if name in words.split(" "):
            return name
    return "lake job" if "kill_points" in words else "source worker"


def _measured(pid: int) -> dict[str, int]:
    with contextlib.suppress(OSError, IndexError):
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return {
            "rss_mib": round(resident * _PAGE_MIB),
            "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
            "threads": len(list(Path(f"/proc/{pid}/task").iterdir())),
        }
    return {}


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """One soak."""
    async with laid_out(arguments) as matrix:
        lives = max(1, round(arguments.minutes * 60 / arguments.restart_every))
        result = await Soak(matrix, arguments.restart_every).run(lives)
    return {
        "target": arguments.target,
        "minutes": arguments.minutes,
        **result,
        "seed": arguments.seed,
    }


def main() -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, default="delta")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--restart-every", type=float, default=300.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--rate", type=float, default=10.0, help="transfers a second, all tellers together"
    )
    result = asyncio.run(run(parser.parse_args()))
    print(json.dumps(result))
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
