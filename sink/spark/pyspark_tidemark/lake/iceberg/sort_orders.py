"""Sort orders of Iceberg tables: given to new tables, changed where the changefeed's option has
changed, and freed of columns that go.

What an option asked for is recorded as a property of the table. An order that somebody else has
given it since (`ALTER TABLE … WRITE ORDERED BY`) stays as it is until the option changes.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.partition_specs import term
from pyspark_tidemark.lake.iceberg.types import field_ids
from pyspark_tidemark.lake.partition_columns import field_fault
from pyspark_tidemark.lake.partitioning import BUCKET, IDENTITY, TRUNCATE, PartitionField
from pyspark_tidemark.lake.sorting import SortField, parse_sort_fields

SORTED_BY: Final = "tidemark.sort-by"
"""The table property with the fields that the changefeed's option asked for."""
_TRANSFORM: Final = re.compile(r"(?P<name>[a-z]+)(?:\[(?P<width>[0-9]+)\])?")


def check_order(table: str, fields: Sequence[SortField], schema: Any) -> None:
    """Check that a table with the columns of `schema` (pyarrow.Schema) can be sorted by the rule.

    Raises:
        SourceError: ErrSortUnsupported.
    """
    if faults := [fault for field in fields if (fault := _fault(field.of, schema))]:
        raise SourceError(
            "ErrSortUnsupported",
            f"{table} cannot be sorted as sort-by asks: {'; '.join(faults)}",
        )


def _fault(field: PartitionField, schema: Any) -> str:
    """Why rows cannot be sorted by a field: as partitions, but that all engines have one order of
    floating point numbers.
    """
    is_value = field.transform == IDENTITY and field.column in schema.names
    if is_value and pa.types.is_floating(schema.field(field.column).type):
        return ""
    return field_fault(field, schema)


class SortOrders:
    """Changes the sort orders of one catalog's tables."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def follow(self, name: str, table: Any, fields: Sequence[SortField]) -> Any:
        """Give a table the order that is asked for, unless it was given that before; returns the
        table. Files that it has stay as they are; nothing may wait for a commit of the table.

        Raises:
            SourceError: ErrSortUnsupported, and those of `java_catalog.translated`.
        """
        record = SORTED_BY, ", ".join(map(str, fields))
        if self._catalog.is_recorded(table, record):
            return table
        check_order(name, fields, self._catalog.schema(table))
        with self._catalog.recorded(name, table, "the sort order", record) as transaction:
            self._replace(transaction, fields)
        return self._catalog.existing(name)

    def free(self, transaction: Any, columns: Sequence[str]) -> None:
        """Take columns, which are to be dropped, out of a table's order: Iceberg could not read the
        table any more.
        """
        table = transaction.table()
        ids = field_ids(self._catalog.schema(table))
        names = {number: column for column, number in ids.items()}
        fields = json.loads(self._catalog.sort_order_json(table))["fields"]
        gone = {ids[column] for column in columns if column in ids}
        if all(each.get("source-id") not in gone for each in fields):
            return
        kept = [_sort_field(each, names) for each in fields if each.get("source-id") not in gone]
        self._replace(transaction, [field for field in kept if field is not None])

    def begin_anew(self, transaction: Any) -> None:
        """Sort a table, whose columns are those of another one now, as the option asked, as far as
        they allow that.
        """
        table = transaction.table()
        schema = self._catalog.schema(table)
        recorded = parse_sort_fields(table.properties().get(SORTED_BY) or "")
        fields = [field for field in recorded if not _fault(field.of, schema)]
        if fields:
            self._replace(transaction, fields)

    def _replace(self, transaction: Any, fields: Sequence[SortField]) -> None:
        """Put fields into the place of all that the order has."""
        update = transaction.replaceSortOrder()
        for field in fields:
            add = update.desc if field.is_descending else update.asc
            add(term(self._catalog, field.of), self._catalog.null_order(is_first=field.nulls_first))
        update.commit()


def _sort_field(described: Any, names: Any) -> SortField | None:
    """A field of an order in Iceberg's JSON; None: it is of another kind than those known here."""
    match = _TRANSFORM.fullmatch(str(described["transform"]))
    if match is None or described.get("source-id") not in names:
        return None
    name, width = match["name"], int(match["width"] or 0)
    if bool(width) != (name in (BUCKET, TRUNCATE)) or name == "void":
        return None
    transform = name if width or name == IDENTITY else f"{name}s"
    field = PartitionField(transform, names[described["source-id"]], width)
    is_first = described["null-order"] == "nulls-first"
    return SortField(field, described["direction"] == "desc", is_first)
