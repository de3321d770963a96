"""The lake job on a lake behind Hadoop, sent a signal at one step of one cut:
`… SIGNAL STEP CUT job arguments…`.

Steps: `announced`, `tables` after one table of the cut, `manifest` before the cut is committed,
`committed`; `never`. The file system is Hadoop's own for local files, which users' URIs cannot
name: it stands for HDFS, and renames like it but for the instant between its look at the new name
and its renaming.
"""

import os
import signal
import sys
from typing import Any

from pyspark_tidemark import job, sink_uri
from pyspark_tidemark.lake.cut import CutApplier
from pyspark_tidemark.lake.delta.target import DeltaTarget
from pyspark_tidemark.lake.manifest import FileManifest
from pyspark_tidemark.lake.parquet.target import RemoteChangelog

from tests.around import wrap


class Stop:
    """Sends this process a signal at a step of a cut."""

    def __init__(self, number: int, step: str, cut: int) -> None:
        self._number = number
        self._step = step
        self._cut = cut
        self._now = -1

    def follow(self) -> None:
        applied = CutApplier.apply

        def apply(applier: CutApplier, cut: Any) -> Any:
            self._now = len(applier._manifest.cuts())
            return applied(applier, cut)

        CutApplier.apply = apply  # type: ignore[method-assign]
        wrap(FileManifest, "announce", after=lambda: self._at("announced"))
        for found in (DeltaTarget, RemoteChangelog):
            wrap(found, "apply", after=lambda: self._at("tables"))
        wrap(
            FileManifest,
            "commit",
            before=lambda: self._at("manifest"),
            after=lambda: self._at("committed"),
        )

    def _at(self, step: str) -> None:
        if (step, self._now) == (self._step, self._cut):
            os.kill(os.getpid(), self._number)


def allow_local_files() -> None:
    """Take `FORMAT+file:///path` for a lake behind Hadoop, in this process."""
    sink_uri.SYSTEMS = (*sink_uri.SYSTEMS, "file")
    sink_uri.RENAMING = (*sink_uri.RENAMING, "file")


def main() -> int:
    number, step, cut, *arguments = sys.argv[1:]
    allow_local_files()
    Stop(signal.Signals[number], step, int(cut)).follow()
    return job.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
