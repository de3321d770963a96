"""The lake's side of a comparison, in Spark: `python -m server.verify.lake_job LAKE_URI CHANGEFEED [--repair]`.

One JSON document a line comes in, one goes out, `{"error": "[TM:…] …"}` if it went wrong. It knows the lake by its
manifest and its tables only, as any reader would; with `--repair` it holds the lake's lock, as a writer must.
"""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark_tidemark.digest import Leaves, digests, key_texts, leaf_of, row_texts
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.manifest import DIRECTORY, FileManifest, read_cuts
from pyspark_tidemark.lake.session import open_session
from pyspark_tidemark.lake.target import TargetUri

from server.verify.lake_repair import repair
from server.verify.lake_table import LakeTable


class LakeSide:
    """One lake; the session is opened at the first question that needs it."""

    def __init__(self, uri: TargetUri, directory: Path) -> None:
        self._uri = uri
        self._directory = directory
        self._session: SparkSession | None = None
        self._cuts = read_cuts(Path(uri.path) / DIRECTORY)

    @property
    def _spark(self) -> SparkSession:
        if self._session is None:
            self._session = open_session(
                master="local[*]", driver_memory="1g", directory=self._directory, lake=self._uri.format, extra={}
            )
        return self._session

    def cut(self, request: dict[str, Any]) -> dict[str, Any]:
        """The newest cut at or below `at`."""
        at = request["at"]
        found = [cut.end_ts for cut in self._cuts if at is None or cut.end_ts <= at]
        if not found:
            begins = f"begins at {self._cuts[0].end_ts}" if self._cuts else "has no cut yet"
            raise SourceError("ErrCutNotFound", f"the lake {self._uri.path} {begins}; choose a later --at")
        return {"cut": found[-1]}

    def leaves(self, request: dict[str, Any]) -> dict[str, Any]:
        """Counts and sums of a table, in hexadecimal; without the table nothing was counted."""
        table, leaves = self._table(request), Leaves(request["bits"])
        frame = table.frame(self._spark)
        if frame is not None:
            summed = frame.mapInArrow(_summed(table, leaves.bits), "counts binary, sums binary")
            for row in summed.collect():
                leaves.merge(bytes(row.counts), bytes(row.sums))
        counts, sums = leaves.to_bytes()
        return {"found": frame is not None, "counts": counts.hex(), "sums": sums.hex()}

    def rows(self, request: dict[str, Any]) -> dict[str, Any]:
        """Write the rows of some leaves to a file: `key` and `row` as text, and the key's columns."""
        table, wanted = self._table(request), np.array(request["leaves"])
        frame = table.frame(self._spark)
        schema = pa.schema([("key", pa.string()), ("row", pa.string()), *map(table.schema.field, table.key)])
        found = schema.empty_table()
        if frame is not None:
            types = ", ".join(f"`{name}` {frame.schema[name].dataType.simpleString()}" for name in table.key)
            chosen = frame.mapInArrow(_chosen(table, request["bits"], wanted), f"key string, row string, {types}")
            found = chosen.toArrow().cast(schema)
        return {"file": self._written("rows.arrow", found)}

    def repair(self, request: dict[str, Any]) -> dict[str, Any]:
        """Put rows right; see `lake_repair`."""
        return {"version": repair(self._spark, self._uri, self._cuts[-1], self._table(request), request)}

    def _table(self, request: dict[str, Any]) -> LakeTable:
        return LakeTable.parse(self._uri, self._cuts, request)

    def _written(self, name: str, table: Any) -> str:
        path = self._directory / name
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        return str(path)


def _summed(table: LakeTable, bits: int) -> Callable[[Iterable[Any]], Iterator[Any]]:
    def work(batches: Iterable[Any]) -> Iterator[Any]:
        leaves = Leaves(bits)
        for batch in batches:
            leaves.add(batch.cast(table.schema), table.key)
        counts, sums = leaves.to_bytes()
        yield pa.RecordBatch.from_pydict({"counts": [counts], "sums": [sums]})

    return work


def _chosen(table: LakeTable, bits: int, leaves: Any) -> Callable[[Iterable[Any]], Iterator[Any]]:
    def work(batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            keys = key_texts(batch.cast(table.schema), table.key)
            mask = pa.array(np.isin(leaf_of(digests(keys), bits), leaves))
            kept = batch.filter(mask)
            columns = [keys.filter(mask), row_texts(kept.cast(table.schema)), *(kept[name] for name in table.key)]
            yield pa.RecordBatch.from_arrays(columns, names=["key", "row", *table.key])

    return work


def main(argv: list[str]) -> int:
    """Answer until standard input ends."""
    uri, changefeed, *flags = argv
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else writes, the JVM too, goes to standard error
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemark-verify-")))
        side: LakeSide | None = None
        for line in sys.stdin:
            try:
                if side is None:
                    target = TargetUri.parse(uri)
                    if "--repair" in flags:
                        stack.enter_context(FileManifest.opened(target.path, changefeed))
                    side = LakeSide(target, directory)
                request = json.loads(line)
                answer = getattr(side, request["do"])(request)
            except (SourceError, PySparkException, OSError) as err:
                answer = {"error": str(err)}
            out.write(json.dumps(answer) + "\n")
            out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
