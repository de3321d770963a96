"""What a statement of the log is, and does to tables: values that the grammar gives. Pure."""

import enum
from dataclasses import dataclass, field

from server.puller.mysql.tree import TableName, Tree


class Verb(enum.Enum):
    """What happens to a table."""

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
    """It is new, and has rows that are in no row event: it was a partition."""


@dataclass(frozen=True, slots=True)
class Action:
    """One of them; a dropped schema has no table's name."""

    verb: Verb
    name: TableName
    to: TableName | None = None
    """The new name of what is renamed."""


class Kind(enum.Enum):
    """What a statement is."""

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
    """It changes no rows and no tables."""
    ROWS = "rows"
    """It changes rows, as a statement."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Statement:
    """What a statement does; `words` are all names and keywords in it, in lower case."""

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
