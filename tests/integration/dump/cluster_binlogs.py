"""What a TiDB with binlogs switched on sends to a pump beside what it writes to the store;
nothing without a pump.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tipb import binlog_pb2, pump_pb2, pump_pb2_grpc

from server.rpc.client import connect
from server.rpc.pd import PdClient
from storage.tidb.number import encode_varint


@dataclass(frozen=True)
class Written:
    """What one transaction did: rows by number, as they were and as they are, or a DDL."""

    table_id: int = 0
    rows: Mapping[int, tuple[int | None, int | None]] = field(default_factory=dict)
    column_ids: tuple[int, ...] = (2,)
    """Of the value; a second one is that of the column that a MODIFY builds."""
    ddl_job_id: int = 0
    query: str = ""


def converted(value: int) -> int:
    """What a MODIFY makes of a value."""
    return value % 7


class Binlogs:
    """Of one pump, or of none."""

    def __init__(self, pd: PdClient, stub: Any = None) -> None:
        self._pd = pd
        self._stub = stub

    @classmethod
    @asynccontextmanager
    async def open(cls, address: str, pd: PdClient) -> AsyncIterator["Binlogs"]:
        """For the block; without an address everything is left out."""
        if not address:
            yield cls(pd)
            return
        async with connect(address) as channel:
            yield cls(pd, pump_pb2_grpc.PumpStub(channel))

    async def prewrite(self, written: Written, start_ts: int) -> None:
        """Before the store is written to."""
        if written.ddl_job_id:
            ddl: dict[str, Any] = {
                "ddl_query": written.query.encode(),
                "ddl_job_id": written.ddl_job_id,
            }
            await self._send(tp=binlog_pb2.Prewrite, start_ts=start_ts, **ddl)
        elif written.rows:
            rows = _rows(written)
            await self._send(
                tp=binlog_pb2.Prewrite, start_ts=start_ts, prewrite_key=b"k", prewrite_value=rows
            )

    async def commit(self, written: Written, start_ts: int, commit_ts: int) -> None:
        """After it was."""
        if written.ddl_job_id or written.rows:
            ddl: dict[str, Any] = {}
            if written.ddl_job_id:
                ddl = {"ddl_query": written.query.encode(), "ddl_job_id": written.ddl_job_id}
            await self._send(
                tp=binlog_pb2.Commit,
                start_ts=start_ts,
                commit_ts=commit_ts,
                prewrite_key=b"k",
                **ddl,
            )

    async def _send(self, **fields: Any) -> None:
        if self._stub is not None:
            payload = binlog_pb2.Binlog(**fields).SerializeToString()
            await self._stub.WriteBinlog(
                pump_pb2.WriteBinlogReq(clusterID=self._pd.cluster_id, payload=payload)
            )


def _rows(written: Written) -> bytes:
    kinds = binlog_pb2.MutationType
    mutation = binlog_pb2.TableMutation(table_id=written.table_id)
    for number, (before, after) in written.rows.items():
        if before is None:
            mutation.inserted_rows.append(_number(number) + _pairs(written, number, after))
            mutation.sequence.append(kinds.Insert)
        elif after is None:
            mutation.deleted_rows.append(_pairs(written, number, before))
            mutation.sequence.append(kinds.DeleteRow)
        else:
            mutation.updated_rows.append(
                _pairs(written, number, before) + _pairs(written, number, after)
            )
            mutation.sequence.append(kinds.Update)
    return binlog_pb2.PrewriteValue(schema_version=1, mutations=[mutation]).SerializeToString()


def _pairs(written: Written, number: int, value: int | None) -> bytes:
    assert value is not None
    cells = zip(written.column_ids, (value, converted(value)), strict=False)
    return (
        _number(1)
        + _number(number)
        + b"".join(_number(column_id) + _number(cell) for column_id, cell in cells)
    )


def _number(number: int) -> bytes:
    return b"\x08" + encode_varint(number)
