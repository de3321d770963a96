"""The preflight's rules: what is refused, what is only told, and each with a way out;
and the URI's options.
"""

from dataclasses import replace

import pytest

from server.capture.source.mysql import mysql_table
from server.changefeed.source import FAILURE, OK, WARNING, SourceUri, SourceUriError
from server.puller.mysql.ddl.definition import Definition, column_of
from server.puller.mysql.log.opening import check_domains
from server.puller.mysql.log.position import SavedPosition
from server.puller.mysql.session.checks import (
    Facts,
    check_settings,
    check_tables,
)
from server.puller.mysql.session.connection import Flavor
from server.puller.mysql.session.errors import GtidDomainsError
from server.puller.mysql.session.options import MySqlOptions
from storage.mysql.schema import Column, Type

GOOD = {
    "log_bin": "ON",
    "sql_log_bin": "ON",
    "binlog_format": "ROW",
    "binlog_row_image": "FULL",
    "binlog_row_metadata": "FULL",
    "gtid_strict_mode": "ON",
    "binlog_checksum": "CRC32",
    "expire_logs_days": "10.000000",
}
FACTS = Facts(
    Flavor("10.11.19-MariaDB-log"), GOOD, grants=["GRANT ALL PRIVILEGES ON *.* TO `root`@`%`"]
)


def states(facts: Facts) -> dict[str, str]:
    return {check.name: check.state for check in check_settings(facts) if check.state != OK}


def test_a_good_server_passes() -> None:
    assert states(FACTS) == {}


@pytest.mark.parametrize(
    ("variable", "value", "state"),
    [
        ("log_bin", "OFF", FAILURE),
        ("sql_log_bin", "OFF", FAILURE),
        ("binlog_format", "MIXED", FAILURE),
        ("binlog_format", "STATEMENT", FAILURE),
        ("binlog_row_image", "MINIMAL", FAILURE),
        ("binlog_row_image", "NOBLOB", FAILURE),
        ("binlog_row_metadata", "NO_LOG", FAILURE),
        ("binlog_row_value_options", "PARTIAL_JSON", FAILURE),
        ("binlog_order_commits", "OFF", FAILURE),
        ("gtid_strict_mode", "OFF", WARNING),
        ("binlog_checksum", "NONE", WARNING),
        ("sync_binlog", "0", WARNING),
    ],
)
def test_each_setting_that_would_make_us_wrong_is_told_with_its_fix(
    variable: str, value: str, state: str
) -> None:
    (check,) = [
        each
        for each in check_settings(replace(FACTS, variables=GOOD | {variable: value}))
        if each.state != OK
    ]
    assert (check.name, check.state, check.found) == (variable, state, value)
    assert check.why
    assert variable in check.fix or variable == "log_bin"


def test_filters_versions_retention_domains_clocks_and_replicas_are_looked_at() -> None:
    assert states(replace(FACTS, flavor=Flavor("10.4.2-MariaDB"))) == {"version": FAILURE}
    assert states(replace(FACTS, log_status={"Binlog_Do_DB": "a"})) == {"binlog_do_db": FAILURE}
    assert states(replace(FACTS, variables=GOOD | {"expire_logs_days": "0.5"})) == {
        "log retention": WARNING
    }
    assert states(replace(FACTS, variables=GOOD | {"binlog_expire_logs_seconds": "60"})) == {
        "log retention": WARNING
    }
    assert states(replace(FACTS, variables=GOOD | {"gtid_binlog_pos": "0-1-2,1-1-3"})) == {
        "gtid domains": WARNING
    }
    several = replace(
        FACTS, variables=GOOD | {"gtid_binlog_pos": "0-1-2,1-1-3"}, several_hosts=True
    )
    assert states(several) == {"gtid domains": FAILURE}
    assert states(replace(FACTS, clock_skew_s=-5.0)) == {"clock": WARNING}
    assert states(replace(FACTS, grants=["GRANT SELECT ON `a`.* TO `u`@`%`"])) == {
        "tables seen": WARNING
    }
    replica = replace(
        FACTS, replica_status=[{"Replicate_Do_DB": "a", "Replicate_Ignore_Table": ""}]
    )
    assert states(replica) == {"log_slave_updates": FAILURE, "replication filters": FAILURE}
    mysql = replace(FACTS, flavor=Flavor("8.0.36"), variables=GOOD | {"gtid_mode": "OFF"})
    assert states(mysql) == {"gtid_mode": WARNING}
    assert states(replace(mysql, several_hosts=True)) == {"gtid_mode": FAILURE}


