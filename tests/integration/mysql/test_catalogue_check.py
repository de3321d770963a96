"""What a real server has done beside its log is a warning of the changefeed, and what its log tells
is none.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from tidemarkpb.v1 import changefeed_pb2 as feedpb

from tests.integration.capture.processes import Cluster, running_cluster
from tests.mariadb import MariaDb, mariadb_only, running_mariadb

pytestmark = pytest.mark.timeout(400)
PATIENCE_S: Final = 120.0
WORDS: Final = "not what its log made of them"
UNLOGGED, LOGGED = "SET sql_log_bin=0", "SET sql_log_bin=1"


@pytest.fixture(scope="module")
def server() -> Iterator[MariaDb]:
    with running_mariadb() as running:
        yield running


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@contextlib.contextmanager
def followed(server: MariaDb, cluster: Cluster, name: str) -> Iterator[Callable[[], list[str]]]:
    """A changefeed of a schema with two tables; gives what its warnings say of the catalogue."""
    server.execute(
        f"CREATE DATABASE {name}",
        f"CREATE TABLE {name}.t (id INT PRIMARY KEY, v INT)",
        f"CREATE TABLE {name}.u (id INT PRIMARY KEY, v INT)",
        f"CREATE TABLE {name}.keyless (v INT)",
    )
    request = feedpb.CreateChangefeedRequest(
        id=name,
        sink_uri="flight://",
        source_uri=f"{server.uri}?idle-row-ms=300&catalogue-check-s=1",
        filter=[f"{name}.*"],
        ignore_ineligible_table=True,
    )
    cluster.api("CreateChangefeed", request)

    def warnings() -> list[str]:
        query = feedpb.QueryChangefeedRequest(id=name)
        changefeed = cluster.api("QueryChangefeed", query).changefeed
        assert changefeed.state == feedpb.CHANGEFEED_STATE_NORMAL, changefeed.error
        return [text for text in changefeed.warnings if WORDS in text]

    yield warnings
    cluster.cli("changefeed", "remove", "-c", name, "--no-confirm")


def run(server: MariaDb, schema: str, *statements: str) -> None:
    """In one session."""
    with contextlib.closing(server.connect(schema)) as session, session.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def until(told: Callable[[], list[str]], wanted: Callable[[list[str]], Any]) -> list[str]:
    deadline = time.monotonic() + PATIENCE_S
    while not wanted(seen := told()):
        assert time.monotonic() < deadline, seen
        time.sleep(0.1)
    return seen


def test_what_was_done_beside_the_log_is_a_warning_until_it_is_undone(
    server: MariaDb, cluster: Cluster
) -> None:
    with followed(server, cluster, "beside") as told:
        run(server, "beside", UNLOGGED, "DROP TABLE t", "CREATE TABLE n (id INT PRIMARY KEY)")
        run(server, "beside", UNLOGGED, "ALTER TABLE u ADD x INT, DROP v")
        [text] = until(told, lambda seen: seen and "beside.u" in seen[0])
        assert "beside.n (it has come)" in text
        assert "beside.t (it is gone)" in text
        assert "beside.u (column v is gone, column x has come)" in text
        assert "--overwrite-checkpoint-ts now" in text
        run(server, "beside", UNLOGGED, "DROP TABLE n", "ALTER TABLE u ADD v INT, DROP x")
        run(server, "beside", UNLOGGED, "CREATE TABLE t (id INT PRIMARY KEY, v INT)")
        until(told, lambda seen: not seen)
        run(server, "beside", UNLOGGED, "ALTER TABLE u MODIFY v VARCHAR(9)")
        [text] = until(told, lambda seen: seen)
        assert "beside.u (column v has another type)" in text
        run(server, "beside", UNLOGGED, "ALTER TABLE u MODIFY v INT")
        until(told, lambda seen: not seen)


@mariadb_only("renames temporary tables")
def test_the_rename_of_a_temporary_table_is_a_warning(server: MariaDb, cluster: Cluster) -> None:
    with followed(server, cluster, "hidden") as told:
        run(
            server,
            "hidden",
            "DROP TABLE u",
            "CREATE TEMPORARY TABLE t (id INT PRIMARY KEY)",
            "RENAME TABLE t TO u",
        )
        [text] = until(told, lambda seen: seen)
        assert "hidden.t (it has come), hidden.u (it is gone)" in text


def test_what_the_log_tells_is_no_difference(server: MariaDb, cluster: Cluster) -> None:
    ended = threading.Event()

    def alter() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            run(
                server,
                "told",
                f"CREATE TABLE m{number} (id INT PRIMARY KEY)",
                f"ALTER TABLE t ADD c{number} INT",
                f"RENAME TABLE u TO w, m{number} TO u",
                f"ALTER TABLE t DROP c{number}",
                "DROP TABLE w",
            )

    with followed(server, cluster, "told") as told:
        thread = threading.Thread(target=alter)
        thread.start()
        deadline = time.monotonic() + 8
        seen = []
        while time.monotonic() < deadline:
            seen += told()
            time.sleep(0.1)
        ended.set()
        thread.join()
        looks = time.monotonic() + 3
        while time.monotonic() < looks:
            seen += told()
            time.sleep(0.1)
        assert seen == []
