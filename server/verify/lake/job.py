"""The lake's side of a comparison: `python -m server.verify.lake.job LAKE_URI CHANGEFEED DIRECTORY
[--locked] [--gently]`. The directory is for large answers and for what Spark spills.

One JSON document a line comes in, one goes out, `{"error": "[TM:…] …"}` if it went wrong. It knows
the lake by its manifest and its tables only, as any reader would; with `--locked` it holds the
lake's lock, as a writer must; with `--gently` it has one core, and only when nobody else wants it.
"""

import base64
import contextlib
import dataclasses
import json
import os
import queue
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.failure import named
from pyspark_tidemark.lake.target import no_reading
from pyspark_tidemark.sink_uri import SinkUri

from server.verify.lake.question import Question
from server.verify.spans import Extent
from storage.model.errors import TidemarkError


class LakeSide(Protocol):
    """One lake."""

    def cut(self, at: int | None) -> dict[str, Any]:
        """`cut`, the end of the newest at or below `at`; `mode`, `beyond`,
        `newest_only` as in `LakeCut`.

        Raises:
            SourceError: ErrCutNotFound.
        """

    def extent(self, question: Question) -> Extent:
        """Return the number of rows of a table, and the least and greatest value of its key's first
        column, an integer.
        """

    def range_checksums(self, question: Question) -> bytes:
        """The sums of a table; without the table nothing was counted."""

    def rows(self, question: Question) -> Any:
        """The rows of the chosen ranges, as a pyarrow.Table of `Question.answer_schema`."""

    def check_repair(self, question: Question) -> None:
        """Raises SourceError (ErrRepairUnsupported) if the table cannot be put right in place."""

    def repair(self, question: Question, gone: Any, live: Any) -> int:
        """Remove the keys of `gone`, add the rows of `live` (pyarrow.Tables);
        returns the table's new version.
        """


class Job:
    """Answers the questions of `server.verify.lake.client`;
    large answers go through files in `directory`.
    """

    def __init__(self, lake: LakeSide, directory: Path) -> None:
        self._lake = lake
        self._directory = directory

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one question."""
        do = request["do"]
        if do == "cut":
            return self._lake.cut(request["at"])
        question = Question.parse(request)
        if do == "extent":
            return dataclasses.asdict(self._lake.extent(question))
        if do == "leaves":
            return {"leaves": base64.b64encode(self._lake.range_checksums(question)).decode()}
        if do == "rows":
            return {"file": self._written(self._lake.rows(question))}
        self._lake.check_repair(question)
        if do == "check_repair":
            return {}
        return {
            "version": self._lake.repair(
                question, *(_read(request[name]) for name in ("gone", "live"))
            )
        }

    def _written(self, table: Any) -> str:
        path = self._directory / "rows.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        return str(path)


def open_lake(
    stack: contextlib.ExitStack,
    uri: SinkUri,
    changefeed: str,
    directory: Path,
    *,
    locked: bool,
    gently: bool,
) -> LakeSide:
    """The lake of a URI."""
    if uri.is_topic:
        raise no_reading(uri.format)
    if uri.is_database:
        # Imported here: these drivers are not needed for other lakes.
        from server.verify.lake.database_lake import (
            DatabaseLake,
        )

        return stack.enter_context(DatabaseLake.open(uri, changefeed, locked=locked))
    from server.verify.lake.file_lake import FileLake

    return stack.enter_context(
        FileLake.open(uri, changefeed, directory, locked=locked, cores="1" if gently else "*")
    )


def _read(path: str) -> Any:
    with pa.OSFile(path) as file:
        return pa.ipc.open_file(file).read_all()


_GRACE_S = 2.0
_NICE = 15


def _follow_parent(questions: "queue.SimpleQueue[str | None]", directory: Path) -> None:
    """Pass questions on.

    When standard input ends, so does this process, in the middle of a question, too, and nobody
    else removes the directory.

    The process that asked is gone then, however it died; Spark's JVM ends with this one.
    """
    for line in sys.stdin:
        questions.put(line)
    questions.put(None)
    # An idle process ends by itself, and in order. One in the middle of a question is ended here:
    # Python cannot interrupt a call into Spark.
    time.sleep(_GRACE_S)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def main(argv: list[str]) -> int:
    """Answer until standard input ends."""
    uri, changefeed, place, *flags = argv
    directory = Path(place)
    gently = "--gently" in flags
    if gently:
        os.nice(_NICE)
    questions: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(
        target=_follow_parent, args=(questions, directory), name="questions", daemon=True
    ).start()
    # Answers go to a copy of standard output, whose own number then means standard error: what
    # else writes there, the JVM too, would break the lines of JSON.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        job: Job | None = None
        while (line := questions.get()) is not None:
            try:
                if job is None:
                    target = SinkUri.parse(uri)
                    lake = open_lake(
                        stack,
                        target,
                        changefeed,
                        directory,
                        locked="--locked" in flags,
                        gently=gently,
                    )
                    job = Job(lake, directory)
                answer = job.answer(json.loads(line))
            except TidemarkError as err:
                answer = {"error": str(err)}
            except (
                SourceError,
                PySparkException,
                Py4JError,
                OSError,
                pa.ArrowException,
            ) as err:
                answer = {"error": str(named(err))}
            out.write(json.dumps(answer) + "\n")
            out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
