"""The manifest of a lake: one JSON document a cut in `<root>/_tidemark_cuts`; a cut is visible when it stands there.

Invariants:
1. A cut is committed after every table holds it, and before it is acknowledged to the changefeed.
2. Cuts follow each other without gap or overlap: each starts where the one before it ended.
3. One writer: the directory is locked as long as the manifest is open.
Format: docs/format/lake-manifest.md.
"""

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark_tidemark.errors import SourceError

FORMAT = 1
DIRECTORY = "_tidemark_cuts"


@dataclasses.dataclass(frozen=True)
class TableCut:
    """One table in a cut: changes applied, and the version (Delta) or cut (Parquet) that holds them."""

    table: str
    rows: int
    version: int


@dataclasses.dataclass(frozen=True)
class CutRecord:
    """One committed cut `(start_ts, end_ts]`."""

    changefeed: str
    start_ts: int
    end_ts: int
    batch: int
    applied_at: str
    tables: tuple[TableCut, ...]

    def to_json(self) -> str:
        """The document, in one line."""
        return json.dumps({"format": FORMAT} | dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "CutRecord":
        """Read a document.

        Raises:
            SourceError: ErrManifestCorrupt, not a document of this format.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.pop("format") != FORMAT:
                raise SourceError("ErrManifestCorrupt", f"the manifest has another format than {FORMAT}: {text[:80]}")
            tables = tuple(TableCut(**item) for item in fields.pop("tables"))
            return cls(tables=tables, **fields)
        except (ValueError, KeyError, TypeError) as err:
            raise SourceError("ErrManifestCorrupt", f"the manifest cannot be read: {err} in {text[:80]!r}") from None


class Manifest:
    """The cuts of one lake, in order."""

    def __init__(self, directory: Path, last: CutRecord | None) -> None:
        self._directory = directory
        self.last = last

    @classmethod
    @contextmanager
    def opened(cls, root: str, changefeed: str) -> Iterator["Manifest"]:
        """The manifest for the block, created if there is none.

        Raises:
            SourceError: ErrTargetUnusable, ErrTargetBusy, ErrTargetForeign or ErrManifestCorrupt.
        """
        directory = Path(root) / DIRECTORY
        try:
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as err:
            raise SourceError("ErrTargetUnusable", f"cannot write to {directory}: {err.strerror}") from None
        try:
            _lock(descriptor, directory)
            last = _newest(directory)
            if last is not None and last.changefeed != changefeed:
                raise SourceError(
                    "ErrTargetForeign", f"{root} is the lake of changefeed {last.changefeed!r}; choose another --target"
                )
            yield cls(directory, last)
        finally:
            os.close(descriptor)

    def commit(self, record: CutRecord) -> None:
        """Make a cut visible; durable when it returns.

        Raises:
            SourceError: ErrCutGap, the cut does not start where the last one ended.
        """
        if self.last is not None and record.start_ts != self.last.end_ts:
            raise SourceError(
                "ErrCutGap", f"the lake ends at {self.last.end_ts}, but the next cut starts at {record.start_ts}"
            )
        final = self._directory / f"{record.end_ts:020d}.json"
        staged = self._directory / ".staged"
        with staged.open("w", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")
            file.flush()
            os.fsync(file.fileno())
        staged.rename(final)
        _sync(self._directory)
        self.last = record


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SourceError("ErrTargetBusy", f"another job writes to {directory.parent}; stop it first") from None


def _newest(directory: Path) -> CutRecord | None:
    newest = max(directory.glob("*.json"), default=None)
    return None if newest is None else CutRecord.from_json(newest.read_text(encoding="utf-8"))


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