def test_tables_without_keys_and_foreign_keys_that_change_rows_fail() -> None:
    columns = (Column(name="id", type=Type.LONG, nullable=False),)
    facts = replace(
        FACTS,
        definitions=[
            Definition(("s", "good"), columns, ("id",)),
            Definition(("s", "bad"), columns, ()),
        ],
        cascades=[(("s", "child"), "fk", "ON DELETE CASCADE")],
    )
    found = {check.name: (check.state, check.fix) for check in check_tables(facts, mysql_table)}
    assert list(found) == ["table s.bad", "foreign key s.child.fk"]
    assert all(state == FAILURE and fix for state, fix in found.values())
    assert all(check.state == OK for check in check_tables(FACTS, mysql_table))


def test_options_of_the_uri_are_read() -> None:
    text = "mysql://cdc@one,[::1]:3307?password-file=/p&ca=/ca&server-id=7&heartbeat-ms=500&idle-row-ms=0"
    options = MySqlOptions.of(SourceUri.parse(text))
    assert [(each.host, each.port) for each in options.addresses] == [("one", 3306), ("::1", 3307)]
    assert (options.user, options.tls, options.server_id, options.idle_row_ms) == (
        "cdc",
        "verify",
        7,
        0,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mysql://host", "a user and a server"),
        ("mysql://u@h/schema", "no path"),
        ("mysql://u@h?tls=perhaps", "one of off"),
        ("mysql://u@h?tls=verify", "needs ca="),
        ("mysql://u@h?cert=/c", "belong together"),
        ("mysql://u@h?checksum=no", "one of verify, trust"),
        ("mysql://u@h?server-id=0", "from 1 to"),
        ("mysql://u@h?heartbeat-ms=x", "whole number"),
        ("mysql://u@h?colour=red", "no option colour"),
    ],
)
def test_bad_options_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(SourceUriError, match=message):
        MySqlOptions.of(SourceUri.parse(text))


def test_a_type_nobody_knows_has_no_column() -> None:
    names = (
        "character_octet_length",
        "numeric_precision",
        "numeric_scale",
        "datetime_precision",
        "collation_name",
    )
    row = dict.fromkeys(names) | {
        "column_name": "c",
        "is_nullable": "YES",
        "data_type": "cube",
        "column_type": "cube",
    }
    assert column_of(row, {}) is None


def test_members_are_read_as_a_catalogue_escapes_them() -> None:
    row = {
        "column_name": "c",
        "is_nullable": "YES",
        "data_type": "enum",
        "column_type": r"enum('a\\b','c\nd','e\0f','g\rh','i''j','\\n','')",
        "collation_name": "latin1_swedish_ci",
    }
    column = column_of(row, {"latin1_swedish_ci": 8})
    assert column is not None
    assert column.elems == (r"a\b", "c\nd", "e\0f", "g\rh", "i'j", r"\n", "")


def test_explain_gives_columns_by_name_everywhere() -> None:
    """MySQL 9.7 was seen to answer plain EXPLAIN with one column of text,
    which a dump with a WHERE ended at.
    """
    assert Flavor("9.7.4").explain == "EXPLAIN FORMAT=TRADITIONAL"
    assert Flavor("10.11.19-MariaDB-log").explain == "EXPLAIN EXTENDED"


def test_several_domains_are_read_from_one_server_only() -> None:
    """Between domains each server has its own order,
    so another one would give rows other commit_ts.
    """
    one, two = (MySqlOptions.of(SourceUri.parse(f"mysql://u@{hosts}")) for hosts in ("a", "a,b"))
    check_domains(one, SavedPosition(1, "0-1-5,7-1-2"))
    check_domains(two, SavedPosition(1, "7-1-2"))
    check_domains(
        two,
        SavedPosition(
            1, "3c22d75d-e5e0-11f1-ba82-02fc00000001:1-2,4c22d75d-e5e0-11f1-ba82-02fc00000001:1"
        ),
    )
    with pytest.raises(GtidDomainsError, match="DELETE_DOMAIN_ID"):
        check_domains(two, SavedPosition(1, "0-1-5,7-1-2"))


@pytest.mark.parametrize(
    ("version", "warned"), [("10.11.19-MariaDB", False), ("11.8.9-MariaDB", True), ("9.7.4", False)]
)
def test_generated_columns_are_told_of_where_the_log_lacks_them(version: str, warned: bool) -> None:
    columns = (
        Column(name="id", type=Type.LONG),
        Column(name="total", type=Type.LONG, generated="id * 2"),
    )
    definition = Definition(("shop", "orders"), columns, ("id",), engine="InnoDB")
    facts = replace(FACTS, flavor=Flavor(version), definitions=[definition])

    warnings = [each for each in check_tables(facts, lambda record: None) if each.state == WARNING]

    assert [(each.name, each.found) for each in warnings] == (
        [("table shop.orders", "generated: total")] if warned else []
    )
