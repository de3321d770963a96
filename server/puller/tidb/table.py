"""TiDB's tables for sources: which ones can be replicated, and their spans. Pure.

A partitioned table is one table for readers. Its rows lie under its partitions' ids, and go to one
span that reaches from its first partition's records to behind its last one's. Its end names the set
of partitions: another set is another span, with pullers of its own. A table whose stored values a
DDL has changed gets another span, too, which begins with all its rows as the store has them
(`unwritten_rows`). Ids are not used twice, so no span comes again.

A big table may be split into parts for several captures (docs/design/0037). A part is a table to
the capture that has it: its record names the range of keys, and gives it a name of its own. Readers
never see a part.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

from pyspark_tidemark.lake.schema import widens

from server.changefeed.table import SourceTable, TableIneligibleError, TableRecord, taken
from sink.mounter import COLUMN_ID
from sink.tidb_mounter import TidbMounter
from storage.model.errors import InvalidError
from storage.model.span import Span
from storage.tidb.cell import arrow_type, bit_bytes
from storage.tidb.document import PUBLIC
from storage.tidb.field_type import Type
from storage.tidb.record import table_span
from storage.tidb.schema import Column, TableInfo
from storage.tidb.schema_history import MODIFIED, REMOVED, Table

_NO_PARTITIONS: Final[tuple[int, ...]] = ()
_SET_BYTES: Final = 8
_IDENTITIES: Final = "tidemark_column_ids"
"""A member of the TableInfo that is ours: see `keeping_identities`."""
_REREAD: Final = "tidemark_reread"
"""Another one: see `Reread`."""
_PART: Final = "tidemark_part"
"""Another one: the first key of a part, and the first one behind it, in hexadecimal digits."""
_PART_NAME_BYTES: Final = 6


@dataclass(frozen=True, slots=True)
class Removed:
    """Partitions whose rows went when a table's schema came in force at `ts`:
    they are deleted at `delete_ts`.
    """

    ts: int
    partition_ids: tuple[int, ...] = ()

    @property
    def delete_ts(self) -> int:
        """The first timestamp at which the new schema is in force; its start_ts is `ts`."""
        return self.ts + 1


@dataclass(frozen=True, slots=True)
class Reread:
    """The last DDL that changed stored values of a table, behind which all rows are delivered
    again; ts 0: there was none.
    """

    ts: int = 0
    emptied: bool = False
    """Whether readers must discard what they have: keys have other values, or a column has another
    type.
    """


def tidb_table(record: TableRecord) -> SourceTable:
    """Read TiDB's TableInfo.

    Raises:
        TableInfoError: the TableInfo cannot be used.
        TableIneligibleError: the table cannot be replicated.
    """
    info = _shown_info(record)
    name = f"{record.schema_name}.{info.name}"
    if info.is_view or info.is_sequence:
        raise TableIneligibleError(f"{name} is a view or a sequence: it has no rows of its own")
    if not info.key_columns:
        raise TableIneligibleError(
            f"{name} has neither a primary key nor a unique key over NOT NULL columns"
        )
    if info.deletes_softly:
        raise TableIneligibleError(
            f"{name} has SOFTDELETE: rows that its users have deleted stay in it"
        )
    reread_ts = reread_of(record).ts
    span = part_of(record) or _span(info, reread_ts)
    return SourceTable(record, span, taken(record, _mounter(info, record)), reread_ts)


def can_split(table: SourceTable) -> bool:
    """Whether the parts of a table together give the rows of the whole in the same order.

    Not so where an update may change a row's key and leave its record where it is: the row of the
    new key could come from another part than what was under that key before. Rows are numbered
    before event filters leave some out, so the numbers of the whole would not be known. A
    partitioned table, and one that is read again, does not have its rows in its own span.
    """
    record = table.record
    return not (
        part_spans(record)
        or table.reread_ts
        or removed_from(record).partition_ids
        or record.ignored is not None
        or table.mounter.moves_keys
    )


def part(table: SourceTable, span: Span) -> SourceTable:
    """The part of a table that has its rows in `span`, as the capture knows it that pulls it."""
    keys = [span.start_key.hex(), span.end_key.hex()]
    digest = hashlib.sha256(",".join(keys).encode()).digest()[:_PART_NAME_BYTES]
    whole = table.record.routed((table.record.schema_name, table.record.table_name))
    name = f"{whole.table_name}#{digest.hex()}"
    info = {**whole.table_info, "name": {"O": name, "L": name.lower()}, _PART: keys}
    return tidb_table(TableRecord(whole.schema_name, info))


def part_of(record: TableRecord) -> Span | None:
    """Return the span of a part's rows; None: the record is of a whole table.

    Raises:
        InvalidError: it cannot be read.
    """
    keys = record.table_info.get(_PART)
    if keys is None:
        return None
    try:
        start_key, end_key = map(bytes.fromhex, keys)
        return Span(int(record.table_info["id"]), start_key, end_key)
    except (KeyError, TypeError, ValueError) as err:
        raise InvalidError(
            f"the record of a part of {record.name} does not say which one it is: {err!r}"
        ) from err


def key_is_in_rows(record: TableRecord) -> bool:
    """Whether only row values hold the key that readers know, since the record key does not hold
    all of it.
    """
    return not TableInfo.parse(record.table_info).handle_is_key


def following(record: TableRecord, before: TableRecord) -> TableRecord:
    """The record of a table that was `before` right below the DDL that brings it.

    Columns keep their identities. If the DDL brought columns whose values no default tells, the
    table is read again: TiDB has filled them beside its transactions' changes, or its users had
    them before the DDL is told. So it is if readers are shown the same stored values otherwise.
    """
    kept = keeping_identities(record, before)
    info, earlier = (_shown_info(each) for each in (record, before))
    earlier_ids = {column.id for column in earlier.stored_columns}
    new = {column.id for column in info.stored_columns} - earlier_ids
    modified = record.table_info.get(MODIFIED)
    # The last one stands in the record until another follows: the table's span is named by it.
    # With another id it is another span anyway.
    reread = reread_of(before) if info.id == earlier.id else Reread()
    reshown = _shown_otherwise(earlier, info)
    if modified and (len(new) > modified["added"] or reshown):
        other_keys = any(column.id in new | reshown for column in info.key_columns)
        retyped = _is_retyped(_mounter(earlier, before), _mounter(info, kept))
        reread = Reread(modified["ts"], other_keys or retyped)
    return (
        replace(kept, table_info={**kept.table_info, _REREAD: asdict(reread)})
        if reread.ts
        else kept
    )


def reread_of(record: TableRecord) -> Reread:
    """The note in the record about rows that are sent again."""
    return Reread(**(record.table_info.get(_REREAD) or {}))


def _is_retyped(before: TidbMounter, now: TidbMounter) -> bool:
    """Whether a column that readers see has another type."""
    types = {field.metadata[COLUMN_ID]: field.type for field in before.schema if field.metadata}
    fields = (field for field in now.schema if field.metadata)
    return any(types.get(field.metadata[COLUMN_ID], field.type) != field.type for field in fields)


def _shown_otherwise(before: TableInfo, now: TableInfo) -> set[int]:
    """The columns whose stored values stay, and which readers are shown in another type, that no
    widening leads to, or in another form.

    TiDB only writes another type into the TableInfo where all values fit it: INT UNSIGNED becomes
    BIGINT UNSIGNED like that, TIME becomes TIME(6), BIT(8) BIT(16), and since TiDB 8.5.5 a BIGINT
    an INT.
    """
    olds = {column.id: column for column in before.stored_columns}
    return {
        column.id
        for column in now.stored_columns
        if (old := olds.get(column.id)) is not None and _is_shown_otherwise(old, column)
    }


def _is_shown_otherwise(old: Column, new: Column) -> bool:
    old_type, new_type = arrow_type(old), arrow_type(new)
    if old_type != new_type:
        return not widens(old_type, new_type)
    return _form(old) != _form(new)


def _form(column: Column) -> int:
    """The form in which values are shown, beside the type: digits behind the point, or bytes."""
    if column.type is Type.BIT:
        return bit_bytes(column)
    has_digits = column.type is Type.TIME or column.as_text
    return max(column.decimal, 0) if has_digits else 0


def _shown_info(record: TableRecord) -> TableInfo:
    """The table as readers are shown its dates."""
    return TableInfo.parse(record.table_info).showing_dates(record.zero_dates)


def keeping_identities(record: TableRecord, before: TableRecord) -> TableRecord:
    """The record, in which a column that TiDB has built anew is still the column that it was
    `before`.

    A change of type that rewrites values (a reorganization) ends with a new column id under the old
    name. TiDB never drops and adds a name in one statement, so nothing else looks like that. A
    statement that changes one column alone may give it another name, too.
    """
    old, new = (_column_ids(each) for each in (before, record))
    identities = identities_in(before)
    # TiDB's TableInfo knows nothing of identities: each record has to hand them on to the next.
    kept = {number: identity for number, identity in identities.items() if number in new.values()}
    added = {name: number for name, number in new.items() if number not in old.values()}
    gone = {name: number for name, number in old.items() if number not in new.values()}
    if (record.table_info.get(MODIFIED) or {}).get("alone") and len(added) == len(gone) == 1:
        gone = dict(zip(added, gone.values(), strict=True))
    for name in added.keys() & gone.keys():
        kept[added[name]] = identities.get(gone[name], gone[name])
    # Of a statement that changes several columns nobody knows which one has which other name.
    record = replace(record, matched_by_names=MODIFIED in record.table_info)
    if not kept:
        return record
    texts = {str(number): identity for number, identity in kept.items()}
    return replace(record, table_info={**record.table_info, _IDENTITIES: texts})


def identities_in(record: TableRecord) -> dict[int, int]:
    """The identities of columns that have another one than their TiDB id, by that id."""
    return {
        int(number): int(identity)
        for number, identity in (record.table_info.get(_IDENTITIES) or {}).items()
    }


def _mounter(info: TableInfo, record: TableRecord) -> TidbMounter:
    return TidbMounter(info, record.schema_name, identities_in(record))


def _column_ids(record: TableRecord) -> dict[str, int]:
    """The ids of TiDB's columns that its users see, by lower-case name."""
    columns = record.table_info.get("cols") or ()
    return {
        column["name"]["L"]: int(column["id"]) for column in columns if column["state"] == PUBLIC
    }


