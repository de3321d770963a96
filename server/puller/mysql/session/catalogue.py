"""Reads the server's catalogue: the definitions of its tables,
and what they are at a place in the log.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from server.puller.mysql.ddl.column_types import Collations
from server.puller.mysql.ddl.definition import Definition, column_of, row_key
from server.puller.mysql.ddl.faults import (
    TRANSACTIONAL,
    VERSIONED,
    cascade_fault,
    old_time_fault,
    year_fault,
)
from server.puller.mysql.ddl.tree import TableName
from server.puller.mysql.session.connection import Session
from server.puller.mysql.session.errors import MySqlPrivilegeError, MySqlStatementError
from storage.model.system_schemas import OF_MYSQL
from storage.mysql.schema import SINCE_5_6, Column, Index, Type

_TABLES = """
SELECT table_schema, table_name, COALESCE(engine, ''), table_type, table_collation FROM information_schema.tables
WHERE table_type IN ('BASE TABLE', 'SYSTEM VERSIONED') AND """
# A VECTOR of MariaDB is a VARBINARY in its log.
_COLUMNS = """
SELECT table_schema, table_name, column_name,
IF(data_type = 'vector' AND LOCATE('mariadb', LOWER(VERSION())), 'varbinary', data_type), column_type, is_nullable,
character_octet_length, numeric_precision, numeric_scale, datetime_precision, collation_name, extra,
generation_expression
FROM information_schema.columns WHERE """
_COLUMNS_END = " ORDER BY table_schema, table_name, ordinal_position"
_KEYS = """
SELECT table_schema, table_name, index_name, non_unique, column_name FROM information_schema.statistics WHERE """
_KEYS_END = " ORDER BY table_schema, table_name, index_name, seq_in_index"
_CASCADES = """
SELECT constraint_schema, table_name,
CONCAT(constraint_name, ' (ON DELETE ', delete_rule, ' ON UPDATE ', update_rule, ')')
FROM information_schema.referential_constraints
WHERE (delete_rule NOT IN ('RESTRICT', 'NO ACTION') OR update_rule NOT IN ('RESTRICT', 'NO ACTION')) AND """
_OWN_DEFAULTS = "SHOW VARIABLES LIKE 'character_set_collations'"
_SERVER_DEFAULTS = "SET STATEMENT character_set_collations = '' FOR "
_DEFAULTS = "SELECT character_set_name, default_collate_name FROM information_schema.character_sets"
_SCHEMA_COLLATION = (
    "SELECT default_collation_name FROM information_schema.schemata WHERE schema_name = %s"
)
_TRIGGERS = """
SELECT COUNT(*) FROM information_schema.triggers WHERE event_object_schema = %s AND event_object_table = %s"""
_MARIADB_ROUTINES = "SELECT type, CONVERT(body USING utf8mb4) FROM mysql.proc"
_ROUTINES = (
    "SELECT routine_type, routine_definition FROM information_schema.routines WHERE "
    "routine_schema <> 'sys'"
)
_TRIGGER_BODIES = "SELECT 'TRIGGER', action_statement FROM information_schema.triggers"
_COLLATIONS = "SELECT collation_name, id FROM information_schema.collations WHERE id IS NOT NULL"
_MARIADB_COLLATIONS = """
SELECT full_collation_name, id FROM information_schema.collation_character_set_applicability WHERE id IS NOT NULL"""


def read_definitions(
    session: Session, names: Sequence[TableName] | None = None
) -> dict[TableName, Definition]:
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
        for schema, table, key in session.execute(
            _CASCADES + _condition(names, "constraint_schema")[0], values
        )
    }
    by_table: dict[TableName, list[tuple[Any, ...]]] = defaultdict(list)
    for row in columns:
        by_table[row[0], row[1]].append(row)
    definitions = {
        (schema, table): _definition(
            (schema, table), (engine, kind, collation), by_table[schema, table], keys.get((schema, table), ()),
            collations, cascades.get((schema, table)),
        )
        for schema, table, engine, kind, collation in tables
    }  # fmt: skip
    return {name: _with_members(session, each) for name, each in definitions.items()}


def _with_members(session: Session, definition: Definition) -> Definition:
    """With the members of each ENUM and SET as they are.

    MariaDB's catalogue shows `?` for characters of four bytes, which a variable of the column's
    type has: it needs neither rows nor a right to write.
    """
    places = [
        (column, place)
        for column in definition.columns
        for place, member in enumerate(column.elems)
        if "?" in member
    ]
    if not places or not session.flavor.is_mariadb:
        return definition
    variables, shown = [], []
    for number, (column, place) in enumerate(places):
        of_column = ".".join(map(_quoted, (*definition.name, column.name)))
        value = place + 1 if column.type is Type.ENUM else 1 << place
        variables.append(f"DECLARE v{number} TYPE OF {of_column} DEFAULT {value};")
        shown.append(f"HEX(CONVERT(v{number} USING utf8mb4))")
    block = f"BEGIN NOT ATOMIC {' '.join(variables)} SELECT {', '.join(shown)}; END"
    try:
        read = session.row(block)
    except (MySqlPrivilegeError, MySqlStatementError):
        return definition  # altered or dropped meanwhile, or a table that no SELECT may read
    members: dict[str, dict[int, str]] = defaultdict(dict)
    for (column, place), member in zip(places, read, strict=True):
        members[column.name][place] = bytes.fromhex(member).decode()
    columns = tuple(
        replace(
            column,
            elems=tuple(
                members[column.name].get(place, member) for place, member in enumerate(column.elems)
            ),
        )
        for column in definition.columns
    )
    return replace(definition, columns=columns)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def table_names(session: Session) -> list[TableName]:
    """All tables of users."""
    condition, values = _condition(None)
    return [(row[0], row[1]) for row in session.execute(_TABLES + condition, values)]


def read_columns(
    session: Session, names: Sequence[TableName]
) -> dict[TableName, list[tuple[str, Column | None, str]]]:
    """The columns of those of these tables that exist, without what the server hides: the name, the
    column (None: its type is not known), and the name of its collation, which may be empty.
    """
    columns: dict[TableName, list[tuple[str, Column | None, str]]] = defaultdict(list)
    if not names:
        return {}
    condition, values = _condition(names)
    collations = _collations(session)
    for row in session.execute(_COLUMNS + condition + _COLUMNS_END, values):
        named = dict(zip(_NAMES, row, strict=True))
        column = column_of(named, collations)
        columns[row[0], row[1]].append((row[2], column, str(named["collation_name"] or "")))
    return dict(columns)


def shows(shown: Column, column: Column) -> bool:
    """Whether the catalogue's column is stored as `column` is, as far as a catalogue tells.

    It does not tell the times of old servers from those since 5.6, and MariaDB shows `?` for
    characters of four bytes in the members of an ENUM or SET.
    """
    return (
        _stored_as(shown) == _stored_as(column)
        and len(shown.elems) == len(column.elems)
        and all(
            theirs == mine or "?" in theirs
            for theirs, mine in zip(shown.elems, column.elems, strict=True)
        )
    )


def _stored_as(column: Column) -> tuple[object, ...]:
    kind = SINCE_5_6.get(column.type, column.type)
    return kind, column.meta, column.unsigned, column.charset


def read_collations(session: Session) -> Collations:
    """The server's collations, and the default one of each character set."""
    by_name = _collations(session)
    own = session.execute(_OWN_DEFAULTS)  # since MariaDB 11.2
    rows = session.execute(f"{_SERVER_DEFAULTS if own else ''}{_DEFAULTS}")
    defaults = {str(charset): by_name.get(str(name), 0) for charset, name in rows}
    return Collations(by_name, defaults)


