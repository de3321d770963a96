"""A Delta table's log, read and written without Spark.

A `Listing` is what one version of a table shows: files, columns, transactions. `replayed` and
`listing` read the newest one, `commit` and `commit_on_disk` write the next version. Delta itself
runs Spark jobs to read and to commit each version, whatever its size.

By Delta's protocol a commit is a new file of actions, which must not exist yet. On a local disk it
is made by a hard link, after the files that it adds were synced. Delta's own log store there checks
that the file is missing and then renames another one, forks a process for each step, and syncs
nothing, though the cut's row in the manifest survives a power cut. On other file systems Delta's
log store creates the file. Invariants:
1. A commit's version follows the one that its actions were made from. If somebody else has
   committed that version, nothing is written; the table is read again, and the actions are made
   again.
2. Only tables whose properties and features are all known (`delta.protocol`) are written without
   Delta.
3. On a local disk a version is durable before the cut that shows it is in the manifest.
"""

import dataclasses
import errno
import json
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession
from pyspark.sql.classic.dataframe import DataFrame

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.delta.files import DataFile, DeletionVectors, Layout, now_ms
from pyspark_tidemark.lake.delta.protocol import is_known, layout_of
from pyspark_tidemark.lake.files import RESTORE, sync, sync_place, sync_with_checksum

_LOG = "_delta_log"
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""The errors of `link` on file systems without hard links."""
_FRESH_S = 3600.0
"""For so long a listing is used without a look for newer versions. If there is one, our commit
fails, since its file exists: Delta keeps commits for weeks, so the file cannot be removed by then.
"""
_NUM_ACTIONS = "numActions"
_READ = ("protocol", "metaData", "remove", "add", "txn")
_REPLACES = ("CLONE", "CREATE OR REPLACE", "REPLACE TABLE")
"""How the operations begin that put another table in the place of one."""
_DIGITS = 20
"""Of a version, in the names of files."""
_COMMIT = re.compile(r"\d{20}\.json")
_CHECKPOINT = re.compile(r"\d{20}\.checkpoint\..*(parquet|json)")


@dataclasses.dataclass(frozen=True)
class Listing:
    """What one version of a table shows: its files, its columns, and its transactions."""

    version: int
    layout: Layout
    files: Mapping[str, DataFile]
    """By path."""
    read_at: float
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The log's action: properties, and the schema as JSON."""
    positions: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The last transaction of each application."""
    protocol: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The log's action: what readers and writers must know."""

    @classmethod
    def before_the_first(cls, root: str) -> "Listing":
        """The listing of a table that is not there yet."""
        return cls(-1, Layout(root, pa.schema([]), {}, {}), {}, time.monotonic())

    @property
    def fresh(self) -> bool:
        """Whether the next version may be put beside it without looking again."""
        return time.monotonic() - self.read_at < _FRESH_S

    def after(self, actions: Sequence[Mapping[str, Any]]) -> "Listing":
        """The listing of the next version, which commits these actions."""
        # By kind, not one after the other: the order of actions in a commit means nothing.
        by_kind = {kind: [each[kind] for each in actions if kind in each] for kind in _READ}
        metadata, layout, files_before = self.metadata, self.layout, self.files
        # Other columns may have the files' old names: bounds are read again by the new layout.
        for metadata in by_kind["metaData"]:
            layout = layout_of(metadata, layout.root)
            files_before = {
                path: DataFile.of(file.add, layout) for path, file in files_before.items()
            }
        removed = {remove["path"] for remove in by_kind["remove"]}
        files = {path: file for path, file in files_before.items() if path not in removed}
        files |= {add["path"]: DataFile.of(add, layout) for add in by_kind["add"]}
        positions = {**self.positions} | {
            txn["appId"]: int(txn["version"]) for txn in by_kind["txn"]
        }
        [protocol] = by_kind["protocol"] or [self.protocol]
        return Listing(
            self.version + 1, layout, files, time.monotonic(), metadata, positions, protocol
        )


def listing(spark: SparkSession, snapshot: Any, root: str) -> Listing | None:
    """What a snapshot of Delta's shows; None for a table that only Delta may write to."""
    version, metadata, protocol = version_of(snapshot)
    if not is_known(metadata, protocol):
        return None
    layout = layout_of(metadata, root)
    rows = DataFrame(snapshot.allFiles().toJSON().toDF(), spark).collect()
    files = [DataFile.of(json.loads(row.value), layout) for row in rows]
    by_path = {file.add["path"]: file for file in files}
    return Listing(
        version, layout, by_path, time.monotonic(), metadata, positions(snapshot), protocol
    )


