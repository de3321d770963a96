"""Keys for which lakes have no type: dates of no calendar, UUIDs, addresses.

By dump and log, lakes equal SELECT.
"""

import contextlib
from collections import Counter

import pyarrow as pa
import pytest

from server.capture.source.mysql import mysql_table
from tests.integration.lake.kept import KeptLake, fitted, has_rows
from tests.integration.lake.test_mysql_keys import MODE, ODD, source
from tests.integration.mysql.selected import columns_of, difference, rows_now, tables_now

pytestmark = pytest.mark.timeout(900)

KINDS = ("delta", "iceberg")
END = "shop.the_end"
MOVED = {
    "impossible": "'2023-02-30'",
    "zero_stamp": "'2000-01-01'",
    "uuid": "'018f0000-0000-7000-8000-000000000002'",
    "inet6": "'::2'",
    "inet4": "'1.2.3.1'",
}
"""What the key of each table's first row becomes."""
DUMPED = 2
STEPS = (
    (
        "INSERT INTO {t} VALUES {logged}",
        "UPDATE {t} SET v = v + 100 WHERE v <> 1",
        "UPDATE {t} SET k = {moved} WHERE v = 100",
    ),
    ("DELETE FROM {t} WHERE v IN (1, 100)", "INSERT INTO {t} VALUES ({moved}, 8, NULL)"),
)


def rows_of(name):
    """Numbered in column `v`; the key's value is in another column, too."""
    return [f"({value}, {number}, {value})" for number, value in enumerate(ODD[name][1])]


def prepare(server):
    """Tables with the rows that a dump brings."""
    server.execute(f"CREATE TABLE {END} (id INT PRIMARY KEY)")
    for name in MOVED:
        column = ODD[name][0]
        create = (
            f"CREATE TABLE shop.{name} ({column} PRIMARY KEY, v INT, same "
            f"{column.removeprefix('k ')} NULL)"
        )
        server.execute(
            MODE, create, f"INSERT INTO shop.{name} VALUES {', '.join(rows_of(name)[:DUMPED])}"
        )


def change(server, step):
    for name, moved in MOVED.items():
        logged = ", ".join(rows_of(name)[DUMPED:])
        server.execute(
            MODE,
            *(each.format(t=f"shop.{name}", moved=moved, logged=logged) for each in STEPS[step]),
        )
    server.execute(f"INSERT INTO {END} VALUES ({step})")


def differing(server, lake):
    """What is not as SELECT has it, by table."""
    found, wrong = lake.tables(), {}
    with contextlib.closing(server.connect()) as connection:
        for name, plain in tables_now(connection, server.port, "shop").items():
            table = mysql_table(plain.record.showing("text"))
            columns = columns_of(table.mounter.schema)
            mine = fitted(found[f"shop.{name}"], pa.schema(list(columns.items())))
            if why := difference(
                mine, rows_now(connection, table, columns), table.mounter.key_columns
            ):
                wrong[name] = why
    return wrong


def test_delta_and_iceberg_equal_select_by_dump_and_log(spark, tmp_path):
    with source(tmp_path) as (server, cluster, uri):
        prepare(server)
        lakes = {}
        for kind in KINDS:
            flags = [
                "--sink-uri",
                f"{kind}://{tmp_path / kind}",
                "--source-uri",
                uri,
                "--filter",
                "shop.*",
            ]
            made = cluster.cli("changefeed", "create", "-c", kind, *flags, "--zero-dates", "text")
            assert made["state"] == "normal", made
            cluster.cli("changefeed", "dumpstart", "-c", kind, "--verify")
            endpoint = f"grpc://{cluster.capture.endpoints['flight']}"
            lakes[kind] = KeptLake(
                endpoint, kind, f"{kind}://{tmp_path / kind}", spark, tmp_path / "jobs" / kind
            )
        for lake in lakes.values():
            brought = Counter()

            def is_dumped(cut, brought=brought):
                brought.update({each.table: each.rows for each in cut.tables})
                return all(brought[f"shop.{name}"] for name in MOVED)

            lake.keep(is_dumped)
        for step in range(len(STEPS)):
            change(server, step)
            for lake in lakes.values():
                lake.keep(lambda cut: has_rows(cut, END))
            assert {kind: differing(server, lake) for kind, lake in lakes.items()} == {
                kind: {} for kind in KINDS
            }
        assert {feed["summary"]["state"] for feed in cluster.cli("changefeed", "list")} == {
            "normal"
        }
