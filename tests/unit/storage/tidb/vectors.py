"""Real TiDB data: binlogs, schemas, key-value changes and SELECT results of 52 steps,
from tests/golden/tidb.
"""

import base64
import gzip
import json
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tipb import binlog_pb2

from storage.tidb.cell import Value
from storage.tidb.ddl import Job, job_span
from storage.tidb.field_type import Type
from storage.tidb.record import decode_record_key
from storage.tidb.schema import Column, TableInfo
from storage.tidb.time import CoreTime, duration_text

_DIRECTORY = Path(__file__).parents[3] / "golden" / "tidb"
needed = pytest.mark.skipif(not _DIRECTORY.is_dir(), reason="no TiDB vectors in tests/golden")


@cache
def lines(name: str) -> list[dict[str, Any]]:
    with gzip.open(_DIRECTORY / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


@cache
def tables() -> dict[str, TableInfo]:
    with gzip.open(_DIRECTORY / "tables.json.gz", "rt") as file:
        return {
            f"{doc['db']}.{doc['info']['name']['O']}": TableInfo.parse(json.dumps(doc["info"]))
            for doc in json.load(file)
        }


@cache
def history() -> list[tuple[int, str, TableInfo]]:
    """(finished_ts, db.table, schema) of every DDL job, oldest first."""
    jobs = [job for job in lines("ddl_jobs") if job["binlog"]["TableInfo"]]
    found = [(job["binlog"], job["schema_name"]) for job in jobs]
    return [
        (
            binlog["FinishedTS"],
            f"{schema}.{binlog['TableInfo']['name']['O']}",
            TableInfo.parse(json.dumps(binlog["TableInfo"])),
        )
        for binlog, schema in found
    ]


def schema_at(name: str, ts: int) -> TableInfo:
    return [
        table
        for finished_ts, table_name, table in history()
        if table_name == name and finished_ts <= ts
    ][-1]


def record_pairs(state: dict[bytes, bytes]) -> Iterator[tuple[int, bytes, bytes]]:
    """(table id, key, row) of the records in `state`, index entries left out."""
    for key, value in sorted(state.items()):
        if key[9:11] == b"_r":
            yield decode_record_key(key).table_id, key, value


def states() -> Iterator[tuple[dict[str, Any], dict[bytes, bytes]]]:
    """Each step, and all key-value pairs after it."""
    state: dict[bytes, bytes] = {}
    for step in lines("steps"):
        for change in step["kv"] or []:
            key = bytes.fromhex(change["key"])
            if change["new"] is None:
                state.pop(key, None)
            else:
                state[key] = bytes.fromhex(change["new"])
        yield step, state


def text(column: Column, value: Value) -> str | None:
    """A value as the vectors print it."""
    match value:
        case None:
            return None
        case CoreTime():
            return value.date_text() if column.type is Type.DATE else value.text(column.decimal)
        case bytes():
            return f"0x{value.hex()}"
        case float():
            digits = str(np.float32(value)) if column.type is Type.FLOAT else repr(value)
            return f"{Decimal(digits):f}".removesuffix(".0")
        case Decimal():
            return f"{value:.{column.decimal}f}"
        case int() if column.type is Type.TIME:
            return duration_text(value, column.decimal)
    return str(value)


def meta_changes() -> Iterator[tuple[bytes, bytes | None]]:
    """Every meta key's change, in the order of the steps."""
    for step in lines("steps"):
        for txn in step["txns"] or []:
            for change in txn.get("meta_kv") or []:
                yield bytes.fromhex(change["key"]), change["new"] and bytes.fromhex(change["new"])


def jobs_of(step: dict[str, Any]) -> Iterator[tuple[int, Job]]:
    """(commit_ts, job) of each transaction of the step that brought a job's state in force."""
    for txn in step["txns"] or []:
        for change in txn.get("meta_kv") or []:
            key = bytes.fromhex(change["key"])
            if key.startswith(job_span().start_key) and change["new"]:
                yield txn["commit_ts"], Job.of_row(bytes.fromhex(change["new"]))


class Mutation(NamedTuple):
    """One table's part of a prewrite binlog."""

    table_id: int
    inserted: list[bytes]
    updated: list[bytes]
    deleted: list[bytes]
    sequence: list[int]


def parts(mutation: Mutation) -> dict[str, Any]:
    """The arguments of `TableMutations.add` beside the timestamps."""
    return {name: value for name, value in mutation._asdict().items() if name != "table_id"}


@cache
def prewrites() -> dict[int, list[Mutation]]:
    """The mutations of each prewrite binlog, by start_ts."""
    found = {}
    for line in lines("binlogs"):
        binlog = binlog_pb2.Binlog.FromString(base64.b64decode(line["payload_b64"]))
        if binlog.prewrite_value:
            value = binlog_pb2.PrewriteValue.FromString(binlog.prewrite_value)
            found[binlog.start_ts] = [
                Mutation(
                    it.table_id,
                    list(it.inserted_rows),
                    list(it.updated_rows),
                    list(it.deleted_rows),
                    list(it.sequence),
                )
                for it in value.mutations
            ]
    return found


def table_id(key: bytes) -> int:
    """The physical table of a record key."""
    return decode_record_key(key).table_id
