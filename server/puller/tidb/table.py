"""Tables of TiDB as sources know them: what can be replicated, and under which span. Pure.

A partitioned table is one table for readers. Its rows lie under its partitions' ids, and go to one span that reaches
from its first partition's records to behind its last one's. Its end names the set of partitions: another set is another
span, with pullers of its own. Ids are not used twice, so no span comes again.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from server.puller.table import SourceTable, TableIneligibleError, TableRecord, taken
from sink.mounter import Mounter
from storage.model.errors import InvalidError
from storage.model.span import Span
from storage.tidb.key import table_span
from storage.tidb.schema import TableInfo
from storage.tidb.schema_history import REMOVED, Table

_NO_PARTITIONS: Final[tuple[int, ...]] = ()
_SET_BYTES: Final = 8
_IDENTITIES: Final = "tidemark_column_ids"
"""A member of the TableInfo that is ours: see `keeping_identities`."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Partitions whose rows went when a table's schema came in force at `ts`: they are deleted at `delete_ts`."""

    ts: int
    partition_ids: tuple[int, ...] = ()

    @property
    def delete_ts(self) -> int:
        """The first timestamp at which the new schema is in force; its start_ts is `ts`."""
        return self.ts + 1


def tidb_table(record: TableRecord) -> SourceTable:
    """Read TiDB's TableInfo.

    Raises:
        TableInfoError: the TableInfo cannot be used.
        TableIneligibleError: the table cannot be replicated.
    """
    info = TableInfo.parse(record.table_info).showing_dates(record.zero_dates)
    name = f"{record.schema_name}.{info.name}"
    if info.is_view or info.is_sequence:
        raise TableIneligibleError(f"{name} is a view or a sequence: it has no rows of its own")
    if not info.key_columns:
        raise TableIneligibleError(f"{name} has neither a primary key nor a unique key over NOT NULL columns")
    return SourceTable(record, _span(info), taken(record, Mounter(info, record.schema_name, identities_in(record))))


def keeping_identities(record: TableRecord, before: TableRecord) -> TableRecord:
    """The record, in which a column that TiDB has built anew is still the column that it was `before`.

    A change of type that rewrites values (a reorganization) ends with a new column id under the old name. TiDB never
    drops and adds a name in one statement, so nothing else looks like that.
    """
    old, new = (_column_ids(each) for each in (before, record))
    identities = identities_in(before)
    kept = {number: identity for number, identity in identities.items() if number in new.values()}
    for name, number in new.items():
        rebuilt = number not in old.values() and name in old and old[name] not in new.values()
        if rebuilt:
            kept[number] = identities.get(old[name], old[name])
    if not kept:
        return record
    texts = {str(number): identity for number, identity in kept.items()}
    return TableRecord(record.schema_name, {**record.table_info, _IDENTITIES: texts})


def identities_in(record: TableRecord) -> dict[int, int]:
    """The identities of columns that have another one than their TiDB id, by that id."""
    return {int(number): int(identity) for number, identity in (record.table_info.get(_IDENTITIES) or {}).items()}


def _column_ids(record: TableRecord) -> dict[str, int]:
    """TiDB's column ids, by lower-case name."""
    return {column["name"]["L"]: int(column["id"]) for column in record.table_info.get("cols") or ()}


def record_of(table: Table) -> TableRecord:
    """A table of the schema history as a record."""
    return TableRecord(table.schema_name, dict(table.info))


def part_spans(record: TableRecord) -> Sequence[Span]:
    """The spans of the partitions; none if the table is not partitioned."""
    table = Table(0, record.schema_name, record.table_info)
    return [table_span(number) for number in table.partition_ids]


def removed_from(record: TableRecord) -> Removed:
    """What the record says of removed partitions; no ids: nothing.

    Raises:
        InvalidError: it cannot be read.
    """
    try:
        removed = record.table_info.get(REMOVED) or {"ts": 0, "partition_ids": _NO_PARTITIONS}
        return Removed(int(removed["ts"]), tuple(map(int, removed["partition_ids"])))
    except (KeyError, TypeError, ValueError) as err:
        raise InvalidError(f"the record of a table says nothing sensible of removed partitions: {err!r}") from err


def _span(info: TableInfo) -> Span:
    if not info.partition_ids:
        return table_span(info.id)
    first, last = table_span(min(info.partition_ids)), table_span(max(info.partition_ids))
    parts = hashlib.sha256(",".join(map(str, sorted(info.partition_ids))).encode()).digest()
    return Span(info.id, first.start_key, last.end_key + parts[:_SET_BYTES])
