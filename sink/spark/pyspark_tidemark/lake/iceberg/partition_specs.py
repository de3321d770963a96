"""Partition specs of Iceberg tables: given to new tables, changed where the changefeed's option has
changed, and freed of columns that go.

What an option asked for is recorded as a property of the table. A spec that somebody else has
changed since (`ALTER TABLE … ADD PARTITION FIELD`) stays as it is until the option changes.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.jvm import java_dict
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.types import field_ids
from pyspark_tidemark.lake.partition_columns import check_fields, field_fault
from pyspark_tidemark.lake.partitioning import (
    BUCKET,
    IDENTITY,
    TRUNCATE,
    PartitionField,
    parse_fields,
)

PARTITIONED_BY: Final = "tidemark.partition-by"
"""The table property with the fields that the changefeed's option asked for."""
_INTS: Final = (pa.int8(), pa.int16(), pa.int32())


class PartitionSpecs:
    """Changes the specs of one catalog's tables."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def follow(self, name: str, table: Any, fields: Sequence[PartitionField]) -> Any:
        """Give a table the spec that is asked for, unless it was given that before; returns the
        table. Rows that it has stay where they are; nothing may wait for a commit of the table.

        Raises:
            SourceError: ErrPartitionUnsupported, and those of `java_catalog.translated`.
        """
        record = PARTITIONED_BY, ", ".join(map(str, fields))
        if self._catalog.is_recorded(table, record):
            return table
        check_fields(name, fields, self._catalog.schema(table))
        with self._catalog.recorded(name, table, "the partition spec", record) as transaction:
            self._replace(transaction, fields)
        return self._catalog.existing(name)

    def check_change(
        self, table: Any, name: str, *, widened: Sequence[str], dropped: Sequence[str]
    ) -> None:
        """Check that no file's partition is a value of a column that is to be dropped, or to get a
        wider type.

        Raises:
            SourceError: ErrPartitionUnsupported.
        """
        if not widened and not dropped:
            return
        schema = self._catalog.schema(table)
        ids = field_ids(schema)
        gone = {ids[column]: column for column in dropped}
        # Iceberg keeps such values as they were, and fails where it compares an int with a long.
        narrow = {ids[column]: column for column in widened if schema.field(column).type in _INTS}
        for spec in java_dict(table.specs()).values():
            for field in json.loads(self._catalog.spec_json(table, spec))["fields"]:
                source, transform = field.get("source-id"), field["transform"]
                if source in gone:
                    raise _unreadable(name, transform, gone[source], "is to be dropped")
                if source in narrow and transform.startswith((IDENTITY, TRUNCATE)):
                    raise _unreadable(name, transform, narrow[source], "is to get a wider type")

    def free(self, transaction: Any) -> None:
        """Take all fields out of the spec of a table whose rows and columns go."""
        table = transaction.table()
        update = transaction.updateSpec()
        for field in self._fields(table):
            update.removeField(field["name"])
        update.commit()

    def begin_anew(self, transaction: Any) -> None:
        """Partition a table, whose columns are those of another one now, as the option asked, as
        far as they allow that.
        """
        table = transaction.table()
        recorded = table.properties().get(PARTITIONED_BY) or ""
        schema = self._catalog.schema(table)
        fields = [field for field in parse_fields(recorded) if not field_fault(field, schema)]
        if fields:
            self._replace(transaction, fields)

    def _replace(self, transaction: Any, fields: Sequence[PartitionField]) -> None:
        """Put fields into the place of all that the spec has."""
        table = transaction.table()
        ids = field_ids(self._catalog.schema(table))
        there = {(each["transform"], each["source-id"]): each for each in self._fields(table)}
        by_identity = {(_java_name(field), ids[field.column]): field for field in fields}
        update = transaction.updateSpec()
        for each in (each for identity, each in there.items() if identity not in by_identity):
            update.removeField(each["name"])
        for identity, field in by_identity.items():
            if identity not in there:
                update.addField(term(self._catalog, field))
        update.commit()

    def _fields(self, table: Any) -> list[dict[str, Any]]:
        described = json.loads(self._catalog.spec_json(table))["fields"]
        for each in described:
            if "source-id" not in each:
                raise SourceError(
                    "ErrPartitionUnsupported",
                    f"{table.name()} is partitioned by {each['name']}, of several columns: drop "
                    "this partition field",
                )
        return [each for each in described if each["transform"] != "void"]


def term(catalog: Catalog, field: PartitionField) -> Any:
    """A field as Iceberg's updates take it."""
    expressions = catalog.expressions
    if field.transform == IDENTITY:
        return expressions.ref(field.column)
    if field.transform in (BUCKET, TRUNCATE):
        return getattr(expressions, field.transform)(field.column, field.width)
    return getattr(expressions, field.transform.removesuffix("s"))(field.column)


def _java_name(field: PartitionField) -> str:
    """The transform as Iceberg's JSON has it."""
    if field.transform == IDENTITY:
        return IDENTITY
    if field.width:
        return f"{field.transform}[{field.width}]"
    return field.transform.removesuffix("s")


def _unreadable(name: str, transform: str, column: str, change: str) -> SourceError:
    return SourceError(
        "ErrPartitionUnsupported",
        f"{name} is or was partitioned by {transform} of {column}, which {change}: Iceberg could "
        "not read files of before any more. Start a new changefeed and target, or use "
        "--schema-evolution ignore",
    )
