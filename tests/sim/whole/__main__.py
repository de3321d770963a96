"""`python -m tests.sim.whole`: simulate whole clusters, by their seeds."""

import argparse
import asyncio
import contextlib
import hashlib
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import structlog

from tests.sim.clock import simulated
from tests.sim.process import task_factory
from tests.sim.whole.checks import Checks
from tests.sim.whole.cluster import FEED, HARM, LIMITED, Cluster
from tests.sim.whole.lake import Lake
from tests.sim.whole.plants import PLANTS, planted
from tests.sim.whole.seams import installed

_STEPS = 10
_CALM_S = (0.2, 3.5)
_HARM_ENDS_S = 300.0


async def live(seed: int, directory: Path, *, explains: bool) -> str:
    """One cluster, from its start to its end; returns what it came to.

    Raises:
        BrokenError: what must hold does not.
    """
    loop = asyncio.get_running_loop()
    loop.set_task_factory(task_factory)
    begun_s = loop.time()

    def tell(what: str) -> None:
        if explains:
            print(f"{loop.time() - begun_s:8.2f} {what}")

    chance = random.Random(seed)
    random.seed(seed)  # pauses are jittered by it
    cluster = Cluster(chance, directory, tell)
    checks = Checks(cluster)
    for feed in (FEED, LIMITED):
        cluster.lakes[feed] = Lake(feed, cluster.captures, chance, checks.committed)
    lake = cluster.lakes[FEED]
    with _names_by_seed(seed), installed(cluster, cluster.defects):
        async with asyncio.TaskGroup() as tasks:
            await cluster.start(tasks)
            tell("started")
            reading = tasks.create_task(lake.run(checks.at))
            limited = tasks.create_task(_read_limited(cluster, checks))
            checking = tasks.create_task(checks.run())
            async with asyncio.timeout(_HARM_ENDS_S), asyncio.TaskGroup() as harms:
                for _ in range(_STEPS):
                    await cluster.pause(*_CALM_S)
                    harms.create_task(getattr(cluster, chance.choice(HARM))())
            tell("calm")
            for process in cluster.clients.values():
                await process.kill()
            await checks.end()
            checking.cancel()
            for machine in cluster.machines.values():
                if machine.is_up:
                    await machine.kill(with_power=True)
            reading.cancel()
            limited.cancel()
            await cluster.metadata.stop(chance)
    committed = sum(bool(txn.commit_ts) for txn in cluster.history.txns)
    tell(f"ended by themselves: {[each.ends for each in cluster.machines.values() if each.ends]}")
    return (
        f"{committed} transactions, {lake.cuts} cuts, {lake.looks_back} looks back, {cluster.dumped_rows} rows dumped, "
        f"{cluster.net.calls} calls, "
        f"{loop.time() - begun_s:.6f} s, {cluster.trace.hexdigest()[:16]}"
    )


async def _read_limited(cluster: Cluster, checks: Checks) -> None:
    await cluster.has_target.wait()
    await cluster.lakes[LIMITED].run(checks.at)


@contextlib.contextmanager
def _names_by_seed(seed: int) -> Iterator[None]:
    """Let what is named at random have the same names each time the seed is simulated."""
    bits = random.Random(seed).getrandbits
    with (
        patch("secrets.randbits", bits),
        patch("uuid.uuid4", lambda: uuid.UUID(int=bits(128), version=4)),
    ):
        yield


def main() -> int:
    """Simulate the seeds; 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--plant", default="", choices=("", *PLANTS), help="a bug in the product")
    parser.add_argument("--explain", action="store_true", help="tell what happens")
    chosen = parser.parse_args()
    # Sets of names are walked in the order of their hashes.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [*sys.orig_argv], os.environ | {"PYTHONHASHSEED": "0"})
    if not chosen.explain:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    begun_s, story = time.monotonic(), hashlib.sha256()
    for seed in range(chosen.seed, chosen.seed + chosen.seeds):
        directory = Path(tempfile.mkdtemp(prefix="tidemark-sim-", dir=_memory()))
        try:
            chance = random.Random(-seed)
            with planted(chosen.plant):
                end = simulated(live(seed, directory, explains=chosen.explain), chance)
            story.update(end.encode())
            if chosen.explain:
                print(end)
        except BaseException as err:
            print(f"seed {seed}: {_first(err)!r}", flush=True)
            if chosen.explain:
                raise
            return 1
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    took_s = time.monotonic() - begun_s
    digest = story.hexdigest()[:8]
    print(f"{chosen.seeds} seeds from {chosen.seed}, story {digest}, in {took_s:.1f} s")
    return 0


def _memory() -> str | None:
    """Where files lie in memory, if there is such a place."""
    with contextlib.suppress(OSError):
        if os.access("/dev/shm", os.W_OK):
            return "/dev/shm"
    return None


def _first(err: BaseException) -> BaseException:
    while isinstance(err, BaseExceptionGroup):
        err = err.exceptions[0]
    return err


if __name__ == "__main__":
    sys.exit(main())
