"""Statements of migrations and of administrators, each in a schema of its own:
behind all of them, each table equals SELECT.

One capture follows them as they come, once more from the start after it had followed them all, and
once only when all were written: the catalogue is at their end then. There is no dump, so what no
event tells has to be read again by itself.
"""

# ruff: noqa: E501 (statements are shown on one line)

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow.flight as fl
import pytest
from pymysql.connections import Connection
from pymysql.cursors import Cursor
from pyspark_tidemark.flight import Changefeed
from pyspark_tidemark.options import parse
from tidemarkpb.v1 import changefeed_pb2 as feedpb

from tests.integration.capture.processes import Cluster, running_cluster
from tests.integration.lake.memory import MemoryLake
from tests.integration.mysql.lake import Lake
from tests.integration.mysql.selected import columns_of, difference, rows_now, tables_now
from tests.mariadb import MariaDb, mariadb_only, running_mariadb

pytestmark = [pytest.mark.timeout(900), mariadb_only("most of these statements")]

PATIENCE_S: Final = 300.0
END: Final = "the_end"
AWAY: Final = "away"
"""A schema that the changefeed does not take."""
T: Final = "CREATE TABLE t (id INT PRIMARY KEY, v INT, c VARCHAR(20), d DATETIME(3))"
ROWS: Final = "INSERT INTO t VALUES (1, 10, 'a', '2024-01-01 00:00:00.123'), (2, 20, 'B', '2024-02-02'), (3, NULL, NULL, NULL)"
AT_ONCE, AGAIN, LATE = "at once", "again", "late"
"""When a capture follows the statements; `again`: it had followed them all when it was killed."""
UNLOGGED, LOGGED = "SET sql_log_bin=0", "SET sql_log_bin=1"
LATER: Final = "INSERT INTO t (id) VALUES (4)"


@dataclass(frozen=True)
class Case:
    """Statements of one session; `made` are there when the changefeed begins,
    `rows` come before the statements.
    """

    statements: Sequence[str]
    made: Sequence[str] = (T,)
    rows: Sequence[str] = (ROWS,)
    read_again: Sequence[str] = ()
    """The tables of which no event tells all."""


def _computed(columns: str, rows: str, statement: str, *, charset: str = "utf8mb4") -> Case:
    """A table `t` whose generated columns are others after the statement."""
    made = f"CREATE TABLE t (id INT PRIMARY KEY, {columns}) CHARSET {charset}"
    return Case([statement], [made], [f"INSERT INTO t (id, c) VALUES {rows}"], ["t"])


def _keyless(*statements: str, key: str = "", name: str = "k") -> Case:
    """A table that cannot be replicated until it is altered."""
    made = f"CREATE TABLE k (id INT{key}, v INT){' ENGINE=MyISAM' if key else ''}"
    again = f"INSERT INTO {name} VALUES (9, 9)"
    return Case([*statements, again], [made], ["INSERT INTO k VALUES (1, 1), (2, 2)"], [name])


