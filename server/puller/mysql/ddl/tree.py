"""A statement as a tree: operations on tables, each with all of it that changes data.

Pure.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

TableName: TypeAlias = tuple[str, str]
"""Schema and table; both may hold dots."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant: `sort` is number, string, hex, bits, bool, null, or date, time,
    timestamp (typed literals).
    """

    sort: str
    text: str = ""
    charset: str = ""
    """Of a string or hex constant with an introducer, as `_latin1'x'`."""


@dataclass(frozen=True, slots=True)
class Expression:
    """Anything that is computed; its text, blanks between its words."""

    text: str


Default: TypeAlias = Literal | Expression | None
"""None: there is no DEFAULT."""


@dataclass(frozen=True, slots=True)
class TypeSpec:
    """A column's type: `base` is the word that the server shows for it (information_schema's
    DATA_TYPE).
    """

    base: str
    length: int | None = None
    scale: int | None = None
    unsigned: bool = False
    charset: str = ""
    collation: str = ""
    bin: bool = False
    """The character set's binary collation (`BINARY` behind the type)."""
    elems: tuple[str, ...] = ()
    compressed: bool = False


@dataclass(frozen=True, slots=True)
class KeyPart:
    """A column of a key; without a name it is an expression."""

    column: str
    prefix: int | None = None
    is_period: bool = False
    """WITHOUT OVERLAPS: it stands for the columns of a period."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key or constraint: `kind` is primary, unique, plain, foreign or check."""

    kind: str
    name: str = ""
    parts: tuple[KeyPart, ...] = ()
    changes_rows: str = ""
    """Of a foreign key: the action by which it changes rows, as `ON DELETE CASCADE`."""
    if_not_exists: bool = False


@dataclass(frozen=True, slots=True)
class ColumnDef:
    """A column as CREATE and ALTER define it."""

    name: str
    type: TypeSpec
    nullable: bool | None = None
    """None: not said."""
    default: Default = None
    generated: str = ""
    """The expression's text."""
    stored: bool = False
    auto_increment: bool = False
    keys: tuple[Key, ...] = ()
    """The keys that the column declares itself, and foreign keys (REFERENCES)."""
    row_period: bool = False
    """The begin or end of system versioning."""
    versioned: bool = False
    """WITH SYSTEM VERSIONING: in CREATE TABLE one such column makes the table versioned."""


@dataclass(frozen=True, slots=True)
class Position:
    """FIRST, or AFTER a column."""

    after: str | None


@dataclass(frozen=True, slots=True)
class AddColumn:
    """ADD [COLUMN]."""

    column: ColumnDef
    position: Position | None = None
    if_not_exists: bool = False


@dataclass(frozen=True, slots=True)
class DropColumn:
    """DROP [COLUMN]."""

    name: str
    if_exists: bool = False


@dataclass(frozen=True, slots=True)
class ChangeColumn:
    """CHANGE, MODIFY."""

    old: str
    column: ColumnDef
    position: Position | None = None
    if_exists: bool = False


@dataclass(frozen=True, slots=True)
class RenameColumn:
    """RENAME COLUMN."""

    old: str
    new: str
    if_exists: bool = False


@dataclass(frozen=True, slots=True)
class AddKey:
    """ADD key or constraint; CREATE INDEX."""

    key: Key


@dataclass(frozen=True, slots=True)
class DropKey:
    """DROP PRIMARY KEY, KEY, CONSTRAINT …; `kind` is primary, key, constraint,
    foreign or check; DROP INDEX.
    """

    kind: str
    name: str = ""
    if_exists: bool = False


@dataclass(frozen=True, slots=True)
class RenameKey:
    """RENAME KEY."""

    old: str
    new: str
    if_exists: bool = False


@dataclass(frozen=True, slots=True)
class RenameTable:
    """RENAME TO."""

    to: TableName


@dataclass(frozen=True, slots=True)
class Charset:
    """CONVERT TO CHARACTER SET (`converts`), or another default for columns that come later."""

    charset: str
    collation: str
    converts: bool = False