def version_of(snapshot: Any) -> tuple[int, Mapping[str, Any], Mapping[str, Any]]:
    """The version of a snapshot of Delta's, its metadata and its protocol."""
    metadata, protocol = (
        json.loads(snapshot.metadata().json()),
        json.loads(snapshot.protocol().json()),
    )
    return int(snapshot.version()), metadata["metaData"], protocol["protocol"]


def positions(snapshot: Any) -> Mapping[str, int]:
    """The last transaction of each application in a snapshot of Delta's."""
    pairs, by_app = snapshot.transactions().iterator(), {}
    while pairs.hasNext():
        pair = pairs.next()
        by_app[str(pair._1())] = int(pair._2())  # noqa: SLF001 - Scala's names
    return by_app


def replayed(root: str) -> Listing | None:
    """The listing that the commits of a local table's log come to, read without a Spark job.

    None: there is no table, only Delta may write to it, or Delta must read it, since its log has a
    checkpoint.

    Raises:
        SourceError: ErrLakeDamaged.
    """
    log = Path(root) / _LOG
    names = _names(log)
    commits = [name for name in names if _COMMIT.fullmatch(name)]
    # Behind a checkpoint Delta cleans up commits: what is left does not make the table.
    whole = commits == [_commit_name(version) for version in range(len(commits))]
    if not commits or not whole or any("checkpoint" in name for name in names):
        return None
    versions = [_actions(log / name) for name in commits]
    try:
        newest = {
            kind: value
            for actions in versions
            for action in actions
            for kind, value in action.items()
        }
        if not is_known(newest["metaData"], newest["protocol"]):
            return None
        return reduce(Listing.after, versions, Listing.before_the_first(root))
    except (KeyError, ValueError, TypeError, AttributeError) as err:
        raise SourceError(
            "ErrLakeDamaged",
            f"the commits in {log} do not make up a table ({type(err).__name__}: {err}): {RESTORE}",
        ) from None


def check_whole(table: str) -> None:
    """Check that the commits behind the newest checkpoint, of a table in a directory, are whole:
    Delta takes an empty one for a version that changes nothing. `replayed` checks it, too.

    Raises:
        SourceError: ErrLakeDamaged.
    """
    log = Path(table) / _LOG
    names = _names(log)
    checkpoint = max((name[:_DIGITS] for name in names if _CHECKPOINT.match(name)), default="")
    for name in names:
        if _COMMIT.fullmatch(name) and name[:_DIGITS] > checkpoint:
            _actions(log / name)


def _names(log: Path) -> list[str]:
    return sorted(path.name for path in log.iterdir()) if log.is_dir() else []


def _actions(path: Path) -> list[dict[str, Any]]:
    return parsed_actions(path.read_bytes(), str(path))


def parsed_actions(content: bytes, place: str) -> list[dict[str, Any]]:
    """The actions of a commit's file. Pure.

    Raises:
        SourceError: ErrLakeDamaged, it ends amid a line, or has fewer lines than it says, or none.
    """
    try:
        # Not `splitlines` of text, which would take more than line feeds for ends of lines.
        actions = [json.loads(line) for line in content.splitlines() if line]
    except ValueError:
        actions = []
    if not all(isinstance(action, dict) for action in actions) or not _is_whole(actions):
        raise SourceError(
            "ErrLakeDamaged",
            f"{place} is no whole commit of a Delta table, so nobody can say what the table holds: "
            f"if it is the newest one, and its writer died before it was done, remove it; else {RESTORE}",
        )
    return actions


def _is_whole(actions: Sequence[Mapping[str, Any]]) -> bool:
    infos = (action["commitInfo"] for action in actions if "commitInfo" in action)
    info: Mapping[str, Any] = next(infos, {})
    number = (info.get("operationMetrics") or {}).get(_NUM_ACTIONS)
    return bool(actions) and number in (None, str(len(actions)))