def record_of(table: Table) -> TableRecord:
    """A table of the schema history as a record."""
    return TableRecord(table.schema_name, dict(table.info))


def part_spans(record: TableRecord) -> Sequence[Span]:
    """The spans of the partitions; none if the table is not partitioned."""
    table = Table(0, record.schema_name, record.table_info)
    return [table_span(number) for number in table.partition_ids]


def physical_spans(record: TableRecord) -> Sequence[Span]:
    """Return the spans of the table's rows in the store: one, or one for each partition."""
    return part_spans(record) or (table_span(int(record.table_info["id"])),)


def removed_from(record: TableRecord) -> Removed:
    """The note in the record about removed partitions; no ids: none.

    Raises:
        InvalidError: it cannot be read.
    """
    try:
        removed = record.table_info.get(REMOVED) or {"ts": 0, "partition_ids": _NO_PARTITIONS}
        return Removed(int(removed["ts"]), tuple(map(int, removed["partition_ids"])))
    except (KeyError, TypeError, ValueError) as err:
        raise InvalidError(
            f"the record of a table says nothing sensible of removed partitions: {err!r}"
        ) from err


def _span(info: TableInfo, reread_at: int) -> Span:
    if not (info.partition_ids or reread_at):
        return table_span(info.id)
    first, last = table_span(min(info.physical_ids)), table_span(max(info.physical_ids))
    parts = ",".join(map(str, sorted(info.partition_ids)))
    digest = hashlib.sha256((f"{parts}@{reread_at}" if reread_at else parts).encode()).digest()
    return Span(info.id, first.start_key, last.end_key + digest[:_SET_BYTES])
