"""Reads the statements of a log: transactions that begin and end, DDL as trees, rows as statements.
Pure.

`read_statement` takes a statement's text, `statement_of` a QUERY event. The answer is a
`Statement`: its kind, and its actions on tables. What is not understood to its last token is
`UNKNOWN`, with all names in it: whoever captures one of them must stop.
"""

import enum
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from server.puller.mysql.ddl.grammar.statements import ROW_VERBS, StatementReader
from server.puller.mysql.ddl.tokens import (
    ANSI_QUOTES,
    EMPTY_STRING_IS_NULL,
    MAXDB,
    NO_BACKSLASH_ESCAPES,
    ORACLE,
    REAL_AS_FLOAT,
    Dialect,
    NotUnderstoodError,
    tokens_of,
    version_number,
)
from server.puller.mysql.ddl.tree import (
    AlterTable,
    CreateTable,
    Dml,
    DropSchema,
    DropTables,
    MovesRows,
    RenameTable,
    RenameTables,
    Savepoint,
    TableName,
    Tree,
    TruncateTable,
)
from storage.mysql.control import Query


class Verb(enum.Enum):
    """The kinds of statements, by their effect on a table."""

    CREATED = "created"
    ALTERED = "altered"
    RENAMED = "renamed"
    TRUNCATED = "truncated"
    DROPPED = "dropped"
    SCHEMA_DROPPED = "schema dropped"
    ROWS_MOVED = "rows moved"
    """Rows appear or vanish without row events: partitions that are dropped,
    truncated or exchanged, tablespaces.
    """
    FILLED = "filled"
    """The table is new, and has rows that are in no row event: it was a partition."""


@dataclass(frozen=True, slots=True)
class Action:
    """One change of one table; that of a dropped schema has an empty table name."""

    verb: Verb
    name: TableName
    to: TableName | None = None
    """The new name of what is renamed."""
    if_exists: bool = False
    """The statement does nothing where the table is missing."""


class Kind(enum.Enum):
    """The kind of a statement, as far as the log's reader must know it."""

    DDL = "ddl"
    BEGIN = "begin"
    COMMIT = "commit"
    ROLLBACK = "rollback"
    XA_START = "xa start"
    XA_END = "xa end"
    XA_COMMIT = "xa commit"
    XA_ROLLBACK = "xa rollback"
    SAVEPOINT = "savepoint"
    ROLLBACK_TO = "rollback to"
    NOTHING = "nothing"
    """A statement that changes no rows and no tables."""
    ROWS = "rows"
    """A statement that changes rows itself (binlog_format STATEMENT)."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Statement:
    """A parsed statement; `words` are all names and keywords in it, in lower case."""

    kind: Kind
    actions: tuple[Action, ...] = ()
    words: frozenset[str] = field(default=frozenset())
    xid: str = ""
    """Of an XA statement, as the log writes it."""
    tree: Tree | None = None
    savepoint: str = ""
    """The name of one that is set, or rolled back to."""
    reason: str = ""
    """Why an unknown one is not understood."""


_FIXED: Final = {
    "BEGIN": Kind.BEGIN,
    "COMMIT": Kind.COMMIT,
    "ROLLBACK": Kind.ROLLBACK,
}
_FIRST_WORD: Final = re.compile(r"\s*(\w+)\b")
_XA: Final = re.compile(
    r"\s*XA\s+(START|BEGIN|END|PREPARE|COMMIT|ROLLBACK)\s+(.*?)\s*(ONE\s+PHASE)?\s*;?\s*$",
    re.I | re.S,
)
_SETS_SQL_MODE: Final = re.compile(r"\bSTATEMENT\b.*\bsql_mode\b", re.I | re.S)
_READING_MODES: Final = (
    ANSI_QUOTES,
    NO_BACKSLASH_ESCAPES,
    ORACLE,
    MAXDB,
    REAL_AS_FLOAT,
    EMPTY_STRING_IS_NULL,
)
"""The bits of sql_mode by which a statement's text means something else."""
_MODE_UNSURE: Final = (
    "SET STATEMENT sets sql_mode, and by that of its session the text may mean something else"
)
_DML_CHARACTERS_MAX: Final = 1 << 16
"""A longer one is not cut into tokens: what it changes counts as not sure."""
_ROLES: Final = {"moved": Verb.ROWS_MOVED, "dropped": Verb.DROPPED, "filled": Verb.FILLED}
_ANY: Final = Dialect()