CASES: Final[Mapping[str, Case]] = {
    "computed_bytes": _computed("c VARCHAR(20), l INT AS (LENGTH(c)) VIRTUAL", "(1, 'é'), (2, 'x')", "ALTER TABLE t MODIFY c VARCHAR(20) CHARACTER SET utf8mb4", charset="latin1"),
    "computed_converted": _computed("c VARCHAR(20), m CHAR(32) AS (MD5(c)) STORED, l INT AS (LENGTH(c)) VIRTUAL", "(1, 'é'), (2, 'x')", "ALTER TABLE t CONVERT TO CHARACTER SET utf8mb4", charset="latin1"),
    "computed_collation": _computed("c VARCHAR(20), s INT AS (c = 'A') STORED, k INT AS (c = 'A') VIRTUAL", "(1, 'a'), (2, 'A')", "ALTER TABLE t MODIFY c VARCHAR(20) COLLATE utf8mb4_bin"),
    "computed_digits": _computed("c FLOAT, s VARCHAR(60) AS (CONCAT(c)) STORED", "(1, 0.1), (2, 7)", "ALTER TABLE t MODIFY c DOUBLE"),
    "computed_default": _computed("c INT DEFAULT 5, w INT AS (DEFAULT(c) + id) VIRTUAL", "(1, 5), (2, 7)", "ALTER TABLE t ALTER c SET DEFAULT 9"),
    "timestamp_without_null": Case(["SET explicit_defaults_for_timestamp=OFF", "ALTER TABLE t ADD ts TIMESTAMP, ADD two TIMESTAMP NULL", LATER], read_again=["t"]),
    "timestamp_changed": Case(["SET explicit_defaults_for_timestamp=OFF", "ALTER TABLE t MODIFY ts TIMESTAMP"], ["CREATE TABLE t (id INT PRIMARY KEY, ts TIMESTAMP NULL)"], ["INSERT INTO t VALUES (1, NULL), (2, '2024-01-01')"], ["t"]),
    "timestamp_created": Case(["SET explicit_defaults_for_timestamp=OFF", "CREATE TABLE n (id INT PRIMARY KEY, ts TIMESTAMP)", "INSERT INTO n (id) VALUES (1)"]),
    "timestamp_plain": Case(["ALTER TABLE t ADD ts TIMESTAMP", LATER]),
    "untold_then_told": Case(["ALTER TABLE t MODIFY d DATE, CONVERT TO CHARACTER SET latin1", "ALTER TABLE t MODIFY v DOUBLE", LATER], read_again=["t"]),
    "untold_and_back": Case(["ALTER IGNORE TABLE t MODIFY v BIGINT, CONVERT TO CHARACTER SET latin1", "ALTER IGNORE TABLE t MODIFY v INT, CONVERT TO CHARACTER SET utf8mb4", LATER], read_again=["t"]),
    "schema_default_moves": Case(["ALTER DATABASE CHARACTER SET latin1", "CREATE TABLE m (id INT PRIMARY KEY, c VARCHAR(9), s SET('é'))", "INSERT INTO m VALUES (1, 'é', 'é')", "CREATE OR REPLACE TABLE t (PRIMARY KEY (id)) AS SELECT * FROM m", "ALTER DATABASE CHARACTER SET utf8mb4", "ALTER TABLE t ADD x INT DEFAULT 5", "INSERT INTO t (id, c) VALUES (2, 'ü')"]),
    "unlogged_add": Case([UNLOGGED, "ALTER TABLE t ADD x INT DEFAULT 5", LOGGED, LATER], read_again=["t"]),
    "unlogged_pair": Case([UNLOGGED, "ALTER TABLE t ADD x INT DEFAULT 5", "ALTER TABLE u ADD y INT DEFAULT 6, DROP v", LOGGED, "BEGIN", "INSERT INTO t (id) VALUES (4)", "INSERT INTO u (id) VALUES (4)", "UPDATE t SET x = 9 WHERE id = 4", "COMMIT"], [T, "CREATE TABLE u (id INT PRIMARY KEY, v INT)"], [ROWS, "INSERT INTO u VALUES (1, 1)"], ["t", "u"]),
    "unlogged_rename": Case([UNLOGGED, "ALTER TABLE t RENAME COLUMN v TO w", LOGGED, LATER], read_again=["t"]),
    "unlogged_type": Case([UNLOGGED, "ALTER TABLE t MODIFY v SMALLINT", LOGGED, LATER], read_again=["t"]),
    "unlogged_table": Case([UNLOGGED, "CREATE TABLE n (id INT PRIMARY KEY)", "INSERT INTO n VALUES (1), (2)", LOGGED, "INSERT INTO n VALUES (4)"], read_again=["n"]),
    "key_comes": _keyless("ALTER TABLE k ADD PRIMARY KEY (id)"),
    "key_comes_by_index": _keyless("ALTER TABLE k MODIFY id INT NOT NULL", "CREATE UNIQUE INDEX u ON k (id)"),
    "key_comes_with_a_name": _keyless("ALTER TABLE k ADD PRIMARY KEY (id), RENAME TO k2", name="k2"),
    "engine_comes": _keyless("ALTER TABLE k ENGINE=InnoDB", key=" PRIMARY KEY"),
    "keyless_stays": Case(["ALTER TABLE k ADD x INT", "RENAME TABLE k TO k2", "INSERT INTO k2 VALUES (1, 1)", LATER], [T, "CREATE TABLE k (id INT)"], [ROWS, "INSERT INTO k VALUES (1)"]),
    "sequence_renamed": Case(["CREATE SEQUENCE s1", "RENAME TABLE s1 TO s2", "ALTER TABLE s2 RENAME s3", "INSERT INTO t (id) VALUES (NEXTVAL(s3) + 10)", "DROP TABLE s3"]),
    "view_renamed": Case(["CREATE VIEW w1 AS SELECT 1", "CREATE VIEW w2 AS SELECT 2", "RENAME TABLE w1 TO w0, w2 TO w1, w0 TO w2", LATER]),
    "nothing_renamed": Case(["RENAME TABLE IF EXISTS missing TO other, t TO t9", "ALTER TABLE IF EXISTS missing ADD x INT", "INSERT INTO t9 (id) VALUES (4)"]),
    "period_created": Case(["CREATE TABLE p (id INT, s DATE, e DATE, PERIOD FOR app (s, e), PRIMARY KEY (id, app WITHOUT OVERLAPS))", "INSERT INTO p VALUES (1, '2024-01-01', '2024-12-31')", "DELETE FROM p FOR PORTION OF app FROM '2024-03-01' TO '2024-04-01'"]),
    "period_added": Case(["ALTER TABLE t ADD PERIOD FOR app (d, e), ADD UNIQUE (v, app WITHOUT OVERLAPS)", "ALTER TABLE t ADD x INT DEFAULT 3", "UPDATE t FOR PORTION OF app FROM '2024-02-01' TO '2024-03-01' SET x = 9", "ALTER TABLE t DROP INDEX v, DROP PERIOD FOR app", "UPDATE t SET x = x + 1"], ["CREATE TABLE t (id INT AUTO_INCREMENT PRIMARY KEY, v INT, d DATETIME NOT NULL, e DATETIME NOT NULL)"], ["INSERT INTO t (v, d, e) VALUES (1, '2024-01-01', '2024-12-31')"], ["t"]),
    "ghost_beside": Case(["CREATE TABLE {away}._t_gho LIKE t", "ALTER TABLE {away}._t_gho ADD x INT NOT NULL DEFAULT 5", "INSERT INTO {away}._t_gho (id, v, c, d) SELECT * FROM t", "RENAME TABLE t TO {away}._t_del, {away}._t_gho TO t", LATER], read_again=["t"]),
    "reloaded": Case(["CREATE TABLE {away}.fresh LIKE t", "INSERT INTO {away}.fresh (id, v) VALUES (2, 21), (7, 70)", "RENAME TABLE t TO {away}.stale, {away}.fresh TO t", LATER], read_again=["t"]),
    "reloaded_while_empty": Case(["TRUNCATE t", "CREATE TABLE {away}.fresh2 LIKE t", "INSERT INTO {away}.fresh2 (id, v) VALUES (2, 21), (7, 70)", "RENAME TABLE t TO {away}.stale2, {away}.fresh2 TO t", "UPDATE t SET v = 5", "ALTER TABLE t ADD x INT DEFAULT (id * 2)"], read_again=["t"]),
}  # fmt: skip
"""What was once wrong in silence, or stopped a changefeed for no reason."""


