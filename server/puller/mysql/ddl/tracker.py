"""Computes a table after a statement from the table before it and from the statement's tree. Pure.

Invariants:
1. A column keeps its id through renames, moves and changes of type; one that is added gets an id
   that no column of the table has had. So DROP v, ADD v is another column.
2. All changes of one ALTER are about the columns as they were before it, as on the server.
3. Where the tree does not tell what the table is, LostError says so; where stored values change
   that no event tells, `Tracked.unclear` says why. Nothing is guessed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from server.puller.mysql.ddl.column_types import (
    Collations,
    LostError,
    character_bytes,
    column_of_definition,
    varying,
)
from server.puller.mysql.ddl.definition import (
    UNTOLD,
    TableKeys,
    row_key,
    with_names_of,
    without_present,
)
from server.puller.mysql.ddl.faults import faults_of, faults_of_parts
from server.puller.mysql.ddl.stored_values import (
    UnclearValueError,
    change_of_values,
    initial_default_of,
)
from server.puller.mysql.ddl.tokens import Dialect
from server.puller.mysql.ddl.tree import (
    ADDS_PERIOD,
    SETS_DEFAULT,
    AddColumn,
    AddKey,
    AlterTable,
    ChangeColumn,
    Charset,
    ColumnDef,
    CreateTable,
    DropColumn,
    DropKey,
    Key,
    Literal,
    Position,
    RenameColumn,
    RenameKey,
    Spec,
    Versioning,
)
from storage.mysql.charset import BINARY, UTF8
from storage.mysql.schema import STRINGS, Column, Index, Table, Type

_TEXTS: Final = STRINGS | {Type.ENUM, Type.SET}
_OTHER_THAN_ASCII: Final = frozenset({"ucs2", "utf16", "utf16le", "utf32", "swe7"})
"""Character sets in which ASCII's characters are other bytes."""
_WORD: Final = re.compile(r"[\w$]+")


@dataclass(frozen=True, slots=True)
class Context:
    """The facts that a statement's text lacks: the server's collations, and the session."""

    collations: Collations = field(default_factory=Collations)
    dialect: Dialect = field(default_factory=Dialect)
    schema_collation: str = ""
    """The default collation of text columns of new tables."""


@dataclass(frozen=True, slots=True)
class Tracked:
    """A table after a statement."""

    table: Table
    unclear: tuple[str, ...] = ()
    """Why its rows must be read again."""
    faults: tuple[str, ...] = ()
    """Why it can no longer be replicated."""


def _same_bytes(column: Column, charset: str) -> bool:
    """Whether the members of an ENUM or SET are the same bytes in another character set."""
    charsets = {column.charset, charset}
    is_ascii = all(map(str.isascii, column.elems)) and charsets.isdisjoint(_OTHER_THAN_ASCII)
    return len(charsets) == 1 or charsets <= UTF8 - {"ascii"} or is_ascii


def created(tree: CreateTable, table_id: int, first_column_id: int, context: Context) -> Tracked:
    """The table that CREATE TABLE makes.

    Raises:
        LostError: its columns come from elsewhere, or depend on what is not known.
    """
    if tree.unsure:
        raise LostError(tree.unsure)
    if tree.like is not None or not tree.columns or (tree.selects and not tree.logs_rows):
        raise LostError("its columns come from another table")
    _check_period(tree.options)
    usual = _table_collation(
        tree.options, context.collations.by_name.get(context.schema_collation, 0), context
    )
    columns = [
        replace(_column(definition, usual, context), id=first_column_id + place)
        for place, definition in enumerate(tree.columns)
    ]
    keys = TableKeys((), {})
    for definition in tree.columns:
        keys.add_all(definition.keys)
    keys.add_all(tree.keys)
    table = _table(
        Table(table_id, tree.name[1], (), ()),
        columns,
        keys.all,
        first_column_id + len(columns),
        usual,
    )
    return Tracked(table, (), faults_of(tree))


