"""A lake at each of its cuts, read by engines that share no code with the product: delta-rs for
Delta, pyiceberg for Iceberg. They live in an environment of their own (`make readers`).
"""

import json
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark_tidemark.lake.cut_record import CutRecord, versions_at
from pyspark_tidemark.lake.files import LocalFiles
from pyspark_tidemark.lake.manifest import DIRECTORY, cuts_in

from tests.e2e.chaos.history import Row, Tables, Value
from tests.e2e.chaos.memory_job import frames

PYTHON = Path(sys.prefix, "readers", "bin", "python")
ENGINES = {"delta": "delta_rs", "iceberg": "pyiceberg"}
MEMORY = "memory"
"""A lake in memory: see `memory_job`."""
TARGETS = (*ENGINES, MEMORY)
_SCRIPT = Path(__file__).parents[2] / "readers.py"
Columns = Mapping[str, Sequence[str]]
Span = tuple[int, int]
"""start_ts and end_ts of a cut."""


class LakeError(AssertionError):
    """A table cannot be read, or has a key twice."""


class Lake(ABC):
    """One lake; `columns` are those of its tables in `database`, the key first."""

    def __init__(self, root: Path, database: str, columns: Columns) -> None:
        self.root = root
        self._database = database
        self._columns = columns

    @abstractmethod
    def cuts(self) -> list[Span]:
        """All that are visible now."""

    @abstractmethod
    def newest(self, table: str) -> dict[Value, Row]:
        """The rows of a table at the newest cut. Raises as `at_each_cut`."""

    @abstractmethod
    def at_each_cut(self) -> Iterator[tuple[Span, Tables]]:
        """All tables at each cut, in order; one that a cut does not name is empty.

        Raises:
            LakeError: see there.
        """


def lake_of(target: str, root: Path, database: str, columns: Columns) -> Lake:
    """The lake of that kind in a directory."""
    if target == MEMORY:
        return MemoryLakeLog(root, database, columns)
    return FileLake(root, database, columns, target)


class FileLake(Lake):
    """Tables with versions."""

    def __init__(self, root: Path, database: str, columns: Columns, kind: str) -> None:
        super().__init__(root, database, columns)
        self._kind = kind
        self._scratch = root.with_suffix(".read")

    def cuts(self) -> list[Span]:
        return [(cut.start_ts, cut.end_ts) for cut in self._records()]

    def newest(self, table: str) -> dict[Value, Row]:
        cuts = self._records()
        pairs = [pair for pair in _tables_at(cuts, cuts[-1]).items() if pair[0] == table]
        return dict(*self._versions(pairs).values())

    def at_each_cut(self) -> Iterator[tuple[Span, Tables]]:
        cuts = self._records()
        versions = self._versions({pair for cut in cuts for pair in _tables_at(cuts, cut).items()})
        for cut in cuts:
            shown = _tables_at(cuts, cut)
            tables: Tables = {
                table: versions[table, shown[table]] if table in shown else {}
                for table in self._columns
            }
            yield (cut.start_ts, cut.end_ts), tables

    def _records(self) -> list[CutRecord]:
        return cuts_in(LocalFiles(self.root / DIRECTORY))

    def _versions(
        self, pairs: Collection[tuple[str, int]]
    ) -> dict[tuple[str, int], dict[Value, Row]]:
        """The rows of tables at versions."""
        wanted = sorted(pairs)
        jobs = [
            {
                "engine": ENGINES[self._kind],
                "path": str(self._place(table)),
                "version": version,
                "out": str(self._scratch / f"{number}.arrow"),
            }
            for number, (table, version) in enumerate(wanted)
        ]
        self._scratch.mkdir(exist_ok=True)
        subprocess.run([PYTHON, _SCRIPT], input=json.dumps(jobs), text=True, check=True)
        found = {}
        for pair, job in zip(wanted, jobs, strict=True):
            out = Path(str(job["out"]))
            found[pair] = self._rows(pair[0], out)
            out.unlink()
        return found

    def _place(self, table: str) -> Path:
        place = self.root / self._database / table
        if self._kind == "iceberg":
            version = int((place / "metadata" / "version-hint.text").read_text())
            return place / "metadata" / f"v{version}.metadata.json"
        return place

    def _rows(self, table: str, file: Path) -> dict[Value, Row]:
        try:
            with pa.OSFile(str(file), "rb") as source:
                read: pa.Table = pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            raise LakeError(f"{table} cannot be read: {file.read_text()}") from None
        columns: list[list[Any]] = [read[name].to_pylist() for name in self._columns[table]]
        rows = {row[0]: row for row in zip(*columns, strict=True)}
        if len(rows) != read.num_rows:
            raise LakeError(f"{table} has {read.num_rows - len(rows)} keys twice")
        return rows


class MemoryLakeLog(Lake):
    """What the job of a lake in memory has written of its cuts."""

    def __init__(self, root: Path, database: str, columns: Columns) -> None:
        super().__init__(root, database, columns)
        self._spans: list[Span] = []
        self._seen = 0
        """How many bytes of the log were read."""

    def cuts(self) -> list[Span]:
        for end, frame in frames(self.root, self._seen):
            self._seen = end
            self._spans.append(frame.span)
        return list(self._spans)

    def newest(self, table: str) -> dict[Value, Row]:
        *_, (_, tables) = self.at_each_cut()
        return tables[table]

    def at_each_cut(self) -> Iterator[tuple[Span, Tables]]:
        tables: Tables = {table: {} for table in self._columns}
        for _, frame in frames(self.root):
            if frame.doubled:
                raise LakeError(f"inserts of keys that are there: {frame.doubled[:3]}")
            for name, held in frame.tables.items():
                table = name.partition(".")[2]
                rows = [tuple(row[c] for c in self._columns[table]) for row in held.rows.values()]
                tables[table] = {row[0]: row for row in rows}
            yield frame.span, dict(tables)


def _tables_at(cuts: Sequence[CutRecord], cut: CutRecord) -> dict[str, int]:
    """The version of each table that a cut shows, by its name without the database."""
    named = versions_at(cuts, cut.end_ts)
    return {name.partition(".")[2]: version for name, version in named.items()}
