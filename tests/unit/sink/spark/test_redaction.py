"""What databases say of errors is shown without the values of rows; names stay."""

import re

import psycopg
import pymysql
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.lake.databases.mysql import MySql
from pyspark_tidemark.lake.databases.postgres import Postgres
from pyspark_tidemark.redaction import mysql_text, postgres_error, sql_statement
from pyspark_tidemark.sink_uri import SinkUri

SECRETS = st.text(st.sampled_from("secr'\"`\\. \n%for key=5"), min_size=1).map(
    lambda text: f"S3CRET{text}S3CRET"
)


@pytest.mark.parametrize(
    ("number", "text", "shown"),
    [
        (1062, "Duplicate entry 'ann@x' for key 't.mail'", "Duplicate entry ? for key 't.mail'"),
        (1062, "Duplicate entry 'a' for key 'b' for key 'k'", "Duplicate entry ? for key 'k'"),
        (1292, "Truncated incorrect DOUBLE value: 'ann'", "Truncated incorrect DOUBLE value: ?"),
        (
            1292,
            "Incorrect date value: 'x' for column `s`.`t`.`d` at row 1",
            "Incorrect date value: ? for column `s`.`t`.`d` at row 1",
        ),
        (
            1366,
            "Incorrect string value: '\\xF0\\x9F' for column 'name' at row 3",
            "Incorrect string value: ? for column 'name' at row 3",
        ),
        (
            1406,
            "Data too long for column 'name' at row 1",
            "Data too long for column 'name' at row 1",
        ),
        (1146, "Table 'shop.t' doesn't exist", "Table 'shop.t' doesn't exist"),
        (1526, "Table has no partition for value 4711", "Table has no partition for value ?"),
        (
            1064,
            "You have an error near 'VALUES (5)' at line 1",
            "You have an error near ? at line 1",
        ),
        (2013, "Lost connection to 'db' during query", "Lost connection to 'db' during query"),
        (9999, "what 'is' this \"x\" now", "what ? now"),
    ],
)
def test_values_are_masked_and_names_stay(number, text, shown):
    assert mysql_text(number, text) == shown


@given(SECRETS, st.sampled_from([1062, 1292, 1366, 1411, 1525, 1644, 9999]))
def test_no_value_of_any_quoting_comes_through(secret, number):
    for text in (
        f"Duplicate entry '{secret}' for key 'PRIMARY'",
        f"Incorrect value: '{secret}' for column 'c' at row 1",
        f"Incorrect value: '{secret}'",
        f"Incorrect date value: '{secret}' for column `s`.`t`.`d` at row 1",
    ):
        assert "S3CRET" not in mysql_text(number, text)


@given(SECRETS)
def test_a_statement_keeps_its_names_and_loses_its_literals(secret):
    text = secret.replace("\\", "\\\\").replace("'", "\\'")
    shown = sql_statement(
        f"UPDATE `my 5 t` SET a1 = '{text}', b = -12.5e3 WHERE c = x'00ff' /* {1} */"
    )
    assert "S3CRET" not in shown
    assert re.sub(r"\s+", " ", shown).strip() == "UPDATE `my 5 t` SET a1 = ?, b = -? WHERE c = ?"


def test_a_literal_that_is_cut_off_is_one_to_the_end():
    assert sql_statement("INSERT INTO t VALUES (1, 'sec") == "INSERT INTO t VALUES (?, ?"


class Diagnosed(psycopg.errors.UniqueViolation):
    """As the server tells it, which only it can make."""

    def __init__(self, state, **fields):
        super().__init__(" ".join(map(str, fields.values())))
        self.sqlstate = state
        self.fields = fields

    @property
    def diag(self):
        names = ("message_primary", "schema_name", "table_name", "column_name", "constraint_name")
        return type("Diag", (), dict.fromkeys((*names, "datatype_name")) | self.fields)


def test_postgres_tells_names_and_never_its_detail_and_context():
    error = Diagnosed(
        "23505",
        message_primary='duplicate key value violates unique constraint "t_pkey"',
        message_detail="Key (id)=(S3CRET) already exists.",
        context="COPY t, line 1, column a: S3CRET",
        schema_name="shop",
        table_name="t",
        constraint_name="t_pkey",
    )
    shown = postgres_error(error)
    assert "S3CRET" not in shown
    assert "unique constraint" in shown
    assert "SQLSTATE 23505, table shop.t, constraint t_pkey" in shown
    for state in ("22P02", "P0001"):
        error = Diagnosed(state, message_primary='invalid input syntax: "S3CRET"')
        assert "S3CRET" not in postgres_error(error)
    assert postgres_error(psycopg.OperationalError("connection refused")) == "connection refused"


def test_the_errors_of_targets_are_shown_so():
    mysql = MySql(SinkUri.parse("mysql://me@db/lake"))
    for error in (
        pymysql.err.DataError(1366, "Incorrect string value: 'S3CRET' for column 'c' at row 1"),
        pymysql.err.OperationalError(1292, "Truncated incorrect INTEGER value: 'S3CRET'"),
    ):
        assert "S3CRET" not in mysql.error_of(error).message
    postgres = Postgres(SinkUri.parse("postgresql://me@db/lake"))
    error = Diagnosed("22001", message_primary="too long", context='column a: "S3CRET"')
    assert "S3CRET" not in postgres.error_of(error).message