def schema_collation(session: Session, schema: str) -> str:
    """The default collation of text columns of new tables; empty: there is no such schema now."""
    rows = session.execute(_SCHEMA_COLLATION, [schema])
    return str(rows[0][0]) if rows else ""


def changes_alone(session: Session, name: TableName) -> bool:
    """Whether it is a base table whose rows change without triggers,
    which may change those of others.
    """
    tables = session.execute(_TABLES + _condition([name])[0], list(name))
    ((triggers,),) = session.execute(_TRIGGERS, list(name))
    return bool(tables) and not triggers


def may_nest_savepoints(session: Session) -> bool:
    """Whether a function or trigger may set savepoints: one does now,
    or the user may not see all of them.
    """
    grants = " ".join(str(row[0]) for row in session.execute("SHOW GRANTS"))
    everywhere = " ".join(re.findall(r"GRANT (.*?) ON \*\.\* TO", grants))
    if not re.search(r"ALL PRIVILEGES|\bTRIGGER\b", everywhere):
        return True
    try:
        bodies = session.execute(_MARIADB_ROUTINES if session.flavor.is_mariadb else _ROUTINES)
    except (MySqlPrivilegeError, MySqlStatementError):
        return True
    bodies += session.execute(_TRIGGER_BODIES)
    if any(body is None for _, body in bodies):
        return True
    texts = [(str(kind), str(body).upper()) for kind, body in bodies]
    saves = {kind for kind, text in texts if "SAVEPOINT" in text}
    calls = any("CALL" in text for kind, text in texts if kind != "PROCEDURE")
    return bool(saves - {"PROCEDURE"}) or (bool(saves) and calls)


