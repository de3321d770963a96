"""Fuzzing of TiDB's and MySQL's table documents: real ones, mutated,
as a changefeed's creation reads them.

Whatever the document, the answer is a table or an error of the project that says what is wrong:

    .venv/bin/python -m tests.fuzz.table_info --seconds 600 --seed 1
"""

import argparse
import json
import random
import sys
import time
import traceback

from server.capture.creation import NewChangefeed
from server.capture.source.mysql import mysql_table
from server.changefeed.columns import ALL_COLUMNS, ColumnRules
from server.changefeed.history import by_id, table_json
from server.changefeed.table import TableRecord
from server.puller.tidb.table import part_spans, removed_from, tidb_table
from storage.defect import DefectError
from storage.model.errors import CorruptError, TidemarkError
from storage.mysql.schema import Column, Table, Type
from storage.tidb.ddl import Job
from storage.tidb.schema_history import SchemaHistory
from tests.fuzz.mutation import mutated
from tests.unit.storage.tidb import vectors


def documents() -> list[dict]:
    """Every TableInfo that the vectors' real TiDB wrote."""
    jobs = vectors.lines("ddl_jobs")
    return [info for job in jobs if (info := (job["binlog"] or {}).get("TableInfo"))]


def mysql_document() -> dict:
    """A record of a MySQL table with each type."""
    columns = [
        Column(
            name=kind.name.lower(),
            type=kind,
            meta=0x0A02 if kind is Type.NEWDECIMAL else 6,
            elems=("a", "b"),
        )
        for kind in Type
    ]
    readable = [
        each
        for each in columns
        if each.name not in ("newdate", "blob_compressed", "varchar_compressed")
    ]
    return Table(7, "t", tuple(readable), (readable[3].name,)).to_doc()


def try_tidb(text: str) -> None:
    """The way of a document given to CreateChangefeed."""
    new = NewChangefeed(id="fuzz", sink_uri="delta:///lake", tables=[("s", text)])
    [record] = new.records()
    table = tidb_table(record)
    part_spans(record), removed_from(record)
    ALL_COLUMNS.check([table])
    ColumnRules(("s.*=*",)).of(table)
    table_json(by_id([record])[0])
    table.mounter.schema.to_string(), table.name.encode(), table.mounter.key_columns


def try_mysql(text: str) -> None:
    """The way of a MySQL document."""
    [record] = NewChangefeed(id="fuzz", sink_uri="delta:///lake", tables=[("s", text)]).records()
    table = mysql_table(record)
    table.mounter.schema.to_string(), table.name.encode()


def try_job(text: str) -> None:
    """A DDL job as the upstream's change feed brings it."""
    history = SchemaHistory(1, {1: "test", 2: "a", 80: "vec", 82: "vec2"}, [])
    change = history.apply(Job.parse(text), 5)
    for table in change.tables if change else ():
        tidb_table(TableRecord(table.schema_name, dict(table.info)))


def fuzz(seconds: float, seed: int) -> tuple[int, int, list[str]]:
    """Documents tried, those refused, and the first faults found."""
    chance = random.Random(seed)
    infos, jobs = documents(), vectors.lines("ddl_jobs")
    ways = ((try_tidb, infos), (try_tidb, infos), (try_job, jobs), (try_mysql, [mysql_document()]))
    tried = refused = 0
    faults: list[str] = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and len(faults) < 20:
        attempt, sources = chance.choice(ways)
        text = mutated(chance.choice(sources), chance)
        tried += 1
        try:
            attempt(text)
        except DefectError as err:
            faults.append(f"{err}: {text[:2000]}")
        except (TidemarkError, CorruptError):
            refused += 1
        except Exception:  # noqa: BLE001 - this is what is looked for
            faults.append(f"{attempt.__name__} {traceback.format_exc(limit=-3)}\n{text[:2000]}")
    return tried, refused, faults


def main() -> int:
    """Print what was tried; 1 if anything but an error of the project was raised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    tried, refused, faults = fuzz(chosen.seconds, chosen.seed)
    print(
        json.dumps({"seed": chosen.seed, "tried": tried, "refused": refused, "faults": len(faults)})
    )
    print("\n\n".join(faults))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
