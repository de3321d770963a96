"""Event filters over a real server: conditions hold of the rows that its SELECT gives, readers get
no others, and what a filter cannot be asked stops by its name.
"""

from pathlib import Path
from typing import Final

import pyarrow.flight as fl
import pytest
from tidemarkpb.v1 import changefeed_pb2 as feedpb

from sink.row_filter import Condition
from tests.integration.capture.processes import Cluster, Reader, running_cluster
from tests.integration.mysql.lake import Lake
from tests.mariadb import MariaDb, running_mariadb

pytestmark = pytest.mark.timeout(300)
TABLE: Final = (
    "CREATE TABLE t (id INT PRIMARY KEY, big BIGINT UNSIGNED, c VARCHAR(20) COLLATE utf8mb4_bin, "
    "f DOUBLE, d DECIMAL(12,2), at DATETIME(3), day DATE, `Odd name` VARBINARY(9), tiny TINYINT, "
    "e ENUM('x','y') COLLATE utf8mb4_bin, y YEAR) CHARSET utf8mb4"
)
ROWS: Final = (
    "INSERT INTO t VALUES "
    "(1, 18446744073709551615, 'a', 1.5, 1.10, '2024-01-01 00:00:00.123', '2024-01-01', 'a', 1, 'x', 1999), "
    "(2, 0, 'B', 2.5, 2.00, '2024-05-01 10:11:12', NULL, X'ff', -1, 'y', 2024), "
    "(3, 5, 'it''s', -0.0, -7.55, '2024-05-01', '2025-02-28', '', 0, NULL, NULL), "
    "(4, 9223372036854775808, '', 1e300, 9999999999.99, NULL, NULL, NULL, NULL, 'x', 2024), "
    "(5, NULL, '50%', NULL, NULL, '2038-01-19 03:14:08', '1999-12-31', 'a_b', 127, 'y', 1970), "
    "(6, 7, 'ä', 0.1, 0.10, '1999-12-31 23:59:59.999', '2000-01-01', 'x', -128, NULL, 2155)"
)
KEYS: Final = (1, 2, 3, 4, 5, 6)
CONDITIONS: Final = (
    "id = 1", "id <> 1 AND id < 5", "ID >= 4 || id = 2", "NOT (id BETWEEN 2 AND 4)", "id IN (1, 3, 99)",
    "id NOT IN (1, 3)", "id NOT IN (1, NULL)", "big > 9223372036854775807", "big = 18446744073709551615",
    "big < 5.5", "big IS NULL", "big IS NOT NULL AND c = 'a'", "c = 'A'", "c < 'b'", "c LIKE 'it%'",
    "c NOT LIKE '%a%'", "c LIKE '50\\%'", "c LIKE '_'", "c IN ('a', 'B', '')", "c >= 'ä'", "f > 1", "f = 0",
    "f >= 0.1 AND f < 2", "d = 1.1", "d > 9999999999", "d <= -7.55", "d <> 2", "at > '2024-01-01'",
    "at = '2024-05-01 00:00:00'", "at BETWEEN '2024-01-01 00:00:00' AND '2024-05-01 10:11:12'",
    "day = '2024-01-01'", "day > '2000-01-01' OR day IS NULL", "`Odd name` = 'a'", "`odd name` = ''",
    "tiny = TRUE", "tiny < 0 && !(tiny = -128)", "e = 'x'", "e <> 'x'", "id = tiny",
    "TRUE", "FALSE OR id = 6", "id = 1 OR id = 2 AND c = 'nope'", "(id = 1 OR id = 2) AND NOT c = 'a'",
)  # fmt: skip


def test_conditions_hold_of_the_rows_that_the_server_selects(tmp_path: Path) -> None:
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute("CREATE DATABASE a")
        server.execute(TABLE, database="a")
        start = _created(cluster, server)
        server.execute("SET NAMES utf8mb4", ROWS, database="a")
        reader = Reader(cluster, "f")
        rows = None
        while rows is None or rows.num_rows < len(KEYS):
            end = reader.ask("latest", start=start, wait_ms=1000)["ts"]
            rows = reader.read(start, end, "a.t") if end > start else None
        batch = (
            rows.drop_columns(["_op", "_commit_ts", "_start_ts", "_seq"])
            .combine_chunks()
            .to_batches()[0]
        )
        for text in CONDITIONS:
            held = Condition(text).mask(batch).to_pylist()
            mine = [key for key, holds in zip(batch["id"].to_pylist(), held, strict=True) if holds]
            wanted = server.execute(f"SELECT id FROM a.t WHERE {text} ORDER BY id")
            assert sorted(mine) == [key for (key,) in wanted], text


FILTERS: Final = """
[filter]
rules = ["a.*"]
[[filter.event-filters]]
matcher = ["a.t"]
ignore-event = ["delete"]
ignore-insert-value-expr = "c = 'draft'"
[[filter.event-filters]]
matcher = ["a.*"]
ignore-update-new-value-expr = "v < 0"
ignore-update-old-value-expr = "v = 100"
"""


def _created(cluster: Cluster, server: MariaDb, *options: str) -> int:
    uri = f"{server.uri}?idle-row-ms=300"
    filtered = options or ("--filter", "a.*")
    made = cluster.cli(
        "changefeed",
        "create",
        "-c",
        "f",
        "--sink-uri",
        "delta:///lake",
        "--source-uri",
        uri,
        *filtered,
    )
    assert isinstance(made, dict), made
    return int(made["checkpoint_tso"])