def read_statement(query: str, schema: str, *, dialect: Dialect = _ANY) -> Statement:
    """Read a statement that ran with `schema` as its default."""
    head = query[:16].strip().upper().rstrip(";")
    if head in _FIXED:
        return Statement(_FIXED[head])
    if head.startswith("XA") and (match := _XA.match(query)):
        return _xa_statement(*match.groups())
    first = _FIRST_WORD.match(query)
    if first and first[1].upper() in ROW_VERBS and len(query) > _DML_CHARACTERS_MAX:
        return Statement(Kind.ROWS, words=_words(query))
    try:
        tree = _tree(query, schema, dialect)
    except NotUnderstoodError as err:
        return Statement(Kind.UNKNOWN, words=_words(query), reason=str(err))
    if isinstance(tree, Savepoint):
        kind = Kind.ROLLBACK_TO if tree.undoes else Kind.SAVEPOINT
        return Statement(kind, savepoint=tree.name, tree=tree)
    actions = tuple(_actions(tree))
    return Statement(
        _kind(tree), actions, _words(query) if isinstance(tree, Dml) else frozenset(), tree=tree
    )


def _tree(query: str, schema: str, dialect: Dialect) -> Tree:
    """Raises NotUnderstoodError."""
    if dialect.mariadb and _SETS_SQL_MODE.search(query):
        return _tree_in_any_mode(query, schema, dialect)
    return StatementReader(tokens_of(query, dialect), schema, dialect).statement()


def _tree_in_any_mode(query: str, schema: str, dialect: Dialect) -> Tree:
    """The tree of a statement that may run behind `SET STATEMENT sql_mode=… FOR`.

    The log has the mode that it ran with. But a server reads the text before it sets anything, by
    the mode of the session, which no event tells: so all of them are tried.
    """
    trees: list[Tree] = []
    reasons: list[NotUnderstoodError] = []
    for bits in itertools.product(*((0, bit) for bit in _READING_MODES)):
        mode = dialect.sql_mode & ~sum(_READING_MODES) | sum(bits)
        read_as = replace(dialect, sql_mode=mode)
        try:
            reader = StatementReader(tokens_of(query, read_as), schema, read_as)
            tree = reader.statement()
        except NotUnderstoodError as err:
            reasons.append(err)
            continue
        if reader.sets_sql_mode:
            trees.append(tree)
        elif mode == dialect.sql_mode:
            return tree  # the words stand in a comment, or in a text
    if not trees:
        raise reasons[0]
    return _agreed(trees)


def _agreed(trees: list[Tree]) -> Tree:
    """The common part of all readings of a statement; where they do not agree on columns only, a
    tree that is not sure.
    """
    first = trees[0]
    if all(tree == first for tree in trees):
        return first
    actions = {tuple(_actions(tree)) for tree in trees}
    if isinstance(first, AlterTable | CreateTable) and len(actions) == 1:
        return replace(first, unsure=_MODE_UNSURE)
    raise NotUnderstoodError(_MODE_UNSURE)


def statement_of(query: Query, dialect: Dialect) -> Statement:
    """The statement of a Query event; one that failed is in a log only if it has done something
    before it failed.
    """
    statement = read_statement(query.sql, query.schema, dialect=of_session(dialect, query))
    if query.unread_charset and statement.kind is Kind.DDL:
        # Its names may be those of any table of the schema.
        reason = f"its letters of the character set {query.unread_charset} are not known here"
        words = _words(query.sql) | {query.schema.lower()}
        return Statement(Kind.UNKNOWN, words=words, reason=reason)
    if not query.error_code or statement.kind is not Kind.DDL:
        return statement
    tree = statement.tree
    # what it was to replace is gone, and nothing is made
    if isinstance(tree, CreateTable) and tree.replace:
        return Statement(
            Kind.DDL, (Action(Verb.DROPPED, tree.name),), tree=DropTables((tree.name,))
        )
    reason = (
        f"it failed with error {query.error_code} of the server, and what it did before is not "
        "known"
    )
    return Statement(Kind.UNKNOWN, words=_words(query.sql), reason=reason)


