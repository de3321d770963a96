"""How long nobody answers when a leader goes: `python -m tests.bench.takeover --rounds N --fault
kill|stop|term`.

Three coordinators, one etcd, the callers of the fault tests as load. Each round takes the leader
away and measures the longest time without a timestamp received; the history of all rounds is
checked. Prints one JSON line.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.integration.coordinator.clusters import Cluster, in_thread, running_cluster
from tests.integration.coordinator.load import Load, load_on
from tests.integration.coordinator.processes import Coordinator

FAULTS: dict[str, Callable[[Coordinator], None]] = {
    "kill": Coordinator.kill,
    "term": lambda leader: leader.send(signal.SIGTERM),
    "stop": lambda leader: leader.send(signal.SIGSTOP),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--fault", choices=FAULTS, default="kill")
    parser.add_argument("--lease", type=int, default=3)
    parser.add_argument("--seed", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(asyncio.run(_measured(Path(directory), arguments))))


async def _measured(directory: Path, arguments: argparse.Namespace) -> dict[str, object]:
    rng = random.Random(arguments.seed)
    flags = ("--leader-lease", str(arguments.lease))
    silences: list[float] = []
    with running_cluster(directory, flags=flags) as cluster:
        async with load_on(cluster.addresses, arguments.seed) as load:
            for _ in range(arguments.rounds):
                await asyncio.sleep(
                    rng.uniform(0, 1)
                )  # any point between two renewals of the lease
                silences.append(await _round(cluster, load, FAULTS[arguments.fault]))
    return {
        "name": "takeover",
        "fault": arguments.fault,
        "lease_s": arguments.lease,
        "rounds": arguments.rounds,
        "median_s": round(statistics.median(silences), 2),
        "max_s": round(max(silences), 2),
        "answers_checked": len(load.tsos) + len(load.safe_points),
    }


async def _round(cluster: Cluster, load: Load, fault: Callable[[Coordinator], None]) -> float:
    leader = await in_thread(cluster.leader)
    began_s = time.monotonic()
    await in_thread(fault, leader)
    await load.goes_on()
    silence_s = load.longest_silence_s(began_s)
    leader.kill()
    await in_thread(cluster.heal)
    return silence_s


if __name__ == "__main__":
    main()
