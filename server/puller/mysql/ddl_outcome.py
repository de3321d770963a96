"""What the tables that a statement touches are behind it, computed from its tree alone. No I/O.

Where the tree does not define a table, the outcome says so, and why.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from server.changefeed.table import TableRecord
from server.puller.mysql.ddl.column_types import Collations, LostError
from server.puller.mysql.ddl.definition import Definition, row_key
from server.puller.mysql.ddl.tracker import Context, Tracked, altered, copied, created, faults_of
from server.puller.mysql.ddl.tree import AlterTable, CreateTable, TableName
from server.puller.mysql.tables import Effect, Tables, new_id
from server.puller.mysql.transaction.transactions import LoggedStatement
from storage.mysql.schema import Table


@dataclass(frozen=True, slots=True)
class CatalogFacts:
    """What a statement leaves to the server: its collations, a schema's default collation, and
    definitions for records of old versions, which lack keys or collations.
    """

    collations: Collations = field(default_factory=Collations)
    schema_collation: str = ""
    """What text columns of a new table have by default, if its statement says nothing."""
    definitions: Mapping[TableName, Definition] = field(default_factory=dict)


@dataclass(slots=True)
class DdlOutcome:
    """The tables that a statement touched, as they are after it, by their new names;
    `lost` are those that the statement alone does not define, and why.
    """

    tracked: dict[TableName, Tracked] = field(default_factory=dict)
    lost: dict[TableName, str] = field(default_factory=dict)
    faults: dict[TableName, tuple[str, ...]] = field(default_factory=dict)
    """Why lost ones cannot be replicated, as far as the statement says so."""


class StatementOutcome:
    """Computes the outcome of one statement; `tables` are the changefeed's tables before it."""

    def __init__(
        self, tables: Tables, logged: LoggedStatement, effect: Effect, facts: CatalogFacts
    ) -> None:
        self._tables = tables
        self._logged = logged
        self._effect = effect
        self._catalog_facts = facts
        self._context = Context(facts.collations, logged.dialect, facts.schema_collation)

    def read(self) -> DdlOutcome:
        """Compute the outcome, a touched table at a time."""
        tree = self._logged.statement.tree
        outcome = DdlOutcome()
        for name, table_id in self._effect.touched.items():
            source_table = self._tables.by_id(table_id)
            before = Table.parse(source_table.record.table_info) if source_table else None
            if before is not None and name in self._catalog_facts.definitions:
                before = completed(before, self._catalog_facts.definitions[name])
            try:
                outcome.tracked[name] = self._tracked(name, before)
            except LostError as err:
                outcome.lost[name] = str(err)
                if isinstance(tree, CreateTable) and name == tree.name:
                    outcome.faults[name] = faults_of(tree)
        return outcome

    def _tracked(self, name: TableName, before: Table | None) -> Tracked:
        tree, effect = self._logged.statement.tree, self._effect
        if name in effect.taken_over:
            raise LostError("another table has taken its place")
        if isinstance(tree, CreateTable):
            if before is not None:
                if tree.if_not_exists:
                    return Tracked(before)
                raise LostError("it was dropped without a statement in the log")
            return self._created(tree)
        if before is None:
            raise LostError("it was not followed until now")
        if isinstance(tree, AlterTable) and effect.names_before.get(name, name) == tree.name:
            tracked = altered(before, tree, self._context)
            return replace(tracked, table=replace(tracked.table, name=name[1]))
        return Tracked(replace(before, name=name[1]))

    def _created(self, tree: CreateTable) -> Tracked:
        first = first_column_id(self._tables, tree.name)
        table_id = new_id(self._logged.commit_ts, tree.name)
        source = self._tables.by_name.get(tree.like) if tree.like is not None else None
        if source is not None:
            return copied(Table.parse(source.record.table_info), tree, table_id, first)
        return created(tree, table_id, first, self._context)


def first_column_id(tables: Tables, name: TableName) -> int:
    """The first column id of a new table; above those of a table that it replaces."""
    replaced = tables.by_name.get(name)
    return Table.parse(replaced.record.table_info).free_column_id if replaced else 1


def completed(table: Table, definition: Definition) -> Table:
    """The table with what records of old versions lack, as far as the catalogue,
    which may be further, fits them.
    """
    indexes = table.indexes
    theirs = definition.indexes
    if (
        indexes is None
        and theirs is not None
        and row_key(table.columns, theirs) == table.primary_key
    ):
        indexes = theirs
    return replace(table, indexes=indexes, collation=table.collation or definition.collation)


def is_incomplete(record: TableRecord) -> bool:
    """Whether an old version wrote a record, with less than it takes to follow a statement."""
    return "indexes" not in record.table_info or "collation" not in record.table_info
