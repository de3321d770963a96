"""A Delta table's log, written without Spark: what the newest version shows, and the next version put beside it.

Delta's own commit runs Spark jobs for each version, whatever its size. A commit is a file of actions that must not be
there yet, as Delta's protocol says; Delta's log store creates it, so it is as exclusive as Delta's own. Invariants:
1. A commit follows the version that its actions were made from. If somebody else has committed, nothing is written;
   the table is read again, and the actions are made anew.
2. Only tables of which all properties and features are known are written like that.
"""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession
from pyspark.sql.classic.dataframe import DataFrame
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from pyspark_tidemark.lake.delta.files import DataFile
from pyspark_tidemark.lake.delta.layout import Layout
from pyspark_tidemark.lake.delta.parquet import now_ms

CHECKPOINT_EVERY = 50
_KNOWN_PROPERTIES = {
    "delta.enableDeletionVectors",
    "delta.checkpointInterval",
    "delta.columnMapping.mode",
    "delta.columnMapping.maxColumnId",
    "delta.enableTypeWidening",
}
_KNOWN_FEATURES = {
    *("deletionVectors", "columnMapping", "timestampNtz", "typeWidening", "typeWidening-preview"),
    *("appendOnly", "invariants"),  # old writer versions name these, too; without a property they ask for nothing
}
_FRESH_S = 3600.0
"""So long a version is known without looking: Delta keeps the commits of weeks."""


@dataclasses.dataclass(frozen=True)
class Listing:
    """What one version of a table shows."""

    version: int
    layout: Layout
    files: Mapping[str, DataFile]
    """By path."""
    read_at: float

    @property
    def fresh(self) -> bool:
        """Whether the next version may be put beside it without looking again."""
        return time.monotonic() - self.read_at < _FRESH_S

    def after(self, actions: Sequence[Mapping[str, Any]]) -> "Listing":
        """The next version."""
        files = dict(self.files)
        for action in actions:
            if "remove" in action:
                del files[action["remove"]["path"]]
            elif "add" in action:
                file = DataFile.of(action["add"], self.layout)
                files[file.add["path"]] = file
        return Listing(self.version + 1, self.layout, files, time.monotonic())


def listing(spark: SparkSession, snapshot: Any, root: str) -> Listing | None:
    """What a snapshot shows; None for a table that only Delta may write to."""
    if not _known(snapshot):
        return None
    layout = _layout(snapshot, root)
    found = DataFrame(snapshot.allFiles().toJSON().toDF(), spark).collect()
    files = [DataFile.of(json.loads(row.value), layout) for row in found]
    return Listing(int(snapshot.version()), layout, {file.add["path"]: file for file in files}, time.monotonic())


def commit(log: Any, jvm: Any, version: int, actions: Sequence[Mapping[str, Any]]) -> bool:
    """Write a version with these actions; whether it was not there yet."""
    lines = jvm.java.util.ArrayList()
    for action in actions:
        lines.add(json.dumps(action))
    path = jvm.org.apache.hadoop.fs.Path(log.logPath(), f"{version:020}.json")
    rows = jvm.org.apache.spark.api.python.PythonUtils.toSeq(lines).iterator()
    try:
        log.store().write(path, rows, False, log.newDeltaHadoopConf())  # noqa: FBT003 - Java's signature: overwrite
    except Py4JJavaError as err:
        if "FileAlreadyExistsException" not in str(err.java_exception.getClass().getName()):
            raise
        return False
    return True


def committed_at(log: Any, jvm: Any, version: int) -> datetime | None:
    """When a version was written, by the clock of what keeps the log; None: the log does not go back so far."""
    path = jvm.org.apache.hadoop.fs.Path(log.logPath(), f"{version:020}.json")
    try:
        status = path.getFileSystem(log.newDeltaHadoopConf()).getFileStatus(path)
    except Py4JJavaError as err:
        if "FileNotFoundException" not in str(err.java_exception.getClass().getName()):
            raise
        return None
    return datetime.fromtimestamp(status.getModificationTime() / 1000, UTC)


def told(operation: str, parameters: Mapping[str, str], read_version: int) -> dict[str, Any]:
    """The action that says what a commit of ours is."""
    info: dict[str, Any] = {"timestamp": now_ms(), "readVersion": read_version, "isBlindAppend": False}
    info |= {"operation": operation, "operationParameters": dict(parameters), "engineInfo": "tidemark"}
    return {"commitInfo": info}


def fence(app_id: str, end_ts: int) -> dict[str, Any]:
    """The action that says up to where a table is applied."""
    return {"txn": {"appId": app_id, "version": end_ts, "lastUpdated": now_ms()}}


def _known(snapshot: Any) -> bool:
    metadata = json.loads(snapshot.metadata().json())["metaData"]
    protocol = json.loads(snapshot.protocol().json())["protocol"]
    properties, features = metadata["configuration"], protocol.get("writerFeatures")
    return (
        properties.get("delta.enableDeletionVectors") == "true"
        and properties.get("delta.columnMapping.mode", "name") in ("name", "none")
        and all(name in _KNOWN_PROPERTIES or name.startswith("delta.feature.") for name in properties)
        and features is not None
        and _KNOWN_FEATURES.issuperset(features)
        and not metadata["partitionColumns"]
    )


def _layout(snapshot: Any, root: str) -> Layout:
    fields = json.loads(snapshot.schema().json())
    mapping = {field["name"]: field["metadata"] for field in fields["fields"]}
    physical = {name: told.get("delta.columnMapping.physicalName", name) for name, told in mapping.items()}
    ids = {
        name: int(told["delta.columnMapping.id"]) for name, told in mapping.items() if "delta.columnMapping.id" in told
    }
    return Layout(root, to_arrow_schema(StructType.fromJson(fields), timezone="UTC"), physical, ids)
