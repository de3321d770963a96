"""The tables to compare: those of a changefeed as they were at a cut, read from the metadata.

The lake says at which cut (`LakeCut`); the changefeed's schema history says which tables it had
there (`Table`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark_tidemark.lake.format import ROW_MODES, UPSERT

from server.changefeed import keys
from server.changefeed.history import History
from server.changefeed.info import ChangefeedInfo
from server.changefeed.records import SchemaRecords
from server.changefeed.routes import merged_shards
from server.changefeed.source import find_kind, load, scheme_of
from server.changefeed.table import SourceTable, TableRecord
from server.verify.errors import VerifyChangefeedError, VerifyMovedError, VerifyUnsupportedError
from server.verify.lake.question import ShardPart
from server.verify.spans import KeySpans, span_column
from sink.mounter import META_FIELDS
from storage.meta.meta import Meta


@dataclass(frozen=True, slots=True)
class LakeCut:
    """The cut at which the lake is compared: its newest one up to a ts."""

    ts: int
    mode: str = UPSERT
    beyond: Mapping[str, int] = field(default_factory=dict)
    """Tables that are at a later ts, as a database shows them while its next cut is being
    applied.
    """
    newest_only: bool = False
    """Whether the lake shows only the present form of its tables, including changes of a cut that
    has begun.
    """


@dataclass(frozen=True, slots=True)
class Table:
    """One table, as it was at `ts`."""

    source: SourceTable
    ts: int
    since: int = 0
    """The ts at which all its rows were last removed at once (TRUNCATE TABLE), as far as the
    metadata knows.
    """
    schema_ts: int = 0
    """The commit_ts of the change that gave its schema."""
    spans: KeySpans | None = None
    """The keys that are compared; None: all."""
    part: ShardPart | None = None
    """Which rows of the lake's table are its own; None: all."""
    merged: pa.Schema | None = None
    """The columns of the table that it is merged into."""

    @property
    def name(self) -> str:
        """`schema.table`."""
        return self.source.name

    @property
    def target_name(self) -> str:
        """The name that it has in the lake, or that the table has which it is merged into."""
        return self.source.place

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that identify a row of the lake's table."""
        own = self.source.mounter.key_columns
        return own if self.part is None else (self.part.column, *own)

    @property
    def span_column(self) -> str | None:
        """The column by which its keys have ranges; None: they have none."""
        return span_column(self.source.mounter.key_columns, self.schema)

    def only(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that are compared."""
        return rows if self.spans is None else rows.filter(self.spans.inside(rows))

    @property
    def schema(self) -> pa.Schema:
        """The columns that are compared: its own, or those of the table that it is merged into."""
        if self.merged is not None:
            return self.merged
        own = list(self.source.mounter.schema)[len(META_FIELDS) :]
        return pa.schema([pa.field(each.name, each.type) for each in own])

    def mounted(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """Rows, given as RAW_SCHEMA, in the columns that are compared."""
        rows = self.source.mounter.mount(raw)
        if self.part is None:
            return rows.select(self.schema.names)
        rows = rows.append_column(self.part.column, pa.repeat(self.part.shard, len(rows)))
        columns = [
            rows[each.name].cast(each.type)
            if each.name in rows.schema.names
            else pa.nulls(len(rows), each.type)
            for each in self.schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


async def changefeed_info(meta: Meta, changefeed: str) -> ChangefeedInfo:
    """The record of a changefeed.

    Raises:
        VerifyChangefeedError.
    """
    pair = await meta.get(keys.info(changefeed))
    if pair is None:
        raise VerifyChangefeedError(
            f"there is no changefeed {changefeed!r}; see `tidemark cli changefeed list`"
        )
    return ChangefeedInfo.from_json(pair.value)


async def tables_at(
    meta: Meta, info: ChangefeedInfo, cut: LakeCut, name: str | None
) -> list[Table]:
    """The tables whose rows the lake holds at a cut, or the one of a name (`schema.table`).

    Raises:
        VerifyChangefeedError: there are none of that name.
        VerifyUnsupportedError: event filters leave changes out of one, or one has no key.
        VerifyMovedError: a schema change is being brought into a lake that shows no past.
    """
    history = History(await SchemaRecords(meta, _read_only).load(info.id))
    # A cut that ends at a schema change does not show it: the change comes with the next cut.
    in_force = history.at(cut.ts - 1)
    names = [each for each in sorted(in_force) if name in (None, each)]
    if not names:
        others = ", ".join(sorted(in_force)) or "none that the metadata still knows"
        raise VerifyChangefeedError(
            f"changefeed {info.id} has no table {name or ''} at {cut.ts}; it has: {others}"
        )
    if cut.newest_only:
        _check_at_rest(history, cut, names)
    records = {each: record for each, (_, record) in in_force.items()}
    _check_comparable([records[each] for each in names], cut)
    read: Callable[[TableRecord], SourceTable] = load(
        find_kind(scheme_of(info.source_uri)).table_at
    )
    truncated = {
        each: change.commit_ts
        for change in history
        if change.commit_ts < cut.ts
        for each in change.truncated
    }

    # A merged table has the columns of all its shards, whichever is compared.
    merges = any(records[each].shard is not None for each in names)
    sources = {
        each: read(record)
        for each, record in sorted(records.items())
        if each in names or (merges and record.shard)
    }
    parts = _parts(sources.values())
    tables = []
    for each in names:
        source, since = sources[each], truncated.get(each, 0)
        ts = cut.beyond.get(source.target_name, cut.ts)
        part, merged = parts.get(each, (None, None))
        tables.append(
            Table(source, ts, since, in_force[each][0], part=part, merged=merged),
        )
    return tables


def _parts(tables: Iterable[SourceTable]) -> dict[str, tuple[ShardPart, pa.Schema]]:
    """Return, for each shard, which rows of the merged table are its own, and that table's columns.
    The first shard also answers for rows of no shard, which would be unseen otherwise.
    """
    parts = {}
    for merged in merged_shards(tables).values():
        own = list(merged.schema)[len(META_FIELDS) :]
        schema = pa.schema([pa.field(each.name, each.type) for each in own])
        first, *others = sorted(shard.name for shard in merged.shards)
        parts[first] = ShardPart(merged.key[0], first, tuple(others)), schema
        parts |= {name: (ShardPart(merged.key[0], name), schema) for name in others}
    return parts


def _check_comparable(tables: Sequence[TableRecord], cut: LakeCut) -> None:
    """Refuse tables whose rows in the lake need not be those of the source.

    Raises:
        VerifyUnsupportedError: with their names.
    """
    if filtered := [each.name for each in tables if each.ignored is not None]:
        raise VerifyUnsupportedError(
            f"event filters leave changes of {', '.join(filtered)} out of the lake, so that it "
            "need not be what the source has; compare other tables one by one, by their names"
        )
    if keyless := [each.name for each in tables if each.is_keyless]:
        raise VerifyUnsupportedError(
            f"{', '.join(keyless)}: without a key rows of the lake have none of the source to be "
            "compared with; compare other tables one by one, by their names"
        )
    shards = [each.name for each in tables if each.shard is not None]
    if shards and cut.mode not in ROW_MODES:
        raise VerifyUnsupportedError(
            f"{', '.join(shards)}: merged with others in a lake that keeps changes, in which those "
            "of a shard that was dropped or renamed cannot be told from what a shard has now; "
            "compare other tables one by one, by their names"
        )


def _check_at_rest(history: History, cut: LakeCut, names: list[str]) -> None:
    for change in history.after(cut.ts - 1):
        moved = sorted(
            {*change.dropped, *change.truncated, *(table.name for table in change.tables)}
            & set(names)
        )
        if moved:
            raise VerifyMovedError(
                f"the schema change at {change.commit_ts} ({change.query[:80]!r}) is being "
                f"brought into the lake, which shows {', '.join(moved)} only as it is now: verify "
                "again when a cut has passed it"
            )


async def _read_only(_: object) -> None:
    raise AssertionError("verify writes no metadata")
