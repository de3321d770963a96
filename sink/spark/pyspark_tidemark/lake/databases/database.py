"""What PostgreSQL and MySQL do differently: the protocol that both implement."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.schema import SchemaChange
from pyspark_tidemark.sink_uri import SinkUri
from pyspark_tidemark.uri_secrets import read_secret

STAGED = "_tidemark_changes"
"""The temporary table of a cut's changes."""
KEY_INDEX = "tidemark_key"
"""Begins the names of indexes that take the place of a primary key."""


@dataclass(frozen=True)
class TableKey:
    """A table's key, and the types of its columns."""

    types: Mapping[str, str]
    """The key's columns, each with a type that an index can hold."""
    others: Mapping[str, str]
    """The other columns with their types: those of a former key take nulls again."""
    is_unique: bool
    """Whether it is a primary key; else an index: old versions of rows may have nulls in it."""


class Database(Protocol):
    """One kind of database; statements are made of quoted names only."""

    errors: tuple[type[Exception], ...]
    format: str
    """As sink URIs call it."""
    table_options: str
    """Appended to CREATE TABLE, so that texts may have any character."""
    name_type: str
    """The type of names in our own tables: of two that differ in case only each is itself."""
    document_type: str
    """The type of documents in our own tables: a text as long as it needs to be."""

    def connect(self) -> Any:
        """A DB-API connection without autocommit, in UTC: captures send timestamps in UTC."""

    def quoted(self, name: str) -> str:
        """One identifier, dots included."""

    def quoted_table(self, name: str) -> str:
        """The two identifiers of `database.table`: the first dot is between them."""

    def type_of(self, kind: Any, *, key_columns: int) -> str:
        """The column type of an Arrow type; with `key_columns` > 0 one that an index of so many
        columns can hold.
        """

    def lock(self, cursor: Any, name: str) -> bool:
        """Take a lock for as long as the connection lives; False if another one has it."""

    def finds_by_name(self, cursor: Any, name: str) -> bool:
        """Whether statements find a table of our own by its plain name, where CREATE TABLE IF NOT
        EXISTS might not.
        """

    def retype(self, cursor: Any, table: str, columns: Mapping[str, str]) -> list[str]:
        """The statements that give a table of our own, as an earlier version made it, the types of
        `columns`; none if it has them.
        """

    def namespace(self, name: str) -> str:
        """The statement that makes a table's schema or database."""

    def stage(
        self, cursor: Any, columns: Sequence[str], batches: Iterable[Any], key: Sequence[str]
    ) -> None:
        """Put rows into a new table `STAGED` with these column definitions; with a `key` it may
        keep only the last row of each key.
        """

    def delete_staged(self, table: str, key: Sequence[str]) -> list[str]:
        """The statements that delete the keys in `STAGED` from a quoted table, and drop it."""

    def upsert(self, table: str, columns: Sequence[str], key: Sequence[str]) -> list[str]:
        """The statements that apply the changes in `STAGED` to `table`."""

    def end_versions(self, table: str, key: Sequence[str]) -> str:
        """The statement that ends the current versions of keys that are in `STAGED`."""

    def alter(self, table: str, change: SchemaChange, mark: str) -> list[str]:
        """The statements that change a table's columns; where the server commits each of them by
        itself, they leave `mark` at the table.
        """

    def is_altered(self, cursor: Any, table: str, mark: str) -> bool:
        """Whether a table has that mark of `alter`."""

    def drop_key(self, cursor: Any, table: str, dropped: Sequence[str]) -> list[str]:
        """The statements that drop the key if one of these columns is in it, since they cannot be
        dropped before; `replace_key` follows.
        """
        ...

    def free_key(self, cursor: Any, table: str, key: Sequence[str]) -> None:
        """Delete those marked rows (`lake.soft_delete`) that cannot be in a table with this primary
        key: with a null in it, or with the values of a row that is not marked, or of a marked one
        that is newer.
        """

    def replace_key(self, cursor: Any, table: str, key: "TableKey") -> list[str]:
        """The statements that give a table another key."""

    def exact_key(self, cursor: Any, table: str, key: Mapping[str, str]) -> list[str]:
        """The statements that let the table's key compare its values byte by byte, if it does not
        yet; `key` has the types of its columns.
        """

    def primary_key(self, columns: str) -> str:
        """The clause of CREATE TABLE, or of ALTER TABLE … ADD, that makes these quoted columns the
        key.
        """

    def rename_table(self, cursor: Any, old: str, new: str) -> list[str]:
        """The statements that rename a table."""

    def error_of(self, err: Exception) -> SourceError:
        """The error for a driver's exception."""


def columns_of(cursor: Any, name: str) -> list[str]:
    """The columns of a table; none if there is no such table."""
    schema, _, table = name.partition(".")
    cursor.execute(
        "SELECT column_name FROM information_schema.columns WHERE table_schema = %s AND "
        "table_name = %s ORDER BY ordinal_position",
        (schema, table),
    )
    return [row[0] for row in cursor.fetchall()]


def key_of(cursor: Any, name: str) -> list[str]:
    """The columns of a table's primary key; none if it has none."""
    schema, _, table = name.partition(".")
    cursor.execute(
        "SELECT k.column_name FROM information_schema.table_constraints c "
        "JOIN information_schema.key_column_usage k ON k.table_schema = c.table_schema "
        "AND k.table_name = c.table_name AND k.constraint_name = c.constraint_name "
        "WHERE c.constraint_type = 'PRIMARY KEY' AND c.table_schema = %s AND c.table_name = %s "
        "ORDER BY k.ordinal_position",
        (schema, table),
    )
    return [row[0] for row in cursor.fetchall()]


def password(uri: SinkUri) -> str:
    """The password that the URI names, by a file or a variable; empty if it names none.

    Raises:
        SourceError: ErrCredentials.
    """
    return read_secret(dict(uri.options))


@contextmanager
def driver_errors(database: Database) -> Iterator[None]:
    """Turn the driver's exceptions into ours, for the block."""
    try:
        yield
    except database.errors as err:
        raise database.error_of(err) from None
