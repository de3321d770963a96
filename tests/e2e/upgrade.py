"""A cluster of an earlier commit, with its data, goes on with the daemons of this one:
`python -m tests.e2e.upgrade --base COMMIT`.

Daemons and lake jobs of `COMMIT` are started, and are replaced one kind after the other, in the
order of docs/operations.md, while rows are written and a reader follows. At the end the reader has
each row once, in order, and each lake equals its source. Prints one line of JSON for each step.

It needs the repository's history, so it is no test of CI.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.integration.capture.many_tables import Feed, Follower
from tests.integration.capture.processes import (
    LOOPBACK,
    Cluster,
    Daemon,
    transaction_client,
)
from tests.mariadb import MariaDb, running_mariadb
from tests.split_keys import FIRST_REGIONS

HERE = Path(__file__).resolve().parents[2]
FORMATS = ("delta", "iceberg", "parquet")
_PATIENCE_S = 600


class Build:
    """The source tree of one commit, run by this environment's Python."""

    def __init__(self, root: Path) -> None:
        self.root = root
        parts = (root, root / "proto" / "gen", root / "sink" / "spark")
        self.environment = os.environ | {"PYTHONPATH": ":".join(map(str, parts))}

    def start(self, *arguments: str, **streams: Any) -> subprocess.Popen[bytes]:
        """`tidemark …` of this build."""
        command = [sys.executable, "-m", "server.cli.main", *arguments]
        return subprocess.Popen(command, cwd=self.root, env=self.environment, **streams)


@contextmanager
def built(commit: str) -> Iterator[Build]:
    """The tree of a commit, for the block."""
    with tempfile.TemporaryDirectory(prefix="tidemark-upgrade-") as directory:
        archive = subprocess.run(
            ["git", "archive", commit], cwd=HERE, capture_output=True, check=True
        )
        subprocess.run(["tar", "x", "-C", directory], input=archive.stdout, check=True)
        yield Build(Path(directory))


class Upgradable(Daemon):
    """A daemon that may be started again from another tree, over the same data."""

    build: Build

    def __init__(self, build: Build, directory: Path, name: str, *flags: str) -> None:
        self.build = build
        super().__init__(directory, name, *flags)

    def start(self) -> None:
        listen = [
            part for name, flag in self._addresses.items() for part in (flag, self.endpoints[name])
        ]
        with self.log.open("ab") as log:
            self.process = self.build.start(
                self.name, *listen, *self._flags, stdout=subprocess.PIPE, stderr=log
            )
        line = self.process.stdout.readline()
        assert line, f"{self.name} did not start: {self.log.read_text()[-3000:]}"
        self.endpoints = json.loads(line)["endpoints"]

    def upgrade(self, build: Build) -> None:
        """Stop it as operators do, and start the other build's."""
        assert self.terminate() == 0, self.log.read_text()[-3000:]
        self.build = build
        self.start()


class UpgradableCluster(Cluster):
    """Coordinator, store, pump and two captures of one build."""

    def __init__(self, build: Build, directory: Path) -> None:
        self.build = build
        super().__init__(directory)
        self.second = self.another_capture()

    def start(self, name: str, *flags: str) -> Daemon:
        flags = tuple(each for each in flags if each not in FIRST_REGIONS) + (
            tuple(FIRST_REGIONS) if name == "store" else ()
        )
        daemon = Upgradable(self.build, self.directory, name, *flags)
        self._started.callback(daemon.stop)
        return daemon


class Job:
    """The lake job of a changefeed."""

    def __init__(self, build: Build, cluster: Cluster, changefeed: str, target: str) -> None:
        self._cluster, self._changefeed, self._target = cluster, changefeed, target
        self.log = cluster.directory / f"job-{changefeed}.log"
        self.start(build)

    def start(self, build: Build) -> None:
        endpoint = f"grpc://{self._cluster.capture.endpoints['flight']}"
        directory = self._cluster.directory / f"checkpoints-{self._changefeed}"
        with self.log.open("ab") as log:
            self.process = build.start(
                *("spark", "run", "--endpoint", endpoint, "--changefeed", self._changefeed),
                *("--target", self._target, "--checkpoint-dir", str(directory)),
                *("--http-addr", LOOPBACK),
                stdout=log,
                stderr=log,
            )

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(100)

    def upgrade(self, build: Build) -> None:
        self.stop()
        self.start(build)


