"""Which columns of a table are those of an earlier version of it, under whatever names. Pure.

A column's identity is the number of `sink.mounter.COLUMN_ID`. It lasts through renames. So the
decision that readers do not get a column, or get it masked, stays with the column.

If a source has read the table itself, without the statements that changed it, columns were matched
by their names (`TableRecord.matched_by_names`): a renamed column looks like one that was dropped
and one that was added. Such a column might be a hidden one under a new name, so it is refused.
"""

from collections.abc import Iterable
from typing import TypeAlias

import pyarrow as pa

from server.changefeed.table import SourceTable, TableIneligibleError, TableRecord
from sink.mounter import COLUMN_ID, META_FIELDS, whole_mounter

Identity: TypeAlias = object


def fields(table: SourceTable) -> dict[str, pa.Field]:
    """The columns of the whole table, by name."""
    schema = whole_mounter(table.mounter).schema
    return {field.name: field for field in list(schema)[len(META_FIELDS) :]}


def by_identity(table: SourceTable, other: SourceTable) -> dict[Identity, pa.Field]:
    """Return the columns of `table`, keyed by their identity in `other`, an earlier or later form
    of the table.
    """
    columns: dict[Identity, pa.Field] = {}
    for name, column in fields(table).items():
        number = (column.metadata or {}).get(COLUMN_ID)
        # TiDB numbers the columns of each table: where a name was given to another table, as by
        # TRUNCATE or a swap, a number alone says nothing.
        is_one = _number(table.record) == _number(other.record)
        columns[number if number and is_one else (number, name)] = column
    return columns


class EarlierTables:
    """Earlier forms of tables, to find out which of them a present table was."""

    def __init__(self, tables: Iterable[SourceTable]) -> None:
        self._by_id: dict[int, SourceTable] = {}
        self._by_name: dict[str, SourceTable] = {}
        for table in tables:
            self._by_id.setdefault(table.span.table_id, table)
            self._by_name.setdefault(table.name, table)

    def same(self, table: SourceTable) -> SourceTable | None:
        """The earlier form of a table; None: there is none."""
        # TiDB's TRUNCATE gives a table a new id: its name tells that it is the same one.
        return self._by_id.get(table.span.table_id) or self._by_name.get(table.name)

    def gone(self, records: Iterable[TableRecord]) -> list[SourceTable]:
        """Return the tables whose id and name are both absent from `records`."""
        there = {key for each in records for key in (_number(each), each.name)}
        return [
            table
            for table in self._by_id.values()
            if not {_number(table.record), table.name} & there
        ]


def check_still_hidden(table: SourceTable, record: TableRecord, before: SourceTable | None) -> None:
    """Check that no column is shown that was hidden in `before`, the table's version in force, if
    columns were matched by their names; `record` is the record of `table` with the columns taken.

    Raises:
        TableIneligibleError: a shown column may be a hidden one under another name.
    """
    if before is None or not table.record.matched_by_names:
        return
    was, now = by_identity(before, table), by_identity(table, before)
    if not was.keys() & now.keys():
        return  # Another table took its place, as by CREATE OR REPLACE.
    hidden, shown = _hidden(before, before.record), _shown(table, record)
    gone = [was[each].name for each in was if each not in now and was[each].name in hidden]
    added = [now[each].name for each in now if each not in was and now[each].name in shown]
    if gone and added:
        raise TableIneligibleError(
            f"{table.name} has no column {', '.join(gone)} any more, which is left out or masked, "
            f"and has {', '.join(added)} instead, which would be shown. No statement says whether "
            "it is the same one under another name. Give it its former name at the source; or "
            "create another changefeed, whose rules are about the names of now"
        )


def check_not_renamed(table: SourceTable, record: TableRecord, gone: Iterable[SourceTable]) -> None:
    """Check that a new table, which was found by its name, shows no column whose name is hidden in
    one of the tables that are gone: it may be that table under another name.

    Raises:
        TableIneligibleError: it shows one.
    """
    if not table.record.matched_by_names:
        return
    for before in gone:
        columns = sorted(_hidden(before, before.record) & _shown(table, record))
        if columns:
            raise TableIneligibleError(
                f"{table.name} is new, and may be {before.name} under another name, of which "
                f"{', '.join(columns)} is left out or masked: here it would be shown. Give the "
                "table its former name at the source; leave it out by --filter; or create another "
                "changefeed, whose rules are about the names of now"
            )


def _hidden(table: SourceTable, record: TableRecord) -> set[str]:
    """The columns that readers do not get as they are."""
    selected, keys = record.selected, set(whole_mounter(table.mounter).key_columns)
    left_out = () if selected is None else fields(table).keys() - set(selected) - keys
    return {*left_out, *record.masked}


def _shown(table: SourceTable, record: TableRecord) -> set[str]:
    """Return the names of the columns that readers see."""
    return fields(table).keys() - _hidden(table, record)


def _number(record: TableRecord) -> object:
    return record.table_info.get("id")
