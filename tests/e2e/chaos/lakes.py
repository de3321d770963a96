"""A lake at each of its cuts, read by engines that share no code with the product: delta-rs for
Delta, pyiceberg for Iceberg. They live in an environment of their own (`make readers`).
"""

import json
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark_tidemark.lake.cut_record import CutRecord, versions_at

from tests.e2e.chaos.history import Row, Tables, Value

PYTHON = Path(sys.prefix, "readers", "bin", "python")
_SCRIPT = Path(__file__).parents[2] / "readers.py"
_ENGINES = {"delta": "delta_rs", "iceberg": "pyiceberg"}
Versions = dict[tuple[str, int], dict[Value, Row]]
"""The rows of a table at a version."""


class LakeError(AssertionError):
    """A table cannot be read, or has a key twice."""


@dataclass
class Lake:
    """One lake in a directory; `columns` are those of its tables, the key first."""

    kind: str
    root: Path
    database: str
    columns: Mapping[str, Sequence[str]]
    scratch: Path

    def versions(self, cuts: Sequence[CutRecord]) -> Versions:
        """All versions of tables that cuts name.

        Raises:
            LakeError: see there.
        """
        return self.versions_of(
            {pair for cut in cuts for pair in self.tables_at(cuts, cut).items()}
        )

    def versions_of(self, pairs: Collection[tuple[str, int]]) -> Versions:
        """The rows of tables at versions. Raises as `versions`."""
        wanted = sorted(pairs)
        jobs = [
            {
                "engine": _ENGINES[self.kind],
                "path": str(self._place(table)),
                "version": version,
                "out": str(self.scratch / f"{number}.arrow"),
            }
            for number, (table, version) in enumerate(wanted)
        ]
        self.scratch.mkdir(exist_ok=True)
        subprocess.run([PYTHON, _SCRIPT], input=json.dumps(jobs), text=True, check=True)
        found = {}
        for pair, job in zip(wanted, jobs, strict=True):
            out = Path(str(job["out"]))
            found[pair] = self._rows(pair[0], out)
            out.unlink()
        return found

    def tables_at(self, cuts: Sequence[CutRecord], cut: CutRecord) -> dict[str, int]:
        """The version of each table that a cut shows, by its name without the database."""
        named = versions_at(cuts, cut.end_ts)
        return {name.partition(".")[2]: version for name, version in named.items()}

    def _place(self, table: str) -> Path:
        place = self.root / self.database / table
        if self.kind == "iceberg":
            version = int((place / "metadata" / "version-hint.text").read_text())
            return place / "metadata" / f"v{version}.metadata.json"
        return place

    def _rows(self, table: str, file: Path) -> dict[Value, Row]:
        try:
            with pa.OSFile(str(file), "rb") as source:
                read: pa.Table = pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            raise LakeError(f"{table} cannot be read: {file.read_text()}") from None
        columns: list[list[Any]] = [read[name].to_pylist() for name in self.columns[table]]
        rows = {row[0]: row for row in zip(*columns, strict=True)}
        if len(rows) != read.num_rows:
            raise LakeError(f"{table} has {read.num_rows - len(rows)} keys twice")
        return rows


def tables_of(
    shown: Mapping[str, int], versions: Versions, columns: Mapping[str, Sequence[str]]
) -> Tables:
    """All tables as a cut shows them; one that it does not name is empty."""
    return {table: versions[table, shown[table]] if table in shown else {} for table in columns}