def _lines(actions: Sequence[Mapping[str, Any]]) -> list[str]:
    """A commit's lines; what it says of itself says how many they are, too: of a file that was cut
    off between two lines nothing else would be amiss.
    """
    counted = {"operationMetrics": {_NUM_ACTIONS: str(len(actions))}}
    return [
        json.dumps({"commitInfo": {**action["commitInfo"], **counted}})
        if "commitInfo" in action
        else json.dumps(action)
        for action in actions
    ]


def commit(log: Any, classes: Any, version: int, actions: Sequence[Mapping[str, Any]]) -> bool:
    """Write a version with these actions; False if the version is there already."""
    lines = classes.java.util.ArrayList()
    for line in _lines(actions):
        lines.add(line)
    path = classes.org.apache.hadoop.fs.Path(log.logPath(), _commit_name(version))
    rows = classes.org.apache.spark.api.python.PythonUtils.toSeq(lines).iterator()
    # By Delta's own log store: it knows how this file system creates a file only if there is none.
    try:
        log.store().write(path, rows, False, log.newDeltaHadoopConf())  # noqa: FBT003 - Java's signature: overwrite
    except Py4JJavaError as err:
        if "FileAlreadyExistsException" not in str(err.java_exception.getClass().getName()):
            raise
        return False
    return True


def commit_on_disk(table: str, version: int, actions: Sequence[Mapping[str, Any]]) -> bool | None:
    """As `commit`, of a table in a directory; durable when it returns.

    None: the file system has no hard links, and nothing was written.

    Raises:
        OSError: the disk is full, or fails.
    """
    directory = Path(table) / _LOG
    path, staged = directory / _commit_name(version), directory / f".{uuid.uuid4()}.tmp"
    _sync_added(table, actions)
    try:
        with staged.open("wb") as file:
            file.writelines(line.encode() + b"\n" for line in _lines(actions))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(staged, path)
        except FileExistsError:
            return False
        except OSError as err:
            if err.errno in _NO_LINKS:
                return None
            raise
    finally:
        staged.unlink(missing_ok=True)
    # Hadoop compares a file with the checksum beside it, which may be that of a failed attempt.
    (directory / f".{path.name}.crc").unlink(missing_ok=True)
    _sync_names(directory, version)
    return True


def settle(table: str, before: int) -> None:
    """Make durable what Spark has put into a table in a directory after version `before`."""
    directory, version = Path(table) / _LOG, before + 1
    while (path := directory / _commit_name(version)).exists():
        _sync_added(table, _actions(path))
        sync_with_checksum(path)
        sync_with_checksum(path.with_suffix(".crc"))  # Delta's own, of what the version shows
        version += 1
    if version > before + 1:
        _sync_names(directory, before + 1)


def settle_checkpoint(table: str, version: int) -> None:
    """Make a checkpoint durable that Delta has written of a version, in one file."""
    log = Path(table) / _LOG
    sync_with_checksum(log / f"{version:020}.checkpoint.parquet")
    sync_with_checksum(log / "_last_checkpoint")
    sync(log)


def _sync_names(log: Path, first: int) -> None:
    """Make the names of versions durable; with the first one those of the directories are new, too:
    the table's, its database's.
    """
    sync(log)
    if first == 0:
        sync(log.parent)
        sync_place(str(log.parent))


def _sync_added(table: str, actions: Sequence[Mapping[str, Any]]) -> None:
    """Make the files durable that a version adds, and the names they have."""
    vectors, files = DeletionVectors(table), set[Path]()
    for add in (action["add"] for action in actions if "add" in action):
        # A shallow clone names files of another table, by URI: not this one's to see to.
        if not urlsplit(add["path"]).scheme:
            files.add(Path(table, unquote(add["path"])))
        if add.get("deletionVector") and (place := vectors.place(add["deletionVector"])):
            files.add(Path(place))
    for path in files:  # one that a later version has taken out may be gone
        sync_with_checksum(path)
    # A partition's directory may be new, and so a name in the one above it.
    for directory in {each for file in files for each in _up_to(file.parent, Path(table))}:
        with suppress(FileNotFoundError):
            sync(directory)


def _up_to(directory: Path, top: Path) -> list[Path]:
    """A directory and those above it, up to `top` if that is one of them."""
    above = [directory, *directory.parents]
    return above[: above.index(top) + 1] if top in above else [directory]


