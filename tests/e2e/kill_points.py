"""The lake job with a death planned: `python -m tests.e2e.kill_points STEP CUT DELAY_MS WAY job
arguments…`.

The process kills itself (SIGKILL) in its CUT-th cut: at `files` when data files or staged rows are
written and not yet committed (where Delta does both in one call, DELAY_MS into it), at `tables`
after the first table's commit, at `manifest` before the cut is made visible, at `ack` before it is
acknowledged, at `commit` before Spark's commit log, at `random` DELAY_MS after the cut began; from
there on at `rewrite` when Delta's files are joined and not committed, at `rewritten` when they are;
at `markers` when a topic has a marker of the cut that is not committed; where tasks write
(`--write spark`), at `job` DELAY_MS after the cut's Spark job began, at `written` when it has
ended; `never`. WAY chooses how rows are written: `driver`, `tasks`.
"""

import os
import signal
import sys
import threading

from pyspark_tidemark import job
from pyspark_tidemark.lake import changes
from pyspark_tidemark.lake import cut as applying
from pyspark_tidemark.lake.cut import CutApplier
from pyspark_tidemark.lake.databases.manifest import DatabaseManifest
from pyspark_tidemark.lake.databases.mysql import MySql
from pyspark_tidemark.lake.databases.postgres import Postgres
from pyspark_tidemark.lake.databases.target import DatabaseTarget
from pyspark_tidemark.lake.delta.tables import DeltaTables
from pyspark_tidemark.lake.delta.target import DeltaTarget
from pyspark_tidemark.lake.iceberg.cut_writer import CutWriter
from pyspark_tidemark.lake.iceberg.manifest import CatalogManifest
from pyspark_tidemark.lake.iceberg.target import IcebergTarget
from pyspark_tidemark.lake.kafka.manifest import KafkaManifest
from pyspark_tidemark.lake.kafka.sender import Sender
from pyspark_tidemark.lake.kafka.target import KafkaTarget
from pyspark_tidemark.lake.kafka.topic import Topic
from pyspark_tidemark.lake.manifest import FileManifest
from pyspark_tidemark.lake.parquet import target as changelog

from tests.around import wrap

STEPS = ("files", "tables", "manifest", "ack", "commit", "random")
STEPS_OF = {"delta": (*STEPS, "rewrite", "rewritten"), "kafka": (*STEPS, "markers")}
"""Those of targets that have more."""
STEPS_OF_TASKS = ("job", "written")
"""Besides, where tasks write the cuts."""
WAYS = ("driver", "tasks")
TARGETS = (DeltaTarget, IcebergTarget, DatabaseTarget, changelog.ChangelogTarget)


class Death:
    """Ends this process at a step of a cut."""

    def __init__(self, step: str, cut: int, delay_s: float) -> None:
        self._step = step
        self._left = cut
        self._delay_s = delay_s

    def plan(self) -> None:
        """Put itself into the way of the job."""
        wrap(CutApplier, "apply", before=self._begin_cut)
        for owner, name in ((CutWriter, "written"), (Postgres, "stage"), (MySql, "stage")):
            wrap(owner, name, after=lambda: self._at("files"))
        wrap(
            applying,
            "write_by_tasks",
            before=lambda: self._soon("job"),
            after=lambda: self._at("written"),
        )
        wrap(changelog, "sync", before=lambda: self._at("files"))
        wrap(DeltaTables, "_write", before=lambda: self._soon("files"))
        wrap(DeltaTables, "commit", before=lambda: self._at("files"))
        wrap(
            DeltaTables,
            "rewrite",
            before=lambda: self._at("rewrite"),
            after=lambda: self._at("rewritten"),
        )
        for target in TARGETS:
            for name in ("create", "apply"):
                wrap(target, name, after=lambda: self._at("tables"))
        for name in ("create", "apply"):
            wrap(KafkaTarget, name, after=lambda: self._at("tables"))
        wrap(Topic, "send", after=lambda: self._at("files"))
        wrap(Sender, "send_one", after=lambda: self._at("markers"))
        for manifest in (FileManifest, DatabaseManifest, CatalogManifest, KafkaManifest):
            wrap(manifest, "commit", before=lambda: self._at("manifest"))
        wrap(CutApplier, "acknowledge", before=lambda: self._at("ack"))
        wrap(job.Job, "_write_cut", after=lambda: self._at("commit"))

    def _begin_cut(self) -> None:
        self._left -= 1
        self._soon("random")

    def _at(self, step: str) -> None:
        if step == self._step and self._left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def _soon(self, step: str) -> None:
        if step == self._step and self._left <= 0:
            threading.Timer(self._delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


def main() -> int:
    """Run the job until it dies."""
    step, cut, delay_ms, way, *arguments = sys.argv[1:]
    if way == "tasks":
        changes.FEW_ROWS_MAX, changes.DRIVER_READ_MAX_BYTES, changes.ARROW_READ_MAX_BYTES = (
            0,
            -1,
            -1,
        )
    Death(step, int(cut), int(delay_ms) / 1000).plan()
    return job.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
