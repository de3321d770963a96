"""The MariaDB of the tests: it survives its kill, and a replica follows it."""

from tests.mariadb import MariaDb, running_mariadb


def test_a_session_has_a_server_with_full_row_images(mariadb: MariaDb) -> None:
    name = mariadb.database()
    mariadb.execute(
        "CREATE TABLE t (id INT PRIMARY KEY)", "INSERT INTO t VALUES (1)", database=name
    )
    assert mariadb.execute("SELECT @@binlog_format, @@binlog_row_image, @@binlog_row_metadata") == [
        ("ROW", "FULL", "FULL")
    ]


def test_what_was_committed_survives_a_kill_and_reaches_a_replica() -> None:
    with running_mariadb() as primary, running_mariadb(server_id=2, primary=primary) as replica:
        primary.execute(
            "CREATE DATABASE a",
            "CREATE TABLE a.t (id INT PRIMARY KEY)",
            "INSERT INTO a.t VALUES (1)",
        )
        primary.kill()
        primary.start()
        primary.execute("INSERT INTO a.t VALUES (2)")
        replica.caught_up(primary)
        assert replica.execute("SELECT id FROM a.t ORDER BY id") == [(1,), (2,)]
