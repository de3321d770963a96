"""The lake job, killed with SIGKILL at one step of one cut:
`python -m … STEP CUT WAY job arguments…`.

Steps: `written` when the tasks of `--write spark` have written their files, `tables` after one
table of the cut, `manifest` before the cut is committed, `ack` before it is acknowledged, `commit`
before Spark writes its commit log; in that cut or the next one that has them `rewrite` when files
are joined and not committed, `rewritten` when they are; `never`. Ways to write Delta: `mask`,
`merge`.
"""

import os
import signal
import sys
from typing import Any

from pyspark_tidemark import job
from pyspark_tidemark.lake import changes
from pyspark_tidemark.lake import cut as applying
from pyspark_tidemark.lake.cut import CutApplier
from pyspark_tidemark.lake.delta.tables import DeltaTables
from pyspark_tidemark.lake.delta.target import DeltaTarget
from pyspark_tidemark.lake.iceberg.target import IcebergTarget
from pyspark_tidemark.lake.manifest import FileManifest
from pyspark_tidemark.lake.parquet.target import ChangelogTarget

from tests.around import wrap


class Kill:
    """Ends this process at a step of a cut."""

    def __init__(self, step: str, cut: int) -> None:
        self._step = step
        self._cut = cut
        self._now = -1

    def follow(self) -> None:
        applied = CutApplier.apply

        def apply(applier: CutApplier, cut: Any) -> Any:
            self._now = len(applier._manifest.cuts())
            return applied(applier, cut)

        CutApplier.apply = apply  # type: ignore[method-assign]
        wrap(applying, "write_by_tasks", after=lambda: self._at("written"))
        for target in (DeltaTarget, IcebergTarget, ChangelogTarget):
            wrap(target, "apply", after=lambda: self._at("tables"))
        wrap(FileManifest, "commit", before=lambda: self._at("manifest"))
        wrap(CutApplier, "acknowledge", before=lambda: self._at("ack"))
        wrap(job.Job, "_write_cut", after=lambda: self._at("commit"))
        wrap(
            DeltaTables,
            "rewrite",
            before=lambda: self._at("rewrite"),
            after=lambda: self._at("rewritten"),
        )

    def _at(self, step: str) -> None:
        if step == self._step and self._now >= self._cut:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    step, cut, way, *arguments = sys.argv[1:]
    if way == "merge":
        changes.FEW_ROWS_MAX, changes.DRIVER_READ_MAX_BYTES, changes.ARROW_READ_MAX_BYTES = (
            0,
            -1,
            -1,
        )
    Kill(step, int(cut)).follow()
    return job.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