class World:
    """Everything that is upgraded, and what is written meanwhile."""

    def __init__(
        self, cluster: UpgradableCluster, server: MariaDb, feed: Feed, formats: Sequence[str]
    ) -> None:
        self.cluster, self.server, self.feed, self.formats = cluster, server, feed, formats
        self.follower = Follower(feed)
        self.jobs: dict[str, Job] = {}
        self._written = 0
        self._written_ts = 0

    def begin(self, build: Build) -> None:
        """Changefeeds of MariaDB, one for each format, and their jobs."""
        self.server.execute(
            "CREATE DATABASE shop",
            "CREATE TABLE shop.a (id INT PRIMARY KEY, v VARCHAR(40), at DATETIME(3), n DECIMAL(20,4))",
            "INSERT INTO shop.a SELECT seq, 'before', NOW(3), seq / 7 FROM shop.seq_1_to_500",
        )
        for name in self.formats:
            sink = f"{name}://{self.cluster.directory / f'lake-{name}'}"
            self.cluster.cli(
                *("changefeed", "create", "-c", name, "--sink-uri", sink, "--dump"),
                *("--source-uri", f"{self.server.uri}?idle-row-ms=300", "--filter", "shop.*"),
            )
            self.jobs[name] = Job(build, self.cluster, name, sink)
        self.follower.start()

    def write(self, step: str) -> None:
        """Rows of both sources, and DDL."""
        self._written += 1
        low = 1000 * self._written
        self.feed.write(15)
        self.server.execute(
            f"ALTER TABLE shop.a ADD c{self._written} INT DEFAULT {self._written}",
            f"INSERT INTO shop.a (id, v, at, n) SELECT seq, '{step}', NOW(3), seq / 3 "
            f"FROM shop.seq_{low}_to_{low + 99}",
            f"UPDATE shop.a SET v = CONCAT(v, '+'), n = n + 1 WHERE id % 7 = {self._written % 7}",
            f"DELETE FROM shop.a WHERE id % 11 = {self._written % 11}",
        )
        self._written_ts = self.cluster.now()

    def wait_all_there(self) -> None:
        """Until the reader and the lakes have what was written so far."""
        _until(self._has_followed)
        for name in self.formats:
            _until(lambda name=name: self._is_synced(name))

    def check(self) -> None:
        """See that nothing was lost or doubled, by `verify` of each lake."""
        for rows in self.follower.rows.values():
            assert rows == self.feed.expected
        for name in self.formats:
            if name == "parquet":
                continue  # a changelog: `verify` compares tables that show the newest rows
            told = self.cluster.cli("verify", "-c", name, timeout_s=_PATIENCE_S)
            assert isinstance(told, dict), told
            assert told["equal"], told

    def _has_followed(self) -> bool:
        if self.follower.error is not None:
            raise self.follower.error
        return all(rows == self.feed.expected for rows in self.follower.rows.values())

    def _is_synced(self, name: str) -> bool:
        shown = self.cluster.cli("changefeed", "query", "-c", name)
        assert isinstance(shown, dict), shown
        assert shown["state"] in ("normal", "warning"), shown
        # Cuts without rows move it on.
        return bool(shown["checkpoint_tso"] > self._written_ts)

    def close(self) -> None:
        self.follower.ending.set()
        for job in self.jobs.values():
            job.stop()


def upgrade(
    base: Build,
    head: Build,
    directory: Path,
    done: Callable[[str], None],
    formats: Sequence[str] = FORMATS,
) -> None:
    """The whole way; `done` is told of each step."""
    with ExitStack() as stack:
        server = stack.enter_context(running_mariadb())
        cluster = UpgradableCluster(base, directory)
        stack.callback(cluster.stop)
        store = stack.enter_context(transaction_client(cluster))
        world = World(cluster, server, Feed(cluster, store), formats)
        world.begin(base)
        stack.callback(world.close)

        def step(name: str) -> None:
            world.write(name)
            world.wait_all_there()
            world.check()
            done(name)

        step("base")
        cluster.coordinator.upgrade(head)
        step("coordinator")
        cluster.store.upgrade(head)
        step("store")
        # Captures of two builds share no tables: the contract between them is no public one.
        assert cluster.second.terminate() == 0
        cluster.capture.upgrade(head)
        cluster.second.build = head
        cluster.second.start()
        step("captures")
        for name, job in world.jobs.items():
            job.upgrade(head)
            step(f"job {name}")
        for daemon in (cluster.capture, cluster.second, cluster.store, cluster.coordinator):
            daemon.kill()
        for daemon in (cluster.coordinator, cluster.store, cluster.capture, cluster.second):
            daemon.start()
        step("killed")


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.3)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True, help="a commit, such as the last one that landed")
    parser.add_argument("--directory", type=Path, help="where data and logs stay")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    arguments = parser.parse_args()
    began = time.monotonic()

    def done(step: str) -> None:
        seconds = round(time.monotonic() - began, 1)
        print(json.dumps({"step": step, "seconds": seconds, "equal": True}), flush=True)

    with ExitStack() as stack:
        directory = arguments.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(exist_ok=True)
        base = stack.enter_context(built(arguments.base))
        upgrade(base, Build(HERE), directory, done, arguments.formats)


if __name__ == "__main__":
    main()
