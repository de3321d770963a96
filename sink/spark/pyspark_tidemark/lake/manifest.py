"""The manifest of a lake in files, `<root>/_tidemark_cuts`: one JSON line a cut; a cut is visible when it stands there.

Invariants:
1. A cut is committed after every table holds it, and before it is acknowledged to the changefeed.
2. Cuts follow each other without gap or overlap: each starts where the one before it ended.
3. One writer: the directory is locked as long as the manifest is open.
4. A roll-up is written before the files that it replaces are removed; readers take a cut that they see twice once.
Format: docs/format/lake-manifest.md. Renames make cuts visible, and a lock keeps out a second writer: the directory
must be on a file system that has both, not in an object store.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Protocol

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.cuts import CutRecord, records, rolled

DIRECTORY = "_tidemark_cuts"
ROLL_UP_FILES = 256
_SINGLE, _ROLLED = "[0-9]*.json", "[0-9]*-[0-9]*.json"


class Manifest(Protocol):
    """The cuts of one target, in order, and the right to write to it."""

    last: CutRecord | None

    def commit(self, record: CutRecord) -> None:
        """Make a cut visible; durable when it returns.

        Raises:
            SourceError: ErrCutGap, the cut does not start where the last one ended.
        """

    def cuts(self) -> list[CutRecord]:
        """All kept cuts."""

    def tidy(self, horizon: datetime) -> None:
        """Now and then: keep it small. Cuts from before `horizon` may go, but never the one that shows that time."""


class FileManifest:
    """The manifest of a lake that is a directory."""

    def __init__(self, directory: Path, last: CutRecord | None) -> None:
        self._directory = directory
        self._since_tidied = ROLL_UP_FILES  # files may have been left by an earlier life
        self.last = last

    @classmethod
    @contextmanager
    def opened(cls, root: str, changefeed: str) -> Iterator["FileManifest"]:
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
        """See `Manifest`."""
        check_follows(self.last, record)
        self._write(f"{record.end_ts:020d}.json", [record])
        self.last = record

    def replace(self, record: CutRecord) -> None:
        """Write the newest cut anew, its tables repaired; durable when it returns."""
        assert self.last is not None
        assert record.end_ts == self.last.end_ts, "a cut is never taken back"
        self._write(f"{record.end_ts:020d}.json", [record])
        self.last = record

    def cuts(self) -> list[CutRecord]:
        """See `Manifest`."""
        return read_cuts(self._directory)

    def tidy(self, horizon: datetime) -> None:
        """Once for so many cuts, roll their files up, and forget whole roll-ups from before `horizon`."""
        self._since_tidied += 1
        if self._since_tidied >= ROLL_UP_FILES:
            self._since_tidied = 0
            self.roll_up()
            self.forget(horizon)

    def roll_up(self) -> None:
        """Put the files of many cuts into one, when there are many; a crash in between repeats it."""
        single = sorted(path for path in self._directory.glob(_SINGLE) if "-" not in path.stem)
        if len(single) < ROLL_UP_FILES:
            return
        chosen = single[:ROLL_UP_FILES]
        new = _read(chosen)
        before = [cut for cut in self.cuts() if cut.end_ts < new[0].end_ts]
        self._write(f"{chosen[0].stem}-{chosen[-1].stem}.json", rolled(before, new))
        self._remove(chosen)

    def forget(self, before: datetime) -> None:
        """Drop roll-ups of cuts that were all applied before a time, but for the last of these: it shows that time."""
        gone = []
        for path in sorted(self._directory.glob(_ROLLED)):
            if datetime.fromisoformat(_read([path])[-1].applied_at) >= before:
                break
            gone.append(path)
        self._remove(gone[:-1])

    def _write(self, name: str, cuts: Sequence[CutRecord]) -> None:
        staged = self._directory / ".staged"
        try:
            with staged.open("w", encoding="utf-8") as file:
                file.writelines(cut.to_json() + "\n" for cut in cuts)
                file.flush()
                os.fsync(file.fileno())
            staged.rename(self._directory / name)
            _sync(self._directory)
        except OSError as err:
            raise SourceError(
                "ErrTargetFull", f"cannot write to {self._directory} ({err.strerror}); make room", retryable=True
            ) from None

    def _remove(self, paths: Sequence[Path]) -> None:
        for path in paths:
            path.unlink()


def read_cuts(directory: Path, read: Callable[[Path], str] = Path.read_text) -> list[CutRecord]:
    """All cuts of a manifest's directory, also while it is being written.

    Raises:
        SourceError: ErrManifestCorrupt.
    """
    for _ in range(3):
        try:
            return records(line for path in sorted(directory.glob(_SINGLE)) for line in read(path).splitlines())
        except FileNotFoundError:  # rolled up between the listing and the reading
            continue
    raise SourceError("ErrManifestCorrupt", f"{directory} changes too fast to be read; try again", retryable=True)


def check_follows(last: CutRecord | None, record: CutRecord) -> None:
    """See that a cut starts where the last one ended.

    Raises:
        SourceError: ErrCutGap.
    """
    if last is not None and record.start_ts != last.end_ts:
        raise SourceError("ErrCutGap", f"the lake ends at {last.end_ts}, but the next cut starts at {record.start_ts}")


def _read(paths: Sequence[Path]) -> list[CutRecord]:
    return records(line for path in paths for line in path.read_text(encoding="utf-8").splitlines())


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SourceError("ErrTargetBusy", f"another job writes to {directory.parent}; stop it first") from None


def _newest(directory: Path) -> CutRecord | None:
    """The newest cut: the last line of the file whose name ends with the largest end_ts; its own, before a roll-up."""
    path = max(directory.glob(_SINGLE), key=lambda found: (found.stem.rpartition("-")[2], found.stem), default=None)
    if path is None:
        return None
    found = _read([path])
    if not found:
        raise SourceError("ErrManifestCorrupt", f"{path} is empty; remove it if the cut before it is the newest")
    return found[-1]


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
