"""Reads tables of lakes by engines that share no code with Tidemark. Not a part of the test suite's
process: pyiceberg cannot be installed beside etcd3, so this runs in an environment of its own
(`make readers`).

    python tests/readers.py <jobs.json

Each job names an engine, a table's directory (of Iceberg: its newest metadata), a version if it is
not the newest, and a file for the rows (Arrow) or for what the engine says instead (text).
"""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import polars as pl
import pyarrow as pa
from pyiceberg.table import StaticTable


def delta_rs(path: str, version: int | None) -> Any:
    """By DataFusion."""
    table = deltalake.DeltaTable(path, version=version)
    query = deltalake.QueryBuilder().register("t", table).execute("SELECT * FROM t")
    return pa.table(query.read_all())


def delta_rs_pyarrow(path: str, version: int | None) -> Any:
    """By pyarrow's datasets, as many tools do."""
    return deltalake.DeltaTable(path, version=version).to_pyarrow_table()


def polars_delta(path: str, version: int | None) -> Any:
    """By Polars."""
    return pl.scan_delta(path, version=version).collect().to_arrow()


def pyiceberg(path: str, version: int | None) -> Any:
    """By pyiceberg; a version is a snapshot's id."""
    return StaticTable.from_metadata(path).scan(snapshot_id=version).to_arrow()


def polars_iceberg(path: str, version: int | None) -> Any:
    """By Polars, whose scans are planned by pyiceberg."""
    return pl.scan_iceberg(path, snapshot_id=version).collect().to_arrow()


@functools.cache
def _duckdb() -> Any:
    """A database in memory, with the extensions that are packages of this environment."""
    database = duckdb.connect(config={"allow_unsigned_extensions": "true"})
    packages = Path(duckdb.__file__).parents[1]
    for name in ("icu", "avro", "delta", "iceberg"):
        [file] = (packages / f"duckdb_extension_{name}").rglob("*.duckdb_extension")
        database.execute(f"LOAD '{file}'")
    database.execute("SET TimeZone = 'UTC'")
    return database


def duckdb_delta(path: str, version: int | None) -> Any:
    """By DuckDB, whose extension is Delta's kernel in Rust."""
    at = "" if version is None else f", version => {version}"
    return _duckdb().sql(f"SELECT * FROM delta_scan('{path}'{at})").to_arrow_table()


def duckdb_iceberg(path: str, version: int | None) -> Any:
    """By DuckDB's own reader of Iceberg."""
    at = "" if version is None else f", snapshot_from_id => {version}"
    return _duckdb().sql(f"SELECT * FROM iceberg_scan('{path}'{at})").to_arrow_table()


def delta_rs_compacts(path: str, version: int | None) -> Any:
    """Not a reader: joins small files, as somebody else may at any time."""
    del version
    table = deltalake.DeltaTable(path)
    metrics = table.optimize.compact()
    return pa.table({"removed": [metrics["numFilesRemoved"]]})


ENGINES: dict[str, Callable[[str, int | None], Any]] = {
    engine.__name__: engine
    for engine in (
        delta_rs,
        delta_rs_pyarrow,
        polars_delta,
        pyiceberg,
        polars_iceberg,
        duckdb_delta,
        duckdb_iceberg,
        delta_rs_compacts,
    )
}


def main() -> None:
    """The command."""
    for job in json.load(sys.stdin):
        path = Path(job["out"])
        try:
            rows = ENGINES[job["engine"]](job["path"], job.get("version"))
        except Exception as err:  # noqa: BLE001 - what engines refuse is an answer, too
            path.write_text(f"{type(err).__name__}: {err}")
            continue
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
            writer.write_table(rows)


if __name__ == "__main__":
    main()
