"""`python -m tests.sim`: simulate clusters, by their seeds."""

import argparse
import asyncio
import hashlib
import logging
import os
import random
import sys
import time

import structlog

from tests.sim.checks import Checks
from tests.sim.clock import simulated
from tests.sim.cluster import HARM, Cluster
from tests.sim.plants import PLANTS, planted
from tests.sim.process import task_factory

_STEPS = 8
_CALM_S = (0.2, 4.0)
_HARM_ENDS_S = 240.0
"""Captures come back within seconds; what was asked of them, such as a pause, is done by then."""


async def live(seed: int, *, explains: bool) -> str:
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
    async with asyncio.TaskGroup() as tasks:
        cluster = Cluster(chance, tell)
        running = [
            tasks.create_task(cluster.server.run()),
            tasks.create_task(cluster.server.run_expiry()),
        ]
        await cluster.start()
        checks = Checks(cluster)
        running += [tasks.create_task(each.run()) for each in cluster.readers.values()]
        checking = tasks.create_task(checks.run())
        writing = tasks.create_task(_write(cluster))
        async with asyncio.timeout(_HARM_ENDS_S), asyncio.TaskGroup() as harms:
            for _ in range(_STEPS):
                await cluster.pause(*_CALM_S)
                harms.create_task(getattr(cluster, chance.choice(HARM))())
        writing.cancel()
        tell("calm")
        await checks.end()
        checking.cancel()
        for capture in cluster.alive():
            await capture.kill()
        for task in running:
            task.cancel()
    rows = sum(len(each.rows) for each in cluster.readers.values())
    return f"{rows} rows, {loop.time() - begun_s:.6f} s"


async def _write(cluster: Cluster) -> None:
    while True:
        await cluster.pause(0.01, 0.5)
        cluster.logs[cluster.chance.choice(list(cluster.logs))].write()


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
        try:
            with planted(chosen.plant):
                end = simulated(live(seed, explains=chosen.explain))
            story.update(end.encode())
        except BaseException as err:
            print(f"seed {seed}: {_first(err)!r}", flush=True)
            if chosen.explain:
                raise
            return 1
    took_s = time.monotonic() - begun_s
    digest = story.hexdigest()[:8]
    print(f"{chosen.seeds} seeds from {chosen.seed}, story {digest}, in {took_s:.1f} s")
    return 0


def _first(err: BaseException) -> BaseException:
    while isinstance(err, BaseExceptionGroup):
        err = err.exceptions[0]
    return err


if __name__ == "__main__":
    sys.exit(main())
