"""The lake job on a cluster whose executors are killed while they write: `python -m … MARKERS KILLS
job arguments…`.

Of each of the first KILLS cuts, the first task that has written a table's files kills the executor
it runs in, as a machine that is lost; a file in the directory MARKERS says so. Spark runs the
executor's tasks again, elsewhere.
"""

import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any

from pyspark_tidemark import job
from pyspark_tidemark.lake.changes import Changes
from pyspark_tidemark.lake.cut import CutApplier
from pyspark_tidemark.lake.cut_tasks import Part, TaskWriter


@dataclasses.dataclass(frozen=True)
class LosingWriter:
    """Implements `TaskWriter`: writes, and takes its executor away."""

    inner: TaskWriter
    markers: str
    kills: int

    @property
    def is_divisible(self) -> bool:
        return self.inner.is_divisible

    def write(self, changes: Changes) -> Part:
        part = self.inner.write(changes)
        killed = sum(1 for _ in Path(self.markers).iterdir())
        if killed < self.kills and self._claims(changes.end_ts):
            os.kill(_executor(), signal.SIGKILL)
        return part

    def _claims(self, end_ts: int) -> bool:
        """Whether this is the first task of the cut that gets here."""
        try:
            Path(self.markers, str(end_ts)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _executor() -> int:
    """The JVM that runs this task: its Python workers are children of a daemon of its own."""
    [line] = [
        line
        for line in Path(f"/proc/{os.getppid()}/status").read_text().splitlines()
        if line.startswith("PPid:")
    ]
    number = int(line.split()[1])
    assert b"ExecutorBackend" in Path(f"/proc/{number}/cmdline").read_bytes()
    return number


def main() -> int:
    markers, kills, *arguments = sys.argv[1:]
    task_writer = CutApplier._task_writer

    def losing(applier: CutApplier, begun: Any) -> Any:
        pair = task_writer(applier, begun)
        return pair and (pair[0], LosingWriter(pair[1], markers, int(kills)))

    CutApplier._task_writer = losing  # type: ignore[assignment, method-assign]
    return job.main(arguments)


if __name__ == "__main__":
    # By its importable name: executors unpickle the writer.
    from tests.integration.spark.lost_executor import main as imported

    sys.exit(imported())
