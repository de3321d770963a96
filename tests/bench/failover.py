"""For how long a reader waits for rows when a capture is killed that is the owner, or that only has
tables: `python -m tests.bench.failover --rounds 10`.

Three captures, a changefeed of four tables of the store, real processes, kill -9. A row of each
table is written every 20 ms. The reader asks the capture that is never killed: it is drained, and
the other two share the tables. A cut has rows of all tables, so the longest time without one is how
long the changefeed stood still. Prints one JSON line: seconds, p50, p99 and worst, by what was
killed; with few rounds p99 is the worst.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from tests.bench.log_moves import Gaps, drain
from tests.bench.table_moves import Writer
from tests.integration.capture.many_tables import Feed
from tests.integration.capture.processes import (
    Cluster,
    Daemon,
    running_cluster,
    transaction_client,
)

FLOWING_S, LOOK_S, LIMIT_S = 5.0, 0.2, 120.0
"""Rows flow again when none was missing for so long."""


def owner_of(cluster: Cluster, captures: list[Daemon]) -> Daemon:
    """The capture that owns the changefeeds, once there is one."""
    by_address = {each.endpoints["capture"]: each for each in captures}
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        for each in cluster.cli("capture", "list"):
            if each["is-owner"] and each["address"] in by_address:
                return by_address[each["address"]]
        time.sleep(LOOK_S)
    raise TimeoutError("none of the captures became owner")


def flows(gaps: Gaps, since_s: float) -> float:
    """Wait until rows flow; the longest wait since `gaps` was asked last."""
    longest_s = 0.0
    while time.monotonic() < since_s + LIMIT_S:
        time.sleep(FLOWING_S)
        now_s = gaps.longest_s()
        longest_s = max(longest_s, now_s)
        if now_s < FLOWING_S / 2:
            return longest_s
    raise TimeoutError(f"no rows for {LIMIT_S:g} s")


def is_shared(gaps: Gaps) -> bool:
    """Whether both captures serve tables, by the newest cut."""
    return len(gaps.locations) == 2


def killed(cluster: Cluster, captures: list[Daemon], gaps: Gaps, what: str) -> float:
    """Kill one of the two; how long the changefeed stood still."""
    owner = owner_of(cluster, captures)
    [other] = [each for each in captures if each is not owner]
    target = owner if what == "owner" else other
    gaps.longest_s()
    began_s = time.monotonic()
    target.kill()
    waited_s = flows(gaps, began_s)
    target.start()
    deadline_s = time.monotonic() + LIMIT_S
    while not is_shared(gaps) and time.monotonic() < deadline_s:
        time.sleep(LOOK_S)
    flows(gaps, time.monotonic())
    return waited_s


def spread(waits_s: list[float]) -> dict[str, float]:
    """What is printed of them."""
    ordered = sorted(waits_s)
    p99_s = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {
        "rounds": len(ordered),
        "p50_s": round(statistics.median(ordered), 2),
        "p99_s": round(p99_s, 2),
        "worst_s": round(ordered[-1], 2),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    waits_s: dict[str, list[float]] = {"owner": [], "capture": []}
    with (
        tempfile.TemporaryDirectory(prefix="tm-bench-") as directory,
        running_cluster(Path(directory)) as cluster,
    ):
        shared = ("--coordinator", cluster.pd, "--data-dir")
        captures = [cluster.start("capture", *shared, str(Path(directory) / name)) for name in "bc"]
        drain(cluster, cluster.capture)
        with transaction_client(cluster) as store:
            feed = Feed(cluster, store)
        writer = Writer(cluster)
        writer.start()
        gaps = Gaps(cluster, feed.start, "many")
        flows(gaps, time.monotonic())
        for _ in range(rounds):
            for what, each in waits_s.items():
                each.append(killed(cluster, captures, gaps, what))
        writer.ends = True
        writer.join()
        gaps.end()
    print(json.dumps({"bench": "failover"} | {name: spread(w) for name, w in waits_s.items()}))


if __name__ == "__main__":
    main()