def _condition(
    names: Sequence[TableName] | None, schema: str = "table_schema"
) -> tuple[str, list[str]]:
    if names is None:
        return f"{schema} NOT IN ({', '.join(['%s'] * len(OF_MYSQL))})", sorted(OF_MYSQL)
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
    "extra",
    "generation_expression",
)


def _definition(
    name: TableName,
    engine_kind_collation: tuple[str, str, str | None],
    rows: Sequence[tuple[Any, ...]],
    indexes: tuple[Index, ...],
    collations: Mapping[str, int],
    cascade: str | None,
) -> Definition:
    columns: list[Column] = []
    engine, kind, collation = engine_kind_collation
    faults: list[str] = [cascade] if cascade else []
    if engine.lower() not in TRANSACTIONAL:
        faults.append(f"its engine {engine} knows no transactions; ALTER TABLE … ENGINE=InnoDB")
    if kind == "SYSTEM VERSIONED":
        faults.append(VERSIONED)
    for row in rows:
        column = column_of(dict(zip(_NAMES, row, strict=True)), collations)
        if column is None:
            faults.append(f"column {row[2]} has the type {row[4]}, which is not known")
        else:
            columns.append(column)
            faults += [year_fault(column.name)] if row[4] == "year(2)" else []
            if column.type in SINCE_5_6.values() and column.meta and "mariadb-5.3" in row[4]:
                faults.append(old_time_fault(column.name))
    key, number = row_key(columns, indexes), collations.get(str(collation), 0)
    return Definition(name, tuple(columns), key, engine, tuple(faults), indexes, number)


def _keys(rows: Sequence[tuple[Any, ...]]) -> dict[TableName, tuple[Index, ...]]:
    parts: dict[TableName, dict[tuple[str, str], list[str]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for schema, table, index, non_unique, column in rows:
        kind = "plain" if int(non_unique) else "primary" if index == "PRIMARY" else "unique"
        parts[schema, table][str(index), kind].append(str(column) if column is not None else "")
    return {
        name: tuple(Index(index, kind, tuple(columns)) for (index, kind), columns in keys.items())
        for name, keys in parts.items()
    }


def _collations(session: Session) -> dict[str, int]:
    rows = session.execute(_COLLATIONS)
    if session.flavor.is_mariadb and session.flavor.number >= (10, 10):
        rows += session.execute(_MARIADB_COLLATIONS)
    return {str(name): int(number) for name, number in rows}
