"""The files of one directory, as the manifest needs them: each is there whole, or not at all.

Two kinds of directory: one on a disk of this machine, or mounted (`LocalFiles`), whose only writer
holds a lock; and one that Hadoop's file systems reach (`lake.hadoop`), where any number of drivers
may believe to be the only writer. Data files of both kinds are reached by pyarrow (`file_system`).
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pyspark_tidemark.errors import SourceError

_SAMPLES, _SAMPLE_ROWS = 16, 128
_MOST_DISTINCT = 0.95
"""Of all values of a sample, of a column that gets a dictionary."""


RESTORE = "restore it from a backup, or create a new changefeed with a new target"
"""What helps against a file of a lake that is damaged, or gone."""


class Files(Protocol):
    """Reading and writing files by name."""

    def names(self) -> list[str]:
        """The names there are, hidden ones left out, in order; none if there is no directory."""

    def read(self, name: str) -> str:
        """A file's text.

        Raises:
            FileNotFoundError: it is gone.
            SourceError: ErrManifestCorrupt, it is no text.
        """

    def create(self, name: str, text: str) -> bool:
        """Write a new file; durable when it returns.

        False: there is one of that name, which stays as it is.
        """

    def remove(self, names: list[str]) -> None:
        """Remove files; it is no error if one is gone."""


class LocalFiles:
    """A directory of this machine, or a mounted one; who writes holds its lock."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def names(self) -> list[str]:
        """See `Files`."""
        return sorted(path.name for path in self.directory.glob("[!.]*"))

    def read(self, name: str) -> str:
        """See `Files`."""
        path = self.directory / name
        return decoded(path.read_bytes(), str(path))

    def create(self, name: str, text: str) -> bool:
        """See `Files`."""
        # Exclusive by the directory's lock alone.
        if (self.directory / name).exists():
            return False
        self.replace(name, text)
        return True

    def replace(self, name: str, text: str) -> None:
        """Write a file anew, or for the first time.

        Raises:
            SourceError: ErrTargetFull.
        """
        # Staged and synced, then renamed, then the directory synced: a crash leaves the old file or
        # the new one, and after the return only the new one.
        staged = self.directory / ".staged"
        try:
            with staged.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            staged.rename(self.directory / name)
            sync(self.directory)
        except OSError as err:
            raise SourceError(
                "ErrTargetFull",
                f"cannot write to {self.directory} ({err.strerror}); make room",
                retryable=True,
            ) from None

    def remove(self, names: list[str]) -> None:
        """See `Files`."""
        for name in names:
            with suppress(FileNotFoundError):
                (self.directory / name).unlink()


def decoded(content: bytes, place: str) -> str:
    """The text of a file.

    Raises:
        SourceError: ErrManifestCorrupt, it is none.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as err:
        raise SourceError(
            "ErrManifestCorrupt", f"{place} is damaged: {err.reason} at byte {err.start}: {RESTORE}"
        ) from None


def is_on_disk(path: str) -> bool:
    """Whether a path or URI lies on a disk of this machine, or a mounted one."""
    return "://" not in path or path.startswith("file:")


def sync(path: Path | str) -> None:
    """Make a file's content, or a directory's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_with_checksum(path: Path) -> None:
    """Make a file durable, and the checksum that Hadoop may have put beside it; a file that is gone
    is no error.
    """
    # Hadoop takes a file whose checksum is empty for a damaged one.
    for each in (path, path.with_name(f".{path.name}.crc")):
        with suppress(FileNotFoundError):
            sync(each)


def sync_place(path: str) -> None:
    """Make it durable that a table is at a path, or is not, on a disk of this machine: its name,
    and its database's.
    """
    if is_on_disk(path):
        for directory in Path(file_system(path)[1]).parents[:2]:
            with suppress(FileNotFoundError):
                sync(directory)


def parquet_file(system: Any, path: Any, *, pre_buffer: bool = False) -> Any:
    """A Parquet file (pyarrow's) of a file system of pyarrow's (None: this machine's), to be read.

    Raises:
        SourceError: ErrLakeDamaged, it is not whole.
        FileNotFoundError: it is gone.
    """
    try:
        return pq.ParquetFile(path, filesystem=system, pre_buffer=pre_buffer)
    except pa.ArrowInvalid as err:
        cause = str(err).partition("\n")[0]
        raise SourceError(
            "ErrLakeDamaged", f"{path} is no whole Parquet file ({cause}): {RESTORE}"
        ) from None


def file_system(path: str) -> tuple[Any, str]:
    """Pyarrow's file system for a path or URI, and the path in it."""
    if path.startswith("file:"):
        return pafs.LocalFileSystem(), "/" + path.removeprefix("file:").lstrip("/")
    if is_on_disk(path):
        return pafs.LocalFileSystem(), path
    system, inside = pafs.FileSystem.from_uri(path.replace("s3a://", "s3://", 1))
    return system, inside


def repeating_columns(rows: Any) -> list[str]:
    """The columns of a new Parquet file that get a dictionary: those with values that come again,
    by a sample of its first rows (pyarrow.Table).
    """
    # To look up each value of a column in which none comes again took half of what a file costs,
    # and made it larger.
    last = max(0, len(rows) - _SAMPLE_ROWS)
    places = sorted({last * number // (_SAMPLES - 1) for number in range(_SAMPLES)})
    sample = pa.concat_tables([rows.slice(place, _SAMPLE_ROWS) for place in places])
    most = _MOST_DISTINCT * len(sample)
    return [
        name
        for name, column in zip(sample.column_names, sample.columns, strict=True)
        if pa.types.is_nested(column.type) or pc.count_distinct(column, mode="all").as_py() <= most
    ]