def _run(connection: "Connection[Cursor]", statements: Sequence[str]) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement.replace("{away}", AWAY))


@contextlib.contextmanager
def _written(server: MariaDb, cluster: Cluster, when: str) -> Iterator[MemoryLake]:
    """All cases are written; the lake follows from the start of the changefeed."""
    server.execute(f"CREATE DATABASE {AWAY}")
    for name, case in CASES.items():
        server.execute(f"CREATE DATABASE in_{name}")
        server.execute(*case.made, database=f"in_{name}")
    request = feedpb.CreateChangefeedRequest(
        id="f",
        sink_uri="flight://",
        source_uri=f"{server.uri}?idle-row-ms=300",
        filter=["in_*.*"],
        ignore_ineligible_table=True,
    )
    start_ts = cluster.api("CreateChangefeed", request).changefeed.checkpoint_ts
    if when == LATE:
        cluster.api("PauseChangefeed", feedpb.PauseChangefeedRequest(id="f"))
    endpoint = f"grpc://{cluster.capture.endpoints['flight']}"
    lake = MemoryLake(
        Changefeed(parse({"endpoint": endpoint, "changefeed": "f", "cuts": "true"})), start_ts
    )
    for name, case in CASES.items():
        with contextlib.closing(server.connect(f"in_{name}")) as connection:
            _run(connection, [*case.rows, *case.statements])
    server.execute(f"CREATE TABLE {END} (id INT PRIMARY KEY)", database=f"in_{name}")
    server.execute(f"INSERT INTO {END} VALUES (1)", database=f"in_{name}")
    if when == AGAIN:
        deadline = time.monotonic() + PATIENCE_S
        while END not in str(cluster.cli("changefeed", "history", "-c", "f")):
            assert time.monotonic() < deadline, "the log is not followed to its end"
        # What was not acknowledged is pulled again, from the start.
        cluster.capture.kill()
        cluster.capture.start()
    if when == LATE:
        cluster.api("ResumeChangefeed", feedpb.ResumeChangefeedRequest(id="f"))
    yield lake