def test_readers_get_what_no_filter_ignores_and_a_condition_without_its_column_stops(
    tmp_path: Path,
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(FILTERS)
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute(
            "CREATE DATABASE a",
            "CREATE TABLE a.t (id INT PRIMARY KEY, v INT, c VARCHAR(9))",
            "CREATE TABLE a.u (id INT PRIMARY KEY, v INT)",
            "INSERT INTO a.t VALUES (50, 1, 'draft'), (51, 1, 'x')",
        )
        with pytest.raises(AssertionError, match="needs --on-unclear-ddl stop"):
            _created(cluster, server, "--config", str(config))
        stop = ("--config", str(config), "--on-unclear-ddl", "stop")
        with pytest.raises(AssertionError, match="event filters leave changes out"):
            _created(cluster, server, *stop, "--audit", "1h")
        lake = Lake(cluster, "f", _created(cluster, server, *stop))
        shown = cluster.cli("changefeed", "query", "-c", "f")["event_filters"]
        assert shown[0]["ignore_insert_value_expr"] == "c = 'draft'"
        cluster.cli("changefeed", "dumpstart", "-c", "f")
        lake.follow(lambda tables: 51 in tables.get("a.t", {}))
        server.execute(
            "INSERT INTO t VALUES (1, 1, 'x'), (2, 2, 'draft'), (3, 3, NULL), (4, 100, 'x')",
            "INSERT INTO u VALUES (1, 1), (2, 2)",
            "UPDATE t SET v = -5 WHERE id = 1",
            "UPDATE t SET v = 5 WHERE id = 4",
            "UPDATE t SET v = 6 WHERE id = 3",
            "UPDATE u SET v = v - 2",
            "DELETE FROM t WHERE id IN (1, 3)",
            "DELETE FROM u WHERE id = 2",
            "ALTER TABLE t ADD w INT DEFAULT 7",
            "INSERT INTO t VALUES (5, 5, 'end', 8)",
            database="a",
        )
        lake.follow(lambda tables: {5, 51} <= tables.get("a.t", {}).keys())
        kept = {key: row["v"] for key, row in lake.tables["a.t"].items()}
        assert kept == {1: 1, 3: 6, 4: 100, 5: 5, 51: 1}
        assert {key: row["v"] for key, row in lake.tables["a.u"].items()} == {1: 1}
        server.execute("ALTER TABLE t DROP c", "INSERT INTO t VALUES (6, 6, 6)", database="a")
        query = feedpb.QueryChangefeedRequest(id="f")
        with pytest.raises(fl.FlightServerError, match="has failed after ErrTableIneligible"):
            lake.follow(lambda tables: 6 in tables["a.t"])
        error = cluster.api("QueryChangefeed", query).changefeed.error
        assert "by an event filter" in error.message
        assert "there is no column 'c'" in error.message


DDL_FILTERS: Final = """
[filter]
rules = ["a.*"]
[[filter.event-filters]]
matcher = ["a.t"]
ignore-event = ["truncate table", "drop table", "add index"]
[[filter.event-filters]]
matcher = ["a.*"]
ignore-sql = ["^truncate table a.u", "comment", "COLUMN"]
"""


def test_rows_stay_whose_truncate_is_ignored_and_a_column_that_was_to_be_ignored_stops(
    tmp_path: Path,
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(DDL_FILTERS)
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        tables = ("t", "u", "v")
        server.execute(
            "CREATE DATABASE a",
            *(f"CREATE TABLE a.{name} (id INT PRIMARY KEY, v INT)" for name in tables),
        )
        wanted = ("--config", str(config), "--on-unclear-ddl", "stop")
        config.write_text(DDL_FILTERS.replace("add index", "Add Column"))
        with pytest.raises(AssertionError, match="'add column' cannot be had"):
            _created(cluster, server, *wanted)
        config.write_text(DDL_FILTERS)
        with pytest.raises(AssertionError, match="needs --on-unclear-ddl stop"):
            _created(cluster, server, *wanted[:2])
        lake = Lake(cluster, "f", _created(cluster, server, *wanted))
        server.execute(
            *(f"INSERT INTO a.{name} VALUES (1, 1), (2, 2)" for name in tables),
            *(f"TRUNCATE TABLE a.{name}" for name in tables),
            *(f"ALTER TABLE a.{name} ADD INDEX (v), COMMENT 'x'" for name in tables),
            *(f"INSERT INTO a.{name} VALUES (2, 3), (4, 4)" for name in tables),
        )
        lake.follow(lambda tables: 4 in tables.get("a.v", {}))
        values = {
            table: {key: row["v"] for key, row in rows.items()}
            for table, rows in lake.tables.items()
        }
        kept, emptied = {1: 1, 2: 3, 4: 4}, {2: 3, 4: 4}
        assert values == {"a.t": kept, "a.u": kept, "a.v": emptied}
        server.execute("INSERT INTO a.t VALUES (5, 5)", "ALTER TABLE a.t ADD COLUMN w INT")
        server.execute("INSERT INTO a.t VALUES (6, 6, 6)")
        with pytest.raises(fl.FlightServerError, match="has failed after ErrDdlNotIgnorable"):
            lake.follow(lambda tables: 6 in tables["a.t"])
        assert 5 in lake.tables["a.t"], "what was before it is delivered"
        error = cluster.api(
            "QueryChangefeed", feedpb.QueryChangefeedRequest(id="f")
        ).changefeed.error
        assert "a.t, by ignore-sql 'COLUMN'" in error.message
