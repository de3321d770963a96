"""What the drivers of target databases say, in our words: which of it may heal."""

import pymysql
import pytest
from pymysql.constants import CR, ER
from pyspark_tidemark.lake.databases.mysql import MySql
from pyspark_tidemark.lake.databases.postgres import Postgres
from pyspark_tidemark.sink_uri import SinkUri


@pytest.mark.parametrize(
    ("number", "code", "retryable"),
    [
        (ER.BAD_FIELD_ERROR, "ErrTargetRefused", False),
        (ER.INVALID_USE_OF_NULL, "ErrTargetRefused", False),
        (ER.TABLE_EXISTS_ERROR, "ErrTargetRefused", False),
        (ER.TOO_LONG_KEY, "ErrTargetRefused", False),
        (ER.TOO_BIG_ROWSIZE, "ErrTargetRefused", False),
        (ER.NET_PACKET_TOO_LARGE, "ErrRowTooLarge", False),
        (ER.LOCK_DEADLOCK, "ErrTargetUnavailable", True),
        (ER.SERVER_SHUTDOWN, "ErrTargetUnavailable", True),
        (CR.CR_SERVER_LOST, "ErrTargetUnavailable", True),
        (ER.DISK_FULL, "ErrTargetFull", True),
    ],
)
def test_a_refused_statement_is_not_sent_again_for_ever(number, code, retryable):
    """The driver calls nearly everything an OperationalError."""
    found = MySql(SinkUri.parse("mysql://me@db/lake")).error_of(
        pymysql.OperationalError(number, "says so")
    )
    assert (found.code, found.retryable) == (code, retryable)


@pytest.mark.parametrize("name", ["x.y", "a b", 'q"q', "b`b", "..", "é"])
def test_a_column_is_one_identifier_and_a_table_is_two(name):
    postgres = Postgres(SinkUri.parse("postgresql://me@db/lake"))
    mysql = MySql(SinkUri.parse("mysql://me@db/lake"))
    for database, mark in ((postgres, '"'), (mysql, "`")):
        column = mark + name.replace(mark, 2 * mark) + mark
        assert database.quoted(name) == column
        assert database.quoted_table(f"shop.{name}") == f"{mark}shop{mark}.{column}"