def dialect_of(format_description: bytes, before: Dialect) -> Dialect:
    """The dialect of the server that wrote a log, by the body of its first event."""
    version = format_description[2:52].rstrip(b"\0").decode(errors="replace")
    return replace(before, mariadb="mariadb" in version.lower(), version=version_number(version))


def of_session(dialect: Dialect, query: Query) -> Dialect:
    """The dialect of the session that ran a statement."""
    return replace(
        dialect,
        sql_mode=query.sql_mode,
        connection=query.connection,
        explicit_timestamps=query.explicit_timestamps,
    )


def _kind(tree: Tree) -> Kind:
    if isinstance(tree, Dml) or (isinstance(tree, CreateTable) and tree.temporary):
        return Kind.ROWS
    changes = isinstance(
        tree, AlterTable | CreateTable | DropTables | RenameTables | TruncateTable | DropSchema
    )
    return (
        Kind.DDL
        if changes and not (isinstance(tree, DropTables) and tree.temporary)
        else Kind.NOTHING
    )


def _actions(tree: Tree) -> Iterator[Action]:
    """Yield what a statement does to tables, by name."""
    if isinstance(tree, CreateTable) and not tree.temporary:
        yield from _create_actions(tree)
    elif isinstance(tree, AlterTable):
        yield from _alter_actions(tree)
    elif isinstance(tree, DropTables) and not tree.temporary:
        yield from (Action(Verb.DROPPED, name) for name in tree.names)
    elif isinstance(tree, RenameTables):
        yield from (Action(Verb.RENAMED, old, new, tree.if_exists) for old, new in tree.pairs)
    elif isinstance(tree, TruncateTable):
        yield Action(Verb.TRUNCATED, tree.name)
    elif isinstance(tree, DropSchema):
        yield Action(Verb.SCHEMA_DROPPED, (tree.name, ""))


def _create_actions(tree: CreateTable) -> Iterator[Action]:
    if tree.replace:
        yield Action(Verb.DROPPED, tree.name)
    yield Action(Verb.CREATED, tree.name)
    if tree.selects and not tree.logs_rows:
        yield Action(Verb.FILLED, tree.name)


def _alter_actions(tree: AlterTable) -> Iterator[Action]:
    renamed: TableName | None = None
    if tree.takes_rows:
        yield Action(Verb.ROWS_MOVED, tree.name)
    for spec in tree.specs:
        if isinstance(spec, RenameTable):
            renamed = spec.to
        elif isinstance(spec, MovesRows):
            yield Action(Verb.ROWS_MOVED, tree.name)
            if spec.other is not None:
                yield Action(_ROLES[spec.role], spec.other)
    yield Action(Verb.ALTERED, tree.name)
    if renamed:
        yield Action(Verb.RENAMED, tree.name, renamed)


def _words(query: str) -> frozenset[str]:
    return frozenset(re.findall(r"[\w$]+", query.lower()))


def _xa_statement(verb: str, xid: str, one_phase: str | None) -> Statement:
    kinds = {
        "START": Kind.XA_START,
        "BEGIN": Kind.XA_START,
        "END": Kind.XA_END,
        "PREPARE": Kind.NOTHING,
    }
    kinds |= {"COMMIT": Kind.COMMIT if one_phase else Kind.XA_COMMIT, "ROLLBACK": Kind.XA_ROLLBACK}
    return Statement(kinds[verb.upper()], xid=_xid(xid))


def _xid(text: str) -> str:
    """Global and branch id in hexadecimal, whether the log has them as `X'31',X'32',1` or as
    `'1','2'`.
    """
    literals = re.findall(r"[xX]'([0-9a-fA-F]*)'|'((?:[^']|'')*)'", text)
    parts = [
        hexed.lower() or plain.replace("''", "'").encode().hex() for hexed, plain in literals[:2]
    ]
    return ",".join([*parts, "", ""][:2])
