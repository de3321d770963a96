"""`check_names` says of each name what the servers themselves do."""

import contextlib

import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.opening import database as database_of
from pyspark_tidemark.names import check_names
from pyspark_tidemark.sink_uri import SinkUri

pytestmark = pytest.mark.timeout(400)
_COLUMNS = """SELECT table_schema, table_name, column_name FROM information_schema.columns
WHERE table_schema NOT IN ('pg_catalog', 'information_schema', 'mysql', 'sys', 'performance_schema')"""
NAMES = (
    *(
        "x.y",
        ".x",
        "x.",
        "a b",
        " a",
        "a ",
        "a\t",
        "a\u3000",
        "a\nb",
        "a,b",
        "a;b",
        "{}",
        "{{0}}",
        "a(b)",
        "a=b",
        "it's",
    ),
    *(
        '"',
        'a"b',
        "`",
        "``",
        "\\",
        "a\\'b",
        "%",
        "%s",
        "%(x)s",
        "$",
        "/",
        "a/b",
        "*",
        "?",
        "[0]",
        "#",
        "--",
        "/*",
        ":x",
    ),
    *(
        "0",
        "1e5",
        "Größe",
        "ß",
        "İ",
        "列名",
        "e\u0301",
        "\ufeffa",
        "😀",
        "a😀b",
        "\x7f",
        "\u202ea",
        "select",
        "order",
        "cut",
    ),
    *(
        "ctid",
        "cmin",
        "cmax",
        "xmin",
        "xmax",
        "tableoid",
        "oid",
        "CTID",
        "pg_x",
        "pg",
        "PG_x",
        "public",
        "_x",
        "excluded",
    ),
    *("n" * 63, "n" * 64, "n" * 65, "é" * 31, "é" * 32, "列" * 21, "列" * 22, "😀" * 15, "😀" * 16),
)


def is_told(uri, table, columns=()):
    try:
        check_names(uri.format, table, columns)
    except SourceError:
        return True
    return False


class Trial:
    """What a server does with names, by the target's own statements."""

    def __init__(self, database, connection):
        self._database, self._connection = database, connection

    def holds(self, schema, name, column):
        """Whether a table and its column are there under their names afterwards."""
        table = f"{schema}.{name}"
        with self._connection.cursor() as cursor, contextlib.suppress(*self._database.errors):
            cursor.execute(self._database.namespace(table))
            named = f"{self._database.quoted_table(table)} ({self._database.quoted(column)} int)"
            cursor.execute(f"CREATE TABLE {named}")
            cursor.execute(_COLUMNS)
            found = [tuple(row) for row in cursor.fetchall()]
            cursor.execute(f"DROP TABLE {self._database.quoted_table(table)}")
            self._connection.commit()
            return (schema, name, column) in found
        self._connection.rollback()
        return False


def test_what_is_refused_is_just_what_a_server_does_not_hold(database):
    uri = SinkUri.parse(database)
    with contextlib.closing((made := database_of(uri)).connect()) as connection:
        trial = Trial(made, connection)
        for name in NAMES:
            assert trial.holds("bank", "t", name) is not is_told(uri, ("bank", "t"), [name]), ascii(
                name
            )
            if len(name) < 65:
                assert trial.holds("bank", name, "c") is not is_told(uri, ("bank", name)), ascii(
                    name
                )
        for name in ("pg_x", "PG_x", ".x", "n" * 64):
            assert trial.holds(name, "t", "c") is not is_told(uri, (name, "t")), ascii(name)