def _wrong(server: MariaDb, lake: MemoryLake) -> dict[str, str]:
    """What is not as the server has it, by table."""
    wrong, found = {}, dict(lake.target.tables)
    with contextlib.closing(server.connect()) as connection:
        for name in CASES:
            for last, table in tables_now(connection, server.port, f"in_{name}").items():
                mine = found.pop(f"in_{name}.{last}", None)
                if mine is None:
                    wrong[f"{name}.{last}"] = "it is missing"
                elif why := difference(
                    list(mine.rows.values()),
                    rows_now(connection, table, columns_of(table.mounter.schema)),
                    tuple(table.mounter.key_columns),
                ):
                    wrong[f"{name}.{last}"] = why
    return wrong | dict.fromkeys(found, "it is there")


@pytest.mark.parametrize("when", [AT_ONCE, AGAIN, LATE])
def test_behind_statements_in_use_tables_equal_select(tmp_path: Path, when: str) -> None:
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        with _written(server, cluster, when) as lake:
            end = f"in_{list(CASES)[-1]}.{END}"
            deadline = time.monotonic() + PATIENCE_S
            while end not in lake.target.tables or not lake.target.tables[end].rows:
                assert time.monotonic() < deadline, f"the end does not come: {lake.at_ts}"
                lake.follow()
        status = cluster.cli("changefeed", "dumpstatus", "-c", "f")["status"]
        assert _wrong(server, lake) == {}
    assert not lake.target.doubled
    assert {each["table"] for each in status if each.get("reason")} == {
        f"in_{name}.{table}" for name, case in CASES.items() for table in case.read_again
    }


def test_a_flush_in_a_transaction_does_not_part_the_changes_of_a_row(tmp_path: Path) -> None:
    """The server gives the table another number then."""
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY, v INT)")
        request = feedpb.CreateChangefeedRequest(
            id="f", sink_uri="flight://", source_uri=server.uri, filter=["a.*"]
        )
        start_ts = cluster.api("CreateChangefeed", request).changefeed.checkpoint_ts
        lake = Lake(cluster, "f", start_ts)
        with contextlib.closing(server.connect("a")) as connection:
            for statements in (
                ["BEGIN", "INSERT INTO t VALUES (34, 1), (5, 1)"],
                ["UPDATE t SET id = 35 WHERE id = 34", "DELETE FROM t WHERE id = 5"],
                ["INSERT INTO t VALUES (5, 2)", "UPDATE t SET v = 3 WHERE id = 35"],
            ):
                _run(connection, statements)
                server.execute("FLUSH TABLES")
            _run(connection, ["COMMIT", "INSERT INTO t VALUES (99, 9)"])
        lake.follow(lambda tables: 99 in tables.get("a.t", {}))
    assert {key: row["v"] for key, row in lake.tables["a.t"].items()} == {35: 3, 5: 2, 99: 9}