def committed_at(log: Any, classes: Any, version: int) -> datetime | None:
    """When a version was written, by the clock of the log's file system; None: the log does not go
    back so far.
    """
    path = classes.org.apache.hadoop.fs.Path(log.logPath(), _commit_name(version))
    try:
        status = path.getFileSystem(log.newDeltaHadoopConf()).getFileStatus(path)
    except Py4JJavaError as err:
        if "FileNotFoundException" not in str(err.java_exception.getClass().getName()):
            raise
        return None
    return datetime.fromtimestamp(status.getModificationTime() / 1000, UTC)


def position_at(log: Any, classes: Any, app_id: str, version: int) -> int | None:
    """The last transaction of an application in a version; None: it has none."""
    for _, actions in commits_between(log, classes, version, version):
        for action in actions:
            if action.get("txn", {}).get("appId") == app_id:
                return int(action["txn"]["version"])
    # The version has only other columns, or other files, or its commit was cleaned up.
    none = classes.scala.Option.empty()
    return positions(log.getSnapshotAt(version, none, none, False)).get(app_id)  # noqa: FBT003 - Scala's signature: whether to refuse what is older than removed files are kept


def commits_between(
    log: Any, classes: Any, first: int, last: int
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The actions of the versions from `first` to `last`, oldest first; without those that the log
    does not have any more.
    """
    for version in range(first, last + 1):
        path = classes.org.apache.hadoop.fs.Path(log.logPath(), _commit_name(version))
        try:
            text = str(log.store().read(path, log.newDeltaHadoopConf()).mkString("\n"))
        except Py4JJavaError as err:
            if "FileNotFoundException" not in str(err.java_exception.getClass().getName()):
                raise
            continue
        yield version, parsed_actions(text.encode(), str(path.toString()))


def continues(version: int, commits: Iterable[tuple[int, Sequence[Mapping[str, Any]]]]) -> bool:
    """Whether the last of some commits, those after `version`, shows what that one shows, or what
    came on top of it: whether nobody has restored a version before it, or replaced the table. Pure.
    """
    shows, newest = {version: True}, version
    for number, actions in commits:
        infos = [action["commitInfo"] for action in actions if "commitInfo" in action]
        info: Mapping[str, Any] = infos[0] if infos else {}
        operation = str(info.get("operation", ""))
        if operation == "RESTORE":
            # By time: which version that was is not said.
            restored = str((info.get("operationParameters") or {}).get("version"))
            shows[number] = restored.isdecimal() and shows.get(int(restored), False)
        else:
            replaced = operation.startswith(_REPLACES)
            shows[number] = shows[newest] and not replaced
        newest = number
    return shows[newest]


def commit_file(table: str, version: int) -> tuple[int, int, int] | None:
    """What tells the file of a version, of a table in a directory, from another one that is put in
    its place; None: there is none.
    """
    try:
        status = (Path(table) / _LOG / _commit_name(version)).stat()
    except FileNotFoundError:
        return None
    # A disk gives the number of a file that was removed to the next one.
    return status.st_ino, status.st_mtime_ns, status.st_size


def commit_info(operation: str, parameters: Mapping[str, str], read_version: int) -> dict[str, Any]:
    """The action that describes a commit, as `DESCRIBE HISTORY` shows it."""
    info: dict[str, Any] = {
        "timestamp": now_ms(),
        "readVersion": read_version,
        "isBlindAppend": False,
    }
    info |= {
        "operation": operation,
        "operationParameters": dict(parameters),
        "engineInfo": "tidemark",
    }
    return {"commitInfo": info}


def in_commit_timestamp(metadata: Mapping[str, Any], before_ms: int) -> dict[str, Any]:
    """What the description of a commit has to say beside, in a table that keeps the times of its
    commits there: later than `before_ms`, the time of the commit before. Pure but for the clock.

    Delta writes no more into a table with a commit that lacks it.
    """
    if metadata["configuration"].get("delta.enableInCommitTimestamps") != "true":
        return {}
    return {"inCommitTimestamp": max(now_ms(), before_ms + 1)}


def fence(app_id: str, end_ts: int) -> dict[str, Any]:
    """The action that says up to where a table is applied: Delta's transaction identifier."""
    return {"txn": {"appId": app_id, "version": end_ts, "lastUpdated": now_ms()}}


def _commit_name(version: int) -> str:
    return f"{version:020}.json"
