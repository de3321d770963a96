"""Reads the server's catalogue: the definitions of its tables, and what they are at a place in the log."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from server.puller.mysql.cascade import cascade_fault
from server.puller.mysql.connection import Session
from server.puller.mysql.definition import Definition, column_of
from server.puller.mysql.listener import WATERMARK_SCHEMA
from server.puller.mysql.statement import TableName
from storage.mysql.schema import Column

SYSTEM_SCHEMAS: Final = ("mysql", "information_schema", "performance_schema", "sys", WATERMARK_SCHEMA)
_TRANSACTIONAL: Final = frozenset({"INNODB", "ROCKSDB", "TOKUDB"})
_TABLES = """
SELECT table_schema, table_name, COALESCE(engine, ''), table_type FROM information_schema.tables
WHERE table_type IN ('BASE TABLE', 'SYSTEM VERSIONED') AND """
_COLUMNS = """
SELECT table_schema, table_name, column_name, data_type, column_type, is_nullable, character_octet_length,
numeric_precision, numeric_scale, datetime_precision, collation_name FROM information_schema.columns WHERE """
_COLUMNS_END = " ORDER BY table_schema, table_name, ordinal_position"
_KEYS = """
SELECT table_schema, table_name, index_name, column_name, nullable FROM information_schema.statistics
WHERE non_unique = 0 AND """
_KEYS_END = " ORDER BY table_schema, table_name, index_name, seq_in_index"
_CASCADES = """
SELECT constraint_schema, table_name,
CONCAT(constraint_name, ' (ON DELETE ', delete_rule, ' ON UPDATE ', update_rule, ')')
FROM information_schema.referential_constraints
WHERE (delete_rule NOT IN ('RESTRICT', 'NO ACTION') OR update_rule NOT IN ('RESTRICT', 'NO ACTION')) AND """
_COLLATIONS = "SELECT collation_name, id FROM information_schema.collations WHERE id IS NOT NULL"
_MARIADB_COLLATIONS = """
SELECT full_collation_name, id FROM information_schema.collation_character_set_applicability WHERE id IS NOT NULL"""


def read_definitions(session: Session, names: Sequence[TableName] | None = None) -> dict[TableName, Definition]:
    """The tables of these names that exist; without names all tables of users.

    Raises:
        MySqlUnavailableError, MySqlStatementError: the server does not answer, or refuses.
    """
    if names is not None and not names:
        return {}
    condition, values = _condition(names)
    tables = session.execute(_TABLES + condition, values)
    columns = session.execute(_COLUMNS + condition + _COLUMNS_END, values)
    keys = _keys(session.execute(_KEYS + condition + _KEYS_END, values))
    collations = _collations(session)
    cascades = {
        (schema, table): cascade_fault(key)
        for schema, table, key in session.execute(_CASCADES + _condition(names, "constraint_schema")[0], values)
    }
    by_table: dict[TableName, list[tuple[Any, ...]]] = defaultdict(list)
    for row in columns:
        by_table[row[0], row[1]].append(row)
    return {
        (schema, table): _definition(
            (schema, table), (engine, kind), by_table[schema, table], keys, collations, cascades.get((schema, table))
        )
        for schema, table, engine, kind in tables
    }


def _condition(names: Sequence[TableName] | None, schema: str = "table_schema") -> tuple[str, list[str]]:
    if names is None:
        return f"{schema} NOT IN ({', '.join(['%s'] * len(SYSTEM_SCHEMAS))})", list(SYSTEM_SCHEMAS)
    each = " OR ".join([f"({schema} = %s AND table_name = %s)"] * len(names))
    return f"({each})", [part for name in names for part in name]


_NAMES = (
    "table_schema",
    "table_name",
    "column_name",
    "data_type",
    "column_type",
    "is_nullable",
    "character_octet_length",
    "numeric_precision",
    "numeric_scale",
    "datetime_precision",
    "collation_name",
)


def _definition(
    name: TableName,
    engine_and_kind: tuple[str, str],
    rows: Sequence[tuple[Any, ...]],
    keys: Mapping[TableName, tuple[str, ...]],
    collations: Mapping[str, int],
    cascade: str | None,
) -> Definition:
    columns: list[Column] = []
    engine, kind = engine_and_kind
    faults: list[str] = [cascade] if cascade else []
    if engine.upper() not in _TRANSACTIONAL:
        faults.append(f"its engine {engine} knows no transactions; ALTER TABLE … ENGINE=InnoDB")
    if kind == "SYSTEM VERSIONED":
        faults.append("it is system-versioned, so its log has rows of the past")
    for row in rows:
        column = column_of(dict(zip(_NAMES, row, strict=True)), collations)
        if column is None:
            faults.append(f"column {row[2]} has the type {row[4]}, which is not known")
        else:
            columns.append(column)
    return Definition(name, tuple(columns), keys.get(name, ()), engine, tuple(faults))


def _keys(rows: Sequence[tuple[Any, ...]]) -> dict[TableName, tuple[str, ...]]:
    """For each table its primary key, else the unique key of the fewest columns, none of them nullable."""
    indexes: dict[TableName, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    nullable: set[tuple[TableName, str]] = set()
    for schema, table, index, column, null in rows:
        name = (schema, table)
        if column is None or null == "YES":
            nullable.add((name, index))
        else:
            indexes[name][index].append(column)
    found: dict[TableName, tuple[str, ...]] = {}
    for name, of_table in indexes.items():
        usable = [(index != "PRIMARY", len(columns), index) for index, columns in of_table.items()]
        usable = [each for each in usable if (name, each[2]) not in nullable]
        if usable:
            found[name] = tuple(of_table[min(usable)[2]])
    return found


def _collations(session: Session) -> dict[str, int]:
    rows = session.execute(_COLLATIONS)
    if session.flavor.is_mariadb and session.flavor.number >= (10, 10):
        rows += session.execute(_MARIADB_COLLATIONS)
    return {str(name): int(number) for name, number in rows}
