"""A store that holds what a real TiDB wrote: the vectors' key-value changes and meta keys,
at their own timestamps.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.tikv import KvClient
from storage.tidb.mutation import TableMutations
from storage.tidb.record import decode_record_key, record_prefix
from storage.tidb.schema import TableInfo
from storage.tidb.schema_history import SchemaHistory
from tests.unit.storage.tidb import vectors

PART = "vec.part"
_CHUNK = 1000


class Txn(NamedTuple):
    """What one transaction wrote; None is a delete, an empty value a key that was only locked."""

    start_ts: int
    commit_ts: int
    writes: Mapping[bytes, bytes | None]


def txns() -> list[Txn]:
    """Every transaction, in order of commit_ts; rows that a DDL rewrote come just before it."""
    return sorted(_txns(), key=lambda txn: txn.commit_ts)


async def load(kv: KvClient, history: Iterable[Txn]) -> None:
    """Commit transactions at their own timestamps."""
    for txn in history:
        keys = sorted(txn.writes)
        for begin in range(0, len(keys), _CHUNK):
            part = keys[begin : begin + _CHUNK]
            mutations = [_mutation(key, txn.writes[key]) for key in part]
            await kv.prewrite(
                mutations, primary=keys[0], start_version=txn.start_ts, lock_ttl_ms=20_000
            )
        for begin in range(0, len(keys), _CHUNK):
            await kv.commit(keys[begin : begin + _CHUNK], txn.start_ts, txn.commit_ts)


def _mutation(key: bytes, value: bytes | None) -> kvrpcpb.Mutation:
    op = kvrpcpb.Del if value is None else kvrpcpb.Put if value else kvrpcpb.Lock
    return kvrpcpb.Mutation(op=op, key=key, value=value or b"")


def _txns() -> Iterator[Txn]:
    state = SchemaHistory(0, {}, [])
    primaries = {
        it["start_ts"]: bytes.fromhex(it["prewrite_key"]) for it in vectors.lines("binlogs")
    }
    for step in vectors.lines("steps"):
        written: dict[bytes, bytes | None] = {}
        last_ddl_ts = 0
        for txn in step["txns"] or []:
            writes = _writes(txn.get("kv")) | _writes(txn.get("meta_kv"))
            for commit_ts, job in vectors.jobs_of({"txns": [txn]}):
                state.apply(job, commit_ts)
                last_ddl_ts = commit_ts
            if not txn["ddl_job_id"]:
                writes |= _removed_partitions_rows(state, txn)
            written |= writes
            writes.setdefault(primaries[txn["start_ts"]], b"")  # a primary that was only locked
            yield Txn(txn["start_ts"], txn["commit_ts"], writes)
        rest = {
            key: it
            for key, it in _writes(step["kv"]).items()
            if it is not None and key not in written
        }
        if rest and last_ddl_ts:
            yield Txn(last_ddl_ts - 2, last_ddl_ts - 1, rest)


def _writes(changes: list[dict[str, Any]] | None) -> dict[bytes, bytes | None]:
    return {
        bytes.fromhex(it["key"]): it["new"] and bytes.fromhex(it["new"]) for it in changes or []
    }


def _removed_partitions_rows(
    state: SchemaHistory, txn: dict[str, Any]
) -> dict[bytes, bytes | None]:
    """Rows of partitions that are gone at the end are missing in the vectors:
    they are made from the binlog.
    """
    out: dict[bytes, bytes | None] = {}
    for mutation in vectors.prewrites()[txn["start_ts"]]:
        table = state.table(mutation.table_id)
        if table is None or table.name != PART:
            continue
        mutations = TableMutations(TableInfo.parse(json.dumps(table.info)))
        mutations.add(txn["commit_ts"], txn["start_ts"], **vectors.parts(mutation))
        for key, value in zip(
            *(mutations.to_batch()[name].to_pylist() for name in ("key", "value")), strict=True
        ):
            handle = decode_record_key(key).handle
            assert isinstance(handle, int)
            out[record_prefix(_partition_of(table.info, handle)) + key[11:]] = value
    return out


def _partition_of(info: Mapping[str, Any], number: int) -> int:
    for part in info["partition"]["definitions"]:
        limit = part["less_than"][0]
        if limit == "MAXVALUE" or number < int(limit):
            return int(part["id"])
    raise AssertionError(number)