def test_a_statement_that_is_not_understood_stops_before_a_new_table(tmp_path: Path) -> None:
    """Its rows may be in no event, whichever names it has."""
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY)")
        request = feedpb.CreateChangefeedRequest(
            id="f", sink_uri="flight://", source_uri=server.uri, filter=["a.*"]
        )
        cluster.api("CreateChangefeed", request)
        with contextlib.closing(server.connect("a")) as connection:
            _run(
                connection,
                [
                    "SET sql_mode=ORACLE, binlog_format=MIXED",
                    "CREATE TABLE n (id NUMBER(10) PRIMARY KEY) AS SELECT 1 AS id",
                ],
            )
        query = feedpb.QueryChangefeedRequest(id="f")
        deadline = time.monotonic() + PATIENCE_S
        while not (error := cluster.api("QueryChangefeed", query).changefeed.error).code:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert error.code.removeprefix("TM:") == "ErrMySQLDDLUnknown"
    assert "may make a table that the changefeed takes" in error.message


def _follow(lake: Lake, seconds: float, is_there: Callable[[], bool]) -> None:
    """Cuts come until it is so."""
    deadline = time.monotonic() + seconds
    while not is_there():
        assert time.monotonic() < deadline, f"not at {lake.at_ts}: {lake.tables}"
        with contextlib.suppress(fl.FlightServerError):  # it has failed, or is about to go on
            lake.follow(_once())


def _once() -> Callable[[object], bool]:
    looks = iter((False, True))
    return lambda _: next(looks, True)


@pytest.mark.parametrize(
    ("statements", "rows"),
    [
        (
            ["SET sql_mode=''", "ALTER TABLE t MODIFY v INT NOT NULL"],
            [{"id": 1, "v": 0}, {"id": 2, "v": 2}],
        ),
        (
            [UNLOGGED, "ALTER TABLE t ADD x INT DEFAULT 5", LOGGED, "INSERT INTO t VALUES (3, 3, 3)"],
            [{"id": 1, "v": None, "x": 5}, {"id": 2, "v": 2, "x": 5}, {"id": 3, "v": 3, "x": 3}],
        ),
    ],
)  # fmt: skip
def test_where_what_is_unclear_stops_the_printed_dump_and_resume_go_on(
    tmp_path: Path, statements: list[str], rows: list[dict[str, int]]
) -> None:
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute(
            "CREATE DATABASE a",
            "CREATE TABLE a.t (id INT PRIMARY KEY, v INT)",
            "INSERT INTO a.t VALUES (1, NULL), (2, 2)",
        )
        uri = f"{server.uri}?idle-row-ms=300&on-unclear-ddl=stop"
        request = feedpb.CreateChangefeedRequest(
            id="f", sink_uri="flight://", source_uri=uri, filter=["a.*"]
        )
        lake = Lake(cluster, "f", cluster.api("CreateChangefeed", request).changefeed.checkpoint_ts)
        cluster.cli("changefeed", "dumpstart", "-c", "f")

        def dumped() -> bool:
            return bool(cluster.cli("changefeed", "dumpstatus", "-c", "f")["state"] == "finished")

        def failed() -> bool:
            query = feedpb.QueryChangefeedRequest(id="f")
            state = cluster.api("QueryChangefeed", query).changefeed.state
            return bool(state == feedpb.CHANGEFEED_STATE_FAILED)

        _follow(lake, PATIENCE_S, dumped)
        server.execute(*statements, database="a")
        _follow(lake, PATIENCE_S, failed)
        cluster.cli("changefeed", "dumpstart", "-c", "f", "--table", "a.t")
        cluster.cli("changefeed", "resume", "-c", "f")
        _follow(
            lake,
            PATIENCE_S,
            lambda: sorted(lake.tables["a.t"].values(), key=lambda row: row["id"]) == rows,
        )
        assert not failed()
