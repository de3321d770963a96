"""For how long a reader waits for rows when tables of the cluster move between captures:
`python -m tests.bench.table_moves --rounds 5`.

Two captures share a changefeed of four tables, real processes; a row of each is written every 20
ms. Then a third capture joins, a table is moved by hand, and the third one is drained. The longest
time in which the reader got no row counts.
Prints one JSON line: seconds, median and worst, by what happened; `nothing` is what a reader waits
anyway.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from storage.tidb.record import encode_record
from tests.bench.log_moves import Gaps, drain
from tests.integration.capture.many_tables import NAMES, TABLES, Feed
from tests.integration.capture.processes import (
    Cluster,
    Daemon,
    running_cluster,
    transaction_client,
)

WRITE_S, QUIET_S, LIMIT_S = 0.02, 5.0, 60.0


class Writer(threading.Thread):
    """Commits a row of each table again and again."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self.ends = False
        self._cluster = cluster

    def run(self) -> None:
        number = 0
        with transaction_client(self._cluster) as store:
            while not self.ends:
                number += 1
                transaction = store.begin(pessimistic=False)
                for table in TABLES:
                    transaction.put(*encode_record(table, {"id": number % 100, "v": number}))
                transaction.commit()
                time.sleep(WRITE_S)


class Moves:
    """What can be done to the tables of a cluster, each time with the wait that it costs."""

    def __init__(self, cluster: Cluster, directory: Path, gaps: Gaps) -> None:
        self._cluster, self._directory, self._gaps = cluster, directory, gaps
        self._joined = 0
        self._third: Daemon | None = None

    def nothing(self) -> float:
        """Let it be."""
        return self._measured(lambda: None, lambda: True)

    def join(self) -> float:
        """One more capture."""
        self._joined += 1

        def start() -> None:
            data = str(self._directory / f"third-{self._joined}")
            flags = ("--coordinator", self._cluster.pd, "--data-dir", data)
            self._third = self._cluster.start("capture", *flags)

        return self._measured(start, lambda: len(self._captures()) == 3)

    def move(self) -> float:
        """A table, by hand; without the command it takes no time."""
        captures = {each["id"] for each in self._cluster.cli("capture", "list")}

        def move() -> None:
            target = min(captures - {self._captures_of()[NAMES[0]]})
            self._cluster.cli(
                *("changefeed", "move-table", "-c", "many", "--table", NAMES[0], "--to", target)
            )

        return self._measured(move, lambda: True)

    def drain(self) -> float:
        """The third capture, which then ends."""
        third = self._third
        assert third is not None
        waited_s = self._measured(lambda: drain(self._cluster, third), self._are_two)
        third.terminate()
        return waited_s

    def _are_two(self) -> bool:
        parts = {name for name in self._captures_of().values() if name}
        return len(parts or self._captures()) == 2

    def _captures_of(self) -> dict[str, str]:
        tables = self._cluster.cli("changefeed", "query", "-c", "many")["tables"]
        return {each["table"]: each.get("capture", "") for each in tables}

    def _captures(self) -> set[str]:
        """Those that serve tables, by the plan of a reader."""
        return self._gaps.locations

    def _measured(self, act: Callable[[], object], done: Callable[[], bool]) -> float:
        time.sleep(QUIET_S)
        self._gaps.longest_s()
        act()
        deadline = time.monotonic() + LIMIT_S
        while not done() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(QUIET_S)
        return self._gaps.longest_s()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    waits_s: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="tm-bench-") as directory,
        running_cluster(Path(directory)) as cluster,
    ):
        cluster.another_capture()
        with transaction_client(cluster) as store:
            feed = Feed(cluster, store)
        writer = Writer(cluster)
        writer.start()
        gaps = Gaps(cluster, feed.start, "many")
        moves = Moves(cluster, Path(directory), gaps)
        time.sleep(4 * QUIET_S)
        for _ in range(rounds):
            for what in ("nothing", "join", "move", "drain"):
                waits_s.setdefault(what, []).append(getattr(moves, what)())
        writer.ends = True
        writer.join()
        gaps.end()
    result = {
        what: {
            "rounds": len(each),
            "median_s": round(statistics.median(each), 2),
            "worst_s": round(max(each), 2),
        }
        for what, each in waits_s.items()
    }
    print(json.dumps({"bench": "table_moves"} | result))


if __name__ == "__main__":
    main()
