"""The lake job, killed with SIGKILL at one step of one batch: `python -m … STEP BATCH WAY job arguments…`.

Steps: `tables` after one table of the cut, `manifest` before the cut is committed, `ack` before it is acknowledged,
`commit` before Spark writes its commit log; `never`. Ways to write Delta: `mirror`, `replace`, `merge`.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from pyspark_tidemark import job
from pyspark_tidemark.lake import changes, mirror
from pyspark_tidemark.lake.cut import CutApplier
from pyspark_tidemark.lake.delta.target import DeltaTarget
from pyspark_tidemark.lake.manifest import FileManifest


class Kill:
    """Ends this process at a step of a batch."""

    def __init__(self, step: str, batch: int) -> None:
        self._step = step
        self._batch = batch
        self._now = -1

    def follow(self) -> None:
        applied = CutApplier.apply

        def apply(applier: CutApplier, cut: Any) -> Any:
            self._now = cut.batch
            return applied(applier, cut)

        CutApplier.apply = apply  # type: ignore[method-assign]
        self._after(DeltaTarget, "apply", "tables")
        self._before(FileManifest, "commit", "manifest")
        self._before(CutApplier, "acknowledge", "ack")
        self._after(job.Job, "_report", "commit")

    def _at(self, step: str) -> None:
        if (step, self._now) == (self._step, self._batch):
            os.kill(os.getpid(), signal.SIGKILL)

    def _before(self, owner: type, name: str, step: str) -> None:
        self._wrap(owner, name, before=lambda: self._at(step))

    def _after(self, owner: type, name: str, step: str) -> None:
        self._wrap(owner, name, after=lambda: self._at(step))

    @staticmethod
    def _wrap(owner: type, name: str, before: Callable[[], None] = int, after: Callable[[], None] = int) -> None:
        wrapped = getattr(owner, name)

        def around(*arguments: Any, **named: Any) -> Any:
            before()
            result = wrapped(*arguments, **named)
            after()
            return result

        setattr(owner, name, around)


def main() -> int:
    step, batch, way, *arguments = sys.argv[1:]
    if way != "mirror":
        mirror.SMALL_ROWS = -1
    if way == "merge":
        changes.FEW_ROWS, changes.HERE_BYTES = 0, -1
    Kill(step, int(batch)).follow()
    return job.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
