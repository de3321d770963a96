"""The job of a lake in memory: `python -m tests.e2e.chaos.memory_job ENDPOINTS CHANGEFEED START_TS
DIRECTORY`.

The lake job's own code applies cuts to tables that are dicts, and a log on the disk keeps each
cut's tables before it is acknowledged. So the cluster can be tried without Spark, whose start is
most of what a run costs. A job that was killed begins at the last cut of its log.
"""

import os
import pickle
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Changefeed
from pyspark_tidemark.options import parse

from tests.integration.lake.memory import MemoryLake, MemoryTable

_LOG = "cuts"
_LENGTH_BYTES = 8


@dataclass
class Frame:
    """One cut of the log: tables that it changed, as they are after it."""

    span: tuple[int, int]
    tables: dict[str, MemoryTable]
    doubled: list[str]
    """Inserts of keys that were there already."""


def frames(directory: Path, begin: int = 0) -> Iterator[tuple[int, Frame]]:
    """All cuts that are whole in the log from an offset on, each with its end in bytes."""
    path = directory / _LOG
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(begin)
        while len(length := file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
            data = file.read(int.from_bytes(length, "big"))
            if len(data) != int.from_bytes(length, "big"):
                return
            yield file.tell(), Frame(*pickle.loads(data))


class Log:
    """Appends cuts."""

    def __init__(self, directory: Path) -> None:
        """What a death has cut off is forgotten."""
        path = directory / _LOG
        whole = max((end for end, _ in frames(directory)), default=0)
        path.touch()
        os.truncate(path, whole)
        self._file: BinaryIO = path.open("ab", buffering=0)

    def append(self, frame: Frame) -> None:
        """Durable when it returns; nothing is there when it raises OSError."""
        begin = os.fstat(self._file.fileno()).st_size
        # Not the frame itself, whose module has another name in a program that only reads.
        data = pickle.dumps((frame.span, frame.tables, frame.doubled), protocol=5)
        rest = len(data).to_bytes(_LENGTH_BYTES, "big") + data
        try:
            # A disk that is nearly full takes a part.
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError:
            os.truncate(self._file.fileno(), begin)
            raise


class Job:
    """Follows one changefeed for ever."""

    def __init__(self, changefeed: Changefeed, start_ts: int, directory: Path) -> None:
        self._log = Log(directory)
        tables: dict[str, MemoryTable] = {}
        at_ts = start_ts
        for _, frame in frames(directory):
            tables |= frame.tables
            at_ts = frame.span[1]
        self._lake = MemoryLake(changefeed, at_ts)
        self._lake.target.tables = tables
        self._versions = {name: table.position for name, table in tables.items()}

    def step(self) -> None:
        """The next cut, if there is one: first in the log, then acknowledged."""
        lake, begin_ts = self._lake, self._lake.at_ts
        if not lake.follow(wait_ms=200, acknowledges=False):
            return
        changed = {
            name: table
            for name, table in lake.target.tables.items()
            if self._versions.get(name) != table.position
        }
        self._log.append(Frame((begin_ts, lake.at_ts), changed, lake.target.doubled))
        self._versions |= {name: table.position for name, table in changed.items()}
        lake.acknowledge()


def main() -> int:
    """Until it is killed, or cannot go on."""
    endpoints, changefeed, start_ts, directory = sys.argv[1:]
    options = {"endpoint": endpoints, "changefeed": changefeed, "cuts": "true", "ack": "false"}
    job = Job(Changefeed(parse(options)), int(start_ts), Path(directory))
    while True:
        try:
            job.step()
        except SourceError as err:
            print(err, file=sys.stderr, flush=True)
            if not err.retryable:
                return 1
            time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
