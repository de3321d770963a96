"""Why a table cannot be replicated, as far as its definition tells: an engine without transactions,
system versioning, columns whose log says less than the table holds, and foreign keys that change
the table's own rows (CASCADE, SET NULL). What such a key does is in no event, and the target would
keep the rows as they were. Pure.

Each text says what to do. They are the same of a statement (`faults_of`) and of the server's
catalogue (`server.puller.mysql.session.catalogue`).
"""

from collections.abc import Sequence
from typing import Final

from server.puller.mysql.ddl.tree import (
    AddColumn,
    ChangeColumn,
    ColumnDef,
    CreateTable,
    Engine,
    Key,
    Spec,
    Versioning,
)

TRANSACTIONAL: Final = frozenset({"innodb", "rocksdb", "tokudb"})
VERSIONED: Final = "it is system-versioned, so its log has rows of the past"
"""Why such a table cannot be replicated."""


def faults_of(tree: CreateTable) -> tuple[str, ...]:
    """Why a table that is made like this cannot be replicated, wherever its columns come from."""
    specs: list[Spec] = [*tree.options, *(AddColumn(column) for column in tree.columns)]
    return faults_of_parts(
        specs, [*tree.keys, *(key for column in tree.columns for key in column.keys)]
    )


def faults_of_parts(specs: Sequence[Spec], keys: Sequence[Key]) -> tuple[str, ...]:
    """Why a table that is given these options, columns and keys cannot be replicated any more."""
    faults = [
        cascade_fault(f"{key.name} ({key.changes_rows})".lstrip())
        for key in keys
        if key.changes_rows
    ]
    for spec in specs:
        if isinstance(spec, Engine) and spec.name.lower() not in TRANSACTIONAL:
            faults.append(
                f"its engine {spec.name} knows no transactions; ALTER TABLE … ENGINE=InnoDB"
            )
        if isinstance(spec, Versioning) and spec.adds:
            faults.append(VERSIONED)
        if isinstance(spec, AddColumn | ChangeColumn):
            faults += [VERSIONED] if spec.column.versioned else []
            faults += _faults_of_type(spec.column)
    return tuple(dict.fromkeys(faults))


def _faults_of_type(column: ColumnDef) -> Sequence[str]:
    if (column.type.base, column.type.length) != ("year", 2):
        return ()
    return [year_fault(column.name)]


def year_fault(column: str) -> str:
    """Why a table with a YEAR(2) of MariaDB cannot be replicated, and what to do."""
    return (
        f"column {column} is a YEAR(2), of which the log has four digits and a SELECT two; ALTER "
        f"TABLE … MODIFY {column} YEAR(4)"
    )


def old_time_fault(column: str) -> str:
    """Why a table with a time of MariaDB 5.3 that has fractions of a second cannot be replicated,
    and what to do.
    """
    return (
        f"column {column} has fractions of a second in the format of MariaDB 5.3, whose length the "
        "log does not tell; SET GLOBAL mysql56_temporal_format=ON, then ALTER TABLE … FORCE"
    )


def cascade_fault(foreign_key: str) -> str:
    """Why a table with that foreign key cannot be replicated, and what to do."""
    return (
        f"its rows change by the foreign key {foreign_key}, which the log does not have; ALTER "
        "TABLE … DROP FOREIGN "
        "KEY, then add it with RESTRICT, and change the rows by statements of your own"
    )
