"""XA transactions that wait for their commit, more than a capture may hold: it spills them,
and loses none of them.
"""

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.capture.processes import Cluster, Reader, running_cluster
from tests.mariadb import MariaDb, running_mariadb
from tests.small_disk import small_disk

QUOTA_MB = 16
ROW_BYTES = 4096
LIMIT_S = 300.0


@dataclass(frozen=True)
class Replicated:
    """A table of a server, and a capture that follows it."""

    server: MariaDb
    cluster: Cluster
    reader: Reader
    start_ts: int
    spilled: Path

    def prepare(self, number: int, rows: int) -> None:
        """An XA transaction that inserts that many rows of its own."""
        first = number * 1_000_000
        value = "CONCAT(" + ", ".join(["RANDOM_BYTES(1024)"] * (ROW_BYTES // 1024)) + ")"
        insert = f"INSERT INTO shop.t SELECT seq, {value} FROM seq_{first}_to_{first + rows - 1}"
        xid = f"'x{number}'"
        self.server.execute(
            f"XA START {xid}", insert, f"XA END {xid}", f"XA PREPARE {xid}", database="shop"
        )

    def end(self, number: int) -> None:
        """Commit those with an even number, roll the others back."""
        self.server.execute(f"XA {'ROLLBACK' if number % 2 else 'COMMIT'} 'x{number}'")

    def spilled_bytes(self) -> int:
        total = 0
        for path in self.spilled.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    def read_on(self) -> int:
        """Wait until the log is read up to now; the cut."""
        return self.reader.wait_resolved(self.cluster.now(), LIMIT_S)

    def check(self) -> None:
        """The rows that were read are those of the table, and nothing is held any more."""
        end = self.read_on()
        found = self.reader.read(self.start_ts, end, "shop.t")
        seen = {
            key: zlib.crc32(v)
            for key, v in zip(found["id"].to_pylist(), found["v"].to_pylist(), strict=True)
        }
        assert set(found["_op"].to_pylist()) <= {"insert"}
        assert seen == dict(self.server.execute("SELECT id, CRC32(v) FROM shop.t"))
        assert len(seen) == found.num_rows
        wait_for(lambda: not self.spilled.exists())


@contextlib.contextmanager
def replicated(directory: Path, data: Path) -> Iterator[Replicated]:
    log = ("--innodb-log-file-size=128M", "--innodb-flush-log-at-trx-commit=0")
    flags = ("--memory-quota-bytes", str(QUOTA_MB << 20), "--data-dir", str(data))
    with running_mariadb(*log) as server, running_cluster(directory, *flags) as cluster:
        server.execute(
            "CREATE DATABASE shop", "CREATE TABLE shop.t (id BIGINT PRIMARY KEY, v VARBINARY(8192))"
        )
        create = [
            "changefeed",
            "create",
            "-c",
            "shop",
            "--sink-uri",
            "parquet:///lake",
            "--filter",
            "shop.*",
        ]
        made = cluster.cli(*create, "--source-uri", f"{server.uri}?idle-row-ms=500")
        spilled = data / "sorter" / "shop" / "open-transactions"
        feed = Replicated(server, cluster, Reader(cluster, "shop"), int(made["start_ts"]), spilled)
        feed.read_on()
        yield feed


def wait_for(get: Callable[[], Any]) -> Any:
    """Ask until it gives something."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := get()):
        assert time.monotonic() < deadline, f"not after {LIMIT_S} s"
        time.sleep(0.1)
    return found


def peak_mb(pid: int) -> int:
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return int(fields["VmHWM"].split()[0]) >> 10


@pytest.mark.timeout(900)
def test_many_that_are_prepared_take_disk_not_memory_and_end_as_they_should_across_a_kill(
    tmp_path: Path,
) -> None:
    with replicated(tmp_path, tmp_path / "capture") as feed:
        before_mb = peak_mb(feed.cluster.capture.process.pid)
        for number in range(16):
            feed.prepare(number, 2000)
        feed.read_on()
        assert feed.spilled_bytes() > 100 << 20
        for number in range(4):
            feed.end(number)
        feed.read_on()
        # 128 MB were held, and 8 MB committed at once; all of it in memory was 500 MB and more
        assert peak_mb(feed.cluster.capture.process.pid) - before_mb < 200
        feed.cluster.capture.kill()
        for number in range(4, 8):
            feed.end(number)
        feed.cluster.capture.start()
        for number in range(8, 16):
            feed.end(number)
        feed.check()


@pytest.mark.timeout(900)
def test_a_full_disk_pauses_the_log_which_says_so_and_goes_on_when_there_is_room(
    tmp_path: Path,
) -> None:
    with (
        small_disk(tmp_path / "disk", "160m") as disk,
        replicated(tmp_path, disk / "capture") as feed,
    ):
        filler = disk / "filler"
        filler.write_bytes(bytes(140 << 20))
        for number in range(4):
            feed.prepare(number, 2000)

        def disk_error() -> str:
            return str(
                feed.cluster.cli("changefeed", "query", "-c", "shop")["holding"]["disk_error"]
            )

        assert "No space left" in wait_for(disk_error)
        filler.unlink()
        for number in range(4):
            feed.end(number)
        feed.check()
        wait_for(lambda: not disk_error())
