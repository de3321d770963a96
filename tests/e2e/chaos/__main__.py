"""Checks in the manner of Jepsen: `python -m tests.e2e.chaos --seed N --minutes M
[--source mariadb|store] [--target delta,iceberg,memory]
[--faults kill,outage,stop,net,disk,clock]`.

A cluster of real processes (three etcd members and three coordinators, three captures, MariaDB or
a store with its GC worker, lake jobs in Spark), each in a network of its own where the kernel
allows it; writers whose transactions go over many tables; and one timeline of faults, all of it
from one seed. At last everything is whole again, and each cut of each lake is read at its own
versions, and compared with the source's history. The last line is the verdict as JSON; the exit
status says whether all was right. A run that is not leaves its directory, with lakes and logs.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.e2e.chaos import rooms
from tests.e2e.chaos.cluster import Plan, running
from tests.e2e.chaos.lakes import TARGETS
from tests.e2e.chaos.mariadb_run import MariaDbRun
from tests.e2e.chaos.store_run import StoreRun
from tests.e2e.chaos.timeline import KINDS

_SOURCES = {"mariadb": MariaDbRun, "store": StoreRun}


def run(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """One run; returns its verdict."""
    plan = Plan(
        arguments.source,
        tuple(arguments.target.split(",")),
        tuple(arguments.faults.split(",")),
        *((1, 2) if arguments.small else (3, 3)),
    )
    began_s = time.monotonic()
    with running(plan, directory) as world:
        verdict = _SOURCES[plan.source](world, random.Random(arguments.seed)).run(arguments)
        world.rooms.keep_disks = arguments.keep or not verdict["right"]
    return {
        "seed": arguments.seed,
        "source": plan.source,
        "minutes": arguments.minutes,
        "dump": arguments.dump,
        **verdict,
        "seconds": round(time.monotonic() - began_s, 1),
    }


def main() -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=2.0, help="of faults")
    parser.add_argument("--source", choices=_SOURCES, default="mariadb")
    parser.add_argument("--target", default="delta", help=f"by commas: {', '.join(TARGETS)}")
    parser.add_argument("--faults", default="kill,stop", help=f"by commas: {', '.join(KINDS)}")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between faults")
    parser.add_argument("--rate", type=float, default=40.0, help="transactions a second")
    parser.add_argument(
        "--dump", action="store_true", help="what tables hold at first comes by a dump"
    )
    parser.add_argument(
        "--small", action="store_true", help="one etcd, one coordinator, two captures"
    )
    parser.add_argument("--keep", action="store_true", help="leave the directory in any case")
    arguments = parser.parse_args()
    for name, known in ((arguments.target, TARGETS), (arguments.faults, KINDS)):
        if unknown := set(name.split(",")) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: choose of {', '.join(known)}")
    rooms.enter_namespaces()
    directory = Path(tempfile.mkdtemp(prefix="tidemark-chaos-"))
    try:
        verdict = run(arguments, directory)
    except Exception as err:  # noqa: BLE001 - a run without a verdict is not right
        traceback.print_exc()
        verdict = {"seed": arguments.seed, "error": repr(err), "right": False}
    if verdict["right"] and not arguments.keep:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        print(f"see {directory}", file=sys.stderr)
    print(json.dumps(verdict))
    return 0 if verdict["right"] else 1


if __name__ == "__main__":
    sys.exit(main())