@dataclass(frozen=True, slots=True)
class Engine:
    """ENGINE = name."""

    name: str


@dataclass(frozen=True, slots=True)
class MovesRows:
    """Rows come or go beside the log: partitions, tablespaces;
    `other` is what they are exchanged with.

    `role` of the other table: "moved" its rows change, too, "dropped" it becomes a partition,
    "filled" it was one.
    """

    other: TableName | None = None
    role: str = ""


@dataclass(frozen=True, slots=True)
class Versioning:
    """System versioning begins or ends, or a period of it."""

    adds: bool


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A change of neither columns, nor keys, nor rows."""

    what: str


SETS_DEFAULT: Final = NoEffect("ALTER COLUMN … DEFAULT")
"""ALTER COLUMN … SET DEFAULT, DROP DEFAULT: of no effect but on what DEFAULT(…) computes."""
ADDS_PERIOD: Final = NoEffect("PERIOD FOR")
"""A period of the application's own: its columns become NOT NULL."""
Spec: TypeAlias = (
    AddColumn
    | DropColumn
    | ChangeColumn
    | RenameColumn
    | AddKey
    | DropKey
    | RenameKey
    | RenameTable
    | Charset
    | Engine
    | MovesRows
    | Versioning
    | NoEffect
)


@dataclass(frozen=True, slots=True)
class AlterTable:
    """ALTER TABLE, CREATE INDEX, DROP INDEX."""

    name: TableName
    specs: tuple[Spec, ...] = ()
    ignore: bool = False
    if_exists: bool = False
    unsure: str = ""
    """Why the statement may say something else of the columns than this tree."""

    @property
    def takes_rows(self) -> bool:
        """Whether rows may be gone behind it: where the server copies them, IGNORE leaves out all
        that a unique key, a CHECK (an old one, too) or the partitions do not let in.
        """
        return self.ignore and not all(isinstance(spec, RenameTable) for spec in self.specs)


@dataclass(frozen=True, slots=True)
class CreateTable:
    """CREATE TABLE."""

    name: TableName
    columns: tuple[ColumnDef, ...] = ()
    keys: tuple[Key, ...] = ()
    options: tuple[Spec, ...] = ()
    replace: bool = False
    temporary: bool = False
    if_not_exists: bool = False
    like: TableName | None = None
    selects: bool = False
    """The rows, and maybe columns, come from a query (CREATE TABLE … SELECT)."""
    logs_rows: bool = False
    """MySQL's START TRANSACTION: the rows of its query follow as rows."""
    unsure: str = ""
    """As of AlterTable."""


@dataclass(frozen=True, slots=True)
class DropTables:
    """DROP TABLE."""

    names: tuple[TableName, ...]
    temporary: bool = False


@dataclass(frozen=True, slots=True)
class RenameTables:
    """RENAME TABLE."""

    pairs: tuple[tuple[TableName, TableName], ...]
    if_exists: bool = False


@dataclass(frozen=True, slots=True)
class TruncateTable:
    """TRUNCATE."""

    name: TableName


@dataclass(frozen=True, slots=True)
class DropSchema:
    """DROP DATABASE."""

    name: str


@dataclass(frozen=True, slots=True)
class Dml:
    """Rows that were changed by a statement: its `verb`, the only table it changes,
    if that is sure, all it calls.
    """

    verb: str
    target: TableName | None = None
    calls: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Harmless:
    """A statement of this kind changes neither rows nor tables, whatever follows."""

    what: str


@dataclass(frozen=True, slots=True)
class Savepoint:
    """SAVEPOINT, or ROLLBACK TO SAVEPOINT (`undoes`)."""

    name: str
    undoes: bool = False


Tree: TypeAlias = (
    AlterTable
    | CreateTable
    | DropTables
    | RenameTables
    | TruncateTable
    | DropSchema
    | Dml
    | Savepoint
    | Harmless
)
