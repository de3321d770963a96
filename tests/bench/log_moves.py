"""For how long the reader of a MySQL changefeed waits when its capture dies, hangs, or is drained,
and when the owner does: `python -m tests.bench.log_moves --rounds 10`.

Four captures, one changefeed of a MariaDB, real processes. A row is written every 20 ms. A reader
asks one capture for cuts, which is drained and left alone, and the longest time without a new row
counts.
Prints one JSON line: seconds, median and worst, by what happened.
"""

import argparse
import json
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.integration.capture.processes import Cluster, Daemon, Reader, patiently, running_cluster
from tests.mariadb import MariaDb, running_mariadb

WRITE_S, SETTLE_S, LEASE_S = 0.02, 3.0, 17.0
FEED = "moves"


class Gaps:
    """A reader, which remembers the longest time in which it got no row."""

    def __init__(self, cluster: Cluster, start_ts: int, changefeed: str = FEED) -> None:
        self._reader = Reader(cluster, changefeed)
        self._at_ts, self._ends = start_ts, False
        self.locations: set[str] = set()
        """Where the rows of the newest cut are served."""
        self._got_s, self._longest_s = time.monotonic(), 0.0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def longest_s(self) -> float:
        """Since this was asked last."""
        longest_s = max(self._longest_s, time.monotonic() - self._got_s)
        self._longest_s = 0.0
        return longest_s

    def end(self) -> None:
        """Read no more."""
        self._ends = True
        self._thread.join()

    def _read(self) -> None:
        while not self._ends:
            patiently(self._cut)

    def _cut(self) -> None:
        end_ts = self._reader.ask("latest", start=self._at_ts, wait_ms=200)["ts"]
        if end_ts <= self._at_ts:
            return
        slices = self._reader.ask("plan", start=self._at_ts, end=end_ts)["slices"]
        if slices:
            self.locations = {each["locations"][0] for each in slices}
            now_s = time.monotonic()
            self._longest_s, self._got_s = max(self._longest_s, now_s - self._got_s), now_s
        self._reader.ask("ack", ts=end_ts)
        self._at_ts = end_ts


class Writer(threading.Thread):
    """Commits a row again and again."""

    def __init__(self, server: MariaDb) -> None:
        super().__init__(daemon=True)
        self.ends = False
        self._server = server

    def run(self) -> None:
        number = 0
        with self._server.connect("shop") as connection, connection.cursor() as cursor:
            while not self.ends:
                number += 1
                cursor.execute(f"INSERT INTO t VALUES ({number})")
                connection.commit()
                time.sleep(WRITE_S)


def where(cluster: Cluster, captures: list[Daemon]) -> tuple[Daemon, Daemon]:
    """The capture that runs the changefeed, and the owner."""
    listed = {each["id"]: each for each in cluster.cli("capture", "list")}
    by_address = {each.endpoints["capture"]: each for each in captures}
    maintainer = cluster.cli("changefeed", "query", "-c", FEED)["maintainer"]
    owner = next(each for each in listed.values() if each["is-owner"])
    return by_address[listed[maintainer]["address"]], by_address[owner["address"]]


def drain(cluster: Cluster, capture: Daemon) -> str:
    """Take all work from it; returns its id."""
    ids = {each["address"]: each["id"] for each in cluster.cli("capture", "list")}
    drained: str = ids[capture.endpoints["capture"]]
    cluster.cli("capture", "drain", drained, "--wait", "30s")
    return drained


def measured(cluster: Cluster, captures: list[Daemon], gaps: Gaps, what: str) -> float:
    """Do it once; the longest wait."""
    maintainer, owner = where(cluster, captures)
    while owner is maintainer:
        cluster.cli("capture", "resign")
        time.sleep(SETTLE_S)
        maintainer, owner = where(cluster, captures)
    target = owner if what == "kill owner" else maintainer
    gaps.longest_s()
    if what.startswith("kill"):
        target.kill()
        time.sleep(LEASE_S + SETTLE_S)
        longest_s = gaps.longest_s()
        target.start()
    elif what == "hang maintainer":
        target.process.send_signal(signal.SIGSTOP)
        time.sleep(LEASE_S + SETTLE_S)
        longest_s = gaps.longest_s()
        target.process.send_signal(signal.SIGCONT)
    else:
        drained = drain(cluster, target)
        time.sleep(SETTLE_S)
        longest_s = gaps.longest_s()
        cluster.cli("capture", "drain", drained, "--cancel")
    time.sleep(SETTLE_S)
    return longest_s


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    seen: dict[str, list[float]] = {
        what: []
        for what in ("kill maintainer", "hang maintainer", "drain maintainer", "kill owner")
    }
    with (
        tempfile.TemporaryDirectory(prefix="tm-bench-") as directory,
        running_mariadb() as server,
        running_cluster(Path(directory)) as cluster,
    ):
        shared = ("--coordinator", cluster.pd, "--data-dir")
        captures = [cluster.capture] + [
            cluster.start("capture", *shared, str(Path(directory) / name)) for name in "bcd"
        ]
        drain(cluster, cluster.capture)
        server.execute("CREATE DATABASE shop", "CREATE TABLE shop.t (id INT PRIMARY KEY)")
        made: Any = cluster.cli(
            *("changefeed", "create", "-c", FEED, "--sink-uri", "flight://"),
            *("--source-uri", f"{server.uri}?idle-row-ms=200", "--filter", "shop.*"),
        )
        writer = Writer(server)
        writer.start()
        gaps = Gaps(cluster, int(made["checkpoint_tso"]))
        time.sleep(SETTLE_S)
        for _ in range(rounds):
            for what, waits_s in seen.items():
                waits_s.append(measured(cluster, captures, gaps, what))
        writer.ends = True
        gaps.end()
    result = {
        what: {
            "rounds": len(waits_s),
            "median_s": round(statistics.median(waits_s), 2),
            "worst_s": round(max(waits_s), 2),
        }
        for what, waits_s in seen.items()
        if waits_s
    }
    print(json.dumps({"bench": "log_moves"} | result))


if __name__ == "__main__":
    main()
