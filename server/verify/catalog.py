"""What is to be compared: the changefeed's record, and its tables as they were at a ts, from the metadata."""

from dataclasses import dataclass

import pyarrow as pa

from server.capture import keys
from server.capture.catalog.history import History
from server.capture.catalog.records import SchemaRecords
from server.capture.changefeed import ChangefeedInfo
from server.verify.errors import VerifyChangefeedError, VerifyUnsupportedError
from sink.mounter import Mounter
from storage.meta.meta import Meta
from storage.tidb.schema import TableInfo


@dataclass(frozen=True, slots=True)
class Table:
    """One table at the cut."""

    info: TableInfo
    mounter: Mounter

    @property
    def name(self) -> str:
        """`schema.table`."""
        return self.mounter.name

    @property
    def schema(self) -> pa.Schema:
        """Its own columns."""
        return pa.schema([self.mounter.schema.field(column.name) for column in self.info.stored_columns])


async def changefeed_info(meta: Meta, changefeed: str) -> ChangefeedInfo:
    """The record of a changefeed whose upstream can be read at a ts.

    Raises:
        VerifyChangefeedError, VerifyUnsupportedError.
    """
    pair = await meta.get(keys.info(changefeed))
    if pair is None:
        raise VerifyChangefeedError(f"there is no changefeed {changefeed!r}; see `tidemark cli changefeed list`")
    info = ChangefeedInfo.from_json(pair.value)
    if info.source_uri:
        raise VerifyUnsupportedError(
            f"changefeed {changefeed} replicates from {info.source_uri.partition('://')[0]}://, which cannot be "
            "read as of a past ts: only lakes of the cluster's own change feed can be verified"
        )
    return info


async def tables_at(meta: Meta, changefeed: str, ts: int, wanted: str | None) -> list[Table]:
    """The tables whose rows the lake holds at a cut `ts`, or the one that is wanted.

    Raises:
        VerifyChangefeedError: there are none of that name.
    """
    schemas = SchemaRecords(meta, _read_only)
    in_force = History(await schemas.load(changefeed)).at(ts)
    records = [record for name, (_, record) in sorted(in_force.items()) if wanted in (None, name)]
    if not records:
        known = ", ".join(sorted(in_force)) or "none that the metadata still knows"
        raise VerifyChangefeedError(f"changefeed {changefeed} has no table {wanted or ''} at {ts}; it has: {known}")
    infos = [(record.schema_name, TableInfo.parse(record.table_info_json)) for record in records]
    return [Table(info, Mounter(info, schema_name)) for schema_name, info in infos]


async def _read_only(_: object) -> None:
    raise AssertionError("verify writes no metadata")