def copied(source: Table, tree: CreateTable, table_id: int, first_column_id: int) -> Tracked:
    """The table that CREATE TABLE … LIKE makes."""
    columns = tuple(
        replace(column, id=first_column_id + place, initial_default=None)
        for place, column in enumerate(source.columns)
    )
    return Tracked(
        replace(
            source,
            id=table_id,
            name=tree.name[1],
            columns=columns,
            next_column_id=first_column_id + len(columns),
        )
    )


def altered(table: Table, tree: AlterTable, context: Context) -> Tracked:
    """The table that ALTER TABLE makes of `table`, under its old name.

    Raises:
        LostError: the statement is about columns that the table does not have, or depends on what
            is not known.
    """
    if tree.unsure:
        raise LostError(tree.unsure)
    return _Alter(table, tree, context).run()


class _Alter:
    def __init__(self, table: Table, tree: AlterTable, context: Context) -> None:
        self._table = table
        self._tree = tree
        self._context = context
        self._old = {column.name.lower(): column for column in table.columns}
        self._dropped: set[str] = set()
        self._changed: dict[str, ChangeColumn] = {}
        self._renamed: dict[str, str] = {}
        self._new: list[AddColumn | ChangeColumn] = []
        self._defined: set[str] = set()
        """Columns that the statement defined so far, also where IF EXISTS finds none to change:
        IF NOT EXISTS takes them for present, as MariaDB does.
        """
        self._next_id = table.free_column_id
        self._unclear: list[str] = []
        self._new_keys = self._keys_added()
        self._primary_added = {
            part.column.lower()
            for key in self._new_keys
            if key.kind == "primary"
            for part in key.parts
        }
        self._usual = _table_collation(tree.specs, table.collation, context)

    def run(self) -> Tracked:
        _check_period(self._tree.specs)
        for spec in self._tree.specs:
            self._sort(spec)
        columns = self._columns()
        names = [column.name.lower() for column in columns]
        if len(set(names)) < len(names) or not columns:
            raise LostError("two columns have one name, or none is left")
        columns = self._converted(columns)
        self._check_computed(names)
        self._check_untold()
        self._check_primary(columns)
        indexes = self._indexes()
        if self._tree.takes_rows:
            self._unclear.append("IGNORE takes rows away")
        table = _table(self._table, columns, indexes, self._next_id, self._usual)
        table = self._with_key(table)
        return Tracked(
            table, tuple(self._unclear), faults_of_parts(self._tree.specs, self._new_keys)
        )

    def _with_key(self, table: Table) -> Table:
        """Keys that are not known stay what tells rows apart, if their columns do."""
        if table.indexes is not None:
            return table
        if any(isinstance(spec, AddKey | DropKey) for spec in self._tree.specs) or self._new_keys:
            raise LostError("its keys are not known")
        renames = {old: new for old, new in self._names().items() if new is not None}
        key = [renames.get(name.lower()) for name in self._table.primary_key]
        if None in key:
            raise LostError("its keys are not known")
        return replace(table, primary_key=tuple(name for name in key if name is not None))

    # What the statement says of columns

    def _sort(self, spec: Spec) -> None:
        if isinstance(spec, DropColumn):
            if self._has(spec.name, optional=spec.if_exists):
                self._dropped.add(spec.name.lower())
        elif isinstance(spec, ChangeColumn):
            _check_own_keys(spec.column, passed_over=spec.if_exists)
            self._defined.add(spec.column.name.lower())
            if self._has(spec.old, optional=spec.if_exists):
                if spec.old.lower() in self._changed:
                    raise LostError(f"column {spec.old} is changed twice")
                self._changed[spec.old.lower()] = spec
                self._new.append(spec)
        elif isinstance(spec, RenameColumn):
            if self._has(spec.old, optional=spec.if_exists):
                if spec.old.lower() in self._renamed:
                    raise LostError(f"column {spec.old} is renamed twice")
                self._renamed[spec.old.lower()] = spec.new
        elif isinstance(spec, AddColumn):
            _check_own_keys(spec.column, passed_over=spec.if_not_exists)
            name = spec.column.name.lower()
            if not (spec.if_not_exists and name in {*self._old, *self._defined}):
                self._new.append(spec)
            self._defined.add(name)

    def _has(self, name: str, *, optional: bool) -> bool:
        if name.lower() in self._old:
            return True
        if not optional:
            raise LostError(f"there is no column {name}")
        return False

    def _columns(self) -> list[Column]:
        if (
            self._dropped & (self._changed.keys() | self._renamed.keys())
            or self._changed.keys() & self._renamed.keys()
        ):
            raise LostError("a column is changed in two ways")
        made = {id(each): self._made(each) for each in self._new}
        columns: list[Column] = []
        for name, column in self._old.items():
            change = self._changed.get(name)
            if name in self._dropped:
                continue
            if change is None:
                columns.append(
                    replace(
                        column,
                        name=self._renamed.get(name, column.name),
                        generated=self._with_new_names(column.generated),
                    )
                )
            else:
                columns.append(made[id(change)])
        # As the server does it: a column that moves is where it was until it is its turn, so that
        # others can be placed behind it.
        for each in self._new:
            if each.position is not None:
                columns = [column for column in columns if column is not made[id(each)]]
                columns.insert(_place(columns, each.position), made[id(each)])
            elif isinstance(each, AddColumn):
                columns.append(made[id(each)])
        return columns

    def _with_new_names(self, expression: str) -> str:
        """The expression of a generated column with the names that its columns have now: the server
        writes them into its expression, too.
        """
        names = {old: new for old, new in self._names().items() if new is not None}
        return _renamed(expression, {old: new for old, new in names.items() if old != new.lower()})

    def _made(self, spec: AddColumn | ChangeColumn) -> Column:
        column = _column(spec.column, self._usual, self._context)
        if column.name.lower() in self._primary_added:
            column = replace(column, nullable=False)
        if isinstance(spec, ChangeColumn):
            return self._changed_column(self._old[spec.old.lower()], spec.column, column)
        column = replace(column, id=self._next_id)
        self._next_id += 1
        if column.generated or column.auto_increment:
            self._unclear.append(f"column {column.name} is computed for each row")
            return column
        try:
            return replace(
                column,
                initial_default=initial_default_of(column, spec.column, self._context.dialect),
            )
        except UnclearValueError as err:
            self._unclear.append(
                f"the value that rows get in column {column.name} is not known: {err}"
            )
            return column

    def _changed_column(self, old: Column, definition: ColumnDef, new: Column) -> Column:
        if self._is_in_primary(old.name):
            new = replace(new, nullable=False)
        why = change_of_values(old, new, self._context.dialect, ignores=self._tree.ignore)
        if not why and new.type in (Type.FLOAT, Type.DOUBLE) and definition.type.scale is not None:
            why = "digits may be rounded off"
        if why:
            self._unclear.append(f"column {old.name}: {why}")
        return replace(
            new,
            id=old.id,
            initial_default=old.initial_default
            if old.type is new.type and old.meta == new.meta
            else None,
        )

    def _is_in_primary(self, name: str) -> bool:
        if any(isinstance(spec, DropKey) and spec.kind == "primary" for spec in self._tree.specs):
            return False
        primary = [index.columns for index in self._table.indexes or () if index.kind == "primary"]
        return name in (primary[0] if primary else ())

    def _converted(self, columns: list[Column]) -> list[Column]:
        """CONVERT TO CHARACTER SET, of columns that were there before."""
        charsets = [spec for spec in self._tree.specs if isinstance(spec, Charset)]
        if not any(spec.converts for spec in charsets):
            return columns
        if self._changed or len(charsets) > 1:
            raise LostError("columns are converted, and changed otherwise at once")
        types = [spec.column.type for spec in self._new]
        if any(spec.charset or spec.collation or spec.bin for spec in types):
            raise LostError(
                "columns are converted, and one is added with a character set of its own"
            )
        return [self._in_charset(column) for column in columns]

    def _in_charset(self, column: Column) -> Column:
        if column.type not in _TEXTS or column.charset == BINARY:
            return column
        if not self._usual:
            raise LostError("the table's collation is not known")
        old, new = character_bytes(column.collation), character_bytes(self._usual)
        converted = replace(column, collation=self._usual)
        if column.elems and not _same_bytes(column, converted.charset):
            # A MariaDB keeps their bytes, which are other characters then, or none.
            raise LostError(f"the server says what the members of column {column.name} become")
        if column.type is Type.VARCHAR:
            kind, meta = varying(column.meta // old * new)
            converted = replace(converted, type=kind, meta=meta)
        elif column.type is Type.STRING:
            converted = replace(converted, meta=column.meta // old * new)
        elif column.type is Type.BLOB and new > old and column.meta < 4:
            converted = replace(converted, meta=column.meta + 1)
        if column.id < self._table.free_column_id:
            why = change_of_values(
                column, converted, self._context.dialect, ignores=self._tree.ignore
            )
            if why:
                self._unclear.append(f"column {column.name}: {why}")
        return converted

    def _check_computed(self, names: Sequence[str]) -> None:
        """Generated columns whose expressions stay as they are hold other values once what they are
        computed from is another: its length in bytes, its digits, its collation, its DEFAULT, or
        another column that has the name of a dropped one (`names` are those of all columns).
        """
        specs, changed = self._tree.specs, {*self._changed, *self._dropped.intersection(names)}
        if any(isinstance(spec, Charset) and spec.converts for spec in specs):
            changed |= {name for name, column in self._old.items() if column.type in _TEXTS}
        if SETS_DEFAULT in specs:
            changed.add("default")
        kept = [column for name, column in self._old.items() if name not in self._dropped]
        if changed and any(column.generated == UNTOLD for column in kept):
            self._unclear.append("whether columns are computed from what is changed is not known")
        for column in kept:
            if column.generated:
                of = sorted(each for each in changed if _names(column.generated, each))
                if of:
                    why = f"column {column.name} is computed from {', '.join(of)}"
                    self._unclear.append(why)

    def _check_untold(self) -> None:
        """What ends here, and was not known of a table that was read late: whose rows told of its
        columns, while the catalogue was further.
        """
        specs = self._tree.specs
        if any(isinstance(spec, Versioning) and not spec.adds for spec in specs):
            self._unclear.append("its log had rows of the past while it was system-versioned")
        drops = (spec.kind for spec in specs if isinstance(spec, DropKey))
        is_untold = any(column.generated == UNTOLD for column in self._table.columns)
        if is_untold and not {"foreign", "constraint"}.isdisjoint(drops):
            self._unclear.append("whether the foreign key that ends here changed rows is not known")

    # Keys

    def _names(self) -> dict[str, str | None]:
        """New names of the columns there were; None: dropped."""
        names: dict[str, str | None] = {name: column.name for name, column in self._old.items()}
        names |= self._renamed
        names |= {name: change.column.name for name, change in self._changed.items()}
        return names | dict.fromkeys(self._dropped)

    def _names_in_keys(self) -> dict[str, str | None]:
        """Rename within keys as MariaDB does: the part of a key over a dropped column goes on with
        an added one of that name.
        """
        names = self._names()
        added = {
            each.column.name.lower() for each in self._new if isinstance(each, AddColumn)
        } & names.keys()
        in_keys = {name.lower() for index in self._table.indexes or () for name in index.columns}
        if added & in_keys and (
            not self._context.dialect.mariadb or added & in_keys - self._dropped
        ):
            raise LostError("a column of a key gives its name to another one")
        return names | {name: name for name in added & in_keys}

    def _keys_added(self) -> list[Key]:
        """A column that is there already, or not, is passed over by IF [NOT] EXISTS;
        its keys are not.
        """
        columns = [
            spec.column for spec in self._tree.specs if isinstance(spec, AddColumn | ChangeColumn)
        ]
        of_columns = [key for column in columns for key in column.keys]
        keys = [spec.key for spec in self._tree.specs if isinstance(spec, AddKey)]
        return of_columns + without_present(keys, of_columns, self._table.indexes or ())

    def _indexes(self) -> tuple[Index, ...] | None:
        if self._table.indexes is None:
            return None
        keys = TableKeys(self._table.indexes, self._names_in_keys())
        specs = self._tree.specs
        keys.drop_and_rename(
            [spec for spec in specs if isinstance(spec, DropKey)],
            [spec for spec in specs if isinstance(spec, RenameKey)],
        )
        keys.add_all(self._new_keys)
        return keys.all

    def _check_primary(self, columns: Sequence[Column]) -> None:
        """Columns that are NOT NULL by a new primary key alone; `_changed_column` sees to those
        that the statement changes.
        """
        ids = {column.id for column in columns if column.name.lower() in self._primary_added}
        for name, column in self._old.items():
            if column.id in ids and name not in self._changed:
                why = change_of_values(
                    column,
                    replace(column, nullable=False),
                    self._context.dialect,
                    ignores=self._tree.ignore,
                )
                if why:
                    self._unclear.append(f"column {column.name}: {why} in the primary key")


def _check_own_keys(column: ColumnDef, *, passed_over: bool) -> None:
    if passed_over and column.keys:
        raise LostError(f"whether column {column.name} brings a key depends on the keys' names")


def _check_period(specs: Sequence[Spec]) -> None:
    if ADDS_PERIOD in specs:
        raise LostError("columns become NOT NULL by a period over them")


def _names(expression: str, word: str) -> bool:
    """Whether a word, in lower case, may stand in an expression."""
    text = expression.lower()
    return word in (re.findall(r"[\w$]+", text) if _WORD.fullmatch(word) else text)


def _renamed(expression: str, names: Mapping[str, str]) -> str:
    """An expression with other names in it, all put there at once."""
    if not expression or not names:
        return expression
    words = [
        rf"(?<![\w$]){re.escape(name)}(?![\w$])" if _WORD.fullmatch(name) else re.escape(name)
        for name in sorted(names, key=len, reverse=True)
    ]
    return re.sub("|".join(words), lambda each: names[each[0].lower()], expression, flags=re.I)


def _column(definition: ColumnDef, usual: int, context: Context) -> Column:
    column = column_of_definition(
        definition, usual, context.collations, mariadb=context.dialect.mariadb
    )
    if definition.row_period:
        raise LostError("a period of system versioning")
    if _depends_on_session(definition, context.dialect):
        raise LostError(
            f"TIMESTAMP column {definition.name} is NOT NULL, and may have a default that it does "
            "not say, unless explicit_defaults_for_timestamp is on"
        )
    is_key = any(key.kind == "primary" for key in definition.keys)
    return replace(
        column, nullable=column.nullable and not is_key and not definition.auto_increment
    )


def _depends_on_session(definition: ColumnDef, dialect: Dialect) -> bool:
    """Whether what a TIMESTAMP column is without NULL or NOT NULL is not known."""
    says = definition.nullable is not None or definition.default == Literal("null")
    return definition.type.base == "timestamp" and not (
        says or definition.generated or dialect.explicit_timestamps
    )


def _table(
    table: Table,
    columns: Sequence[Column],
    indexes: tuple[Index, ...] | None,
    next_id: int,
    collation: int,
) -> Table:
    """The table with these columns, those of its primary key NOT NULL."""
    primary = {
        name.lower() for index in indexes or () if index.kind == "primary" for name in index.columns
    }
    columns = tuple(
        replace(column, nullable=False) if column.name.lower() in primary else column
        for column in columns
    )
    return Table(
        table.id,
        table.name,
        columns,
        row_key(columns, indexes or ()),
        next_id,
        collation,
        with_names_of(indexes, columns),
    )


def _place(columns: Sequence[Column], position: Position) -> int:
    if position.after is None:
        return 0
    for place, column in enumerate(columns):
        if column.name.lower() == position.after.lower():
            return place + 1
    raise LostError(f"there is no column {position.after}")


def _table_collation(specs: Sequence[Spec], before: int, context: Context) -> int:
    """The table's own collation after the options in a statement."""
    charset, collation = "", ""
    for spec in specs:
        if isinstance(spec, Charset):
            charset, collation = (
                spec.charset or charset,
                spec.collation or ("" if spec.charset else collation),
            )
            if spec.converts and not spec.charset:
                raise LostError("the database's character set is not known")
    if not charset and not collation:
        return before
    return context.collations.of(charset, collation, before)
