"""Tables in real databases equal the replay, in each mode, however often a cut is repeated."""

import threading
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.changes import Changes
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.cut_record import CutRecord, TableCut
from pyspark_tidemark.lake.databases import manifest
from pyspark_tidemark.lake.databases.manifest import DatabaseManifest
from pyspark_tidemark.lake.databases.target import DatabaseTarget
from pyspark_tidemark.lake.opening import database as database_of
from pyspark_tidemark.lake.schema import Policy
from pyspark_tidemark.sink_uri import SinkUri

from tests.integration.lake.evolving import EvolvingFeed
from tests.mariadb import running_mariadb

CUTS = (10, 30, 200, 210, 600, 1000)


def applier(changefeed, database, manifest, mode, **policy):
    target = DatabaseTarget(database, "bank", mode=mode)
    return CutApplier(
        changefeed,
        "bank",
        target,
        manifest,
        policy=Policy(mode, **policy),
        writers=TableWriters(source_options={}, spark=None, parallel=2),
    )


def keep(changefeed, uri, mode, ends=CUTS, **policy):
    """Apply cuts up to each of `ends`, in two lives."""
    database = database_of(SinkUri.parse(uri))
    for life in (ends[: len(ends) // 2], ends[len(ends) // 2 :]):
        with DatabaseManifest.opened(database, "bank") as manifest:
            cuts = applier(changefeed, database, manifest, mode, **policy)
            for number, end_ts in enumerate(life):
                start_ts = 0 if manifest.last is None else manifest.last.end_ts
                cuts.apply(Cut(number, start_ts, end_ts))
                cuts.acknowledge()


def rows(uri, table):
    database = database_of(SinkUri.parse(uri))
    connection = database.connect()
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT * FROM {database.quoted_table(table)}")
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    finally:
        connection.close()


def plain(row):
    """Without zones, which pymysql does not give, and with bytes as such."""
    return {
        name: value.replace(tzinfo=None) if name == "seen" and value is not None
        else bytes(value) if name == "raw" and value is not None
        else value
        for name, value in row.items()
    }  # fmt: skip


def ordered(found, *names):
    return sorted(
        (plain(row) for row in found), key=lambda row: tuple(str(row[name]) for name in names)
    )


def test_upserted_tables_equal_the_replay(changefeed, database, upstream):
    keep(changefeed, database, "upsert")
    accounts = upstream.accounts.state(upstream.end_ts).values()
    assert ordered(rows(database, "bank.accounts"), "id") == ordered(accounts, "id")
    kinds = upstream.kinds.state(upstream.end_ts).values()
    assert ordered(rows(database, "bank.kinds"), "k1", "k2") == ordered(kinds, "k1", "k2")


def test_a_changelog_holds_every_change_once(changefeed, database, upstream):
    keep(changefeed, database, "append")
    found = ordered(rows(database, "bank.kinds"), "_commit_ts", "_seq")
    assert found == ordered(upstream.kinds.rows, "_commit_ts", "_seq")


def test_every_version_of_a_row_has_the_time_in_which_it_was_valid(changefeed, database, upstream):
    keep(changefeed, database, "scd2")
    versions = rows(database, "bank.accounts")
    for ts in (*CUTS, 25, 405, 995):
        valid = [
            row for row in versions if row["valid_from_ts"] <= ts < (row["valid_to_ts"] or 1 << 62)
        ]
        held = upstream.accounts.state(ts)
        assert {row["id"]: (row["balance"], row["valid_from_ts"]) for row in valid} == {
            key[0]: (row["balance"], row["_commit_ts"]) for key, row in held.items()
        }
    assert all(bool(row["is_current"]) == (row["valid_to_ts"] is None) for row in versions)


def test_a_table_that_was_dropped_by_hand_is_told_by_name_and_not_made_anew(
    changefeed, database, upstream
):
    keep(changefeed, database, "upsert", CUTS[:2])
    target = database_of(SinkUri.parse(database))
    with closing(target.connect()) as connection, connection.cursor() as cursor:
        cursor.execute(f"DROP TABLE {target.quoted_table('bank.accounts')}")
        connection.commit()
    with pytest.raises(SourceError, match=r"ErrTableRemoved.*bank\.accounts") as refused:
        keep(changefeed, database, "upsert", CUTS[2:])
    assert not refused.value.retryable

    # Nor where the row that we keep of it is gone with it.
    with closing(target.connect()) as connection, connection.cursor() as cursor:
        cursor.execute(f"DELETE FROM {manifest.TABLES} WHERE name = 'bank.accounts'")
        connection.commit()
    with pytest.raises(SourceError, match=r"ErrTableRemoved.*bank\.accounts"):
        keep(changefeed, database, "upsert", CUTS[2:])


def test_a_cut_whose_tables_are_written_but_not_published_is_repeated_without_a_trace(
    changefeed, database, upstream
):
    target = database_of(SinkUri.parse(database))
    with DatabaseManifest.opened(target, "bank") as manifest:
        cuts = applier(changefeed, target, manifest, "upsert")
        cuts.apply(Cut(0, 0, 300))
        manifest.commit = lambda record: (_ for _ in ()).throw(OSError("killed"))
        with pytest.raises(OSError, match="killed"):
            cuts.apply(Cut(1, 300, 600))
    with DatabaseManifest.opened(target, "bank") as manifest:
        assert manifest.last.end_ts == 300
        cuts = applier(changefeed, target, manifest, "upsert")
        cuts.apply(Cut(0, 300, 700))
        assert [cut.end_ts for cut in manifest.cuts()] == [300, 700]
    held = upstream.accounts.state(700).values()
    assert ordered(rows(database, "bank.accounts"), "id") == ordered(held, "id")


def test_a_table_with_a_percent_sign_in_its_name_may_be_truncated(database):
    """Its name was taken for a place of a value, in mode scd2."""
    feed, name = EvolvingFeed(), "bank.100%s"
    feed.create(0, name, id=pa.int64())
    feed.put(10, name, {"id": 1})
    feed.truncate(20, name)
    feed.put(30, name, {"id": 2})
    keep(feed, database, "scd2", (10, 20, 30))
    found = {row["id"]: row["valid_to_ts"] for row in rows(database, name)}
    assert found == {1: 20, 2: None}


def test_a_mysql_database_may_have_another_character_set(mariadb):
    """Texts were staged, and kept, in the database's own: the job ended at the first other one."""
    mariadb.execute("DROP DATABASE IF EXISTS bank")
    lake = mariadb.database("lake")
    mariadb.execute(f"ALTER DATABASE {lake} CHARACTER SET latin1")
    mariadb.execute("CREATE DATABASE bank CHARACTER SET latin1")
    feed = EvolvingFeed()
    name, columns = "bank.日本", {"id": pa.int64(), "v": pa.string()}
    feed.create(0, name, **columns)
    feed.put(10, name, {"id": 1, "v": "größer"}, {"id": 2, "v": "日本 🎉"})
    feed.alter(20, name, "ALTER TABLE … ADD w TEXT", **columns, w=pa.string())
    feed.put(30, name, {"id": 3, "v": "€", "w": "🎉"})
    uri = f"{mariadb.uri}/{lake}"
    keep(feed, uri, "upsert", (10, 20, 30))
    assert ordered(rows(uri, name), "id") == ordered(feed.state(30)[name].values(), "id")


def test_a_postgresql_database_may_have_settings_of_its_own(postgres):
    """Values of new columns lost their backslashes, and cuts that were acknowledged were lost with
    the server.
    """
    uri = postgres.create("set_otherwise")
    with postgres.connect() as connection:
        for setting in ("standard_conforming_strings", "synchronous_commit"):
            connection.execute(f"ALTER DATABASE set_otherwise SET {setting} = off")
    value, columns = "a\\nb'\\", {"id": pa.int64()}
    feed = EvolvingFeed()
    feed.create(0, "bank.t", **columns)
    feed.put(10, "bank.t", {"id": 1})
    feed.alter(20, "bank.t", "ALTER TABLE …", {}, {"v": value}, **columns, v=pa.string())
    keep(feed, uri, "upsert", (10, 20, 30))
    assert [row["v"] for row in rows(uri, "bank.t")] == [value]
    with database_of(SinkUri.parse(uri)).connect() as connection:
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)


@pytest.mark.parametrize("encoding", ["LATIN1", "WIN1252", "SQL_ASCII"])
def test_a_postgresql_database_may_have_another_encoding(postgres, encoding):
    """Bytes of UTF-8 were taken for characters of the database's own: other texts, in silence."""
    with postgres.connect() as connection:
        connection.execute(
            f"CREATE DATABASE {encoding.lower()} ENCODING '{encoding}' TEMPLATE template0"
        )
    uri = postgres.uri(encoding.lower())
    feed = EvolvingFeed()
    feed.create(0, "bank.t", id=pa.int64(), v=pa.string())
    feed.put(10, "bank.t", {"id": 1, "v": "größer"})
    keep(feed, uri, "upsert", (5, 10))
    assert [row["v"] for row in rows(uri, "bank.t")] == ["größer"]
    with postgres.connect(encoding.lower()) as connection:
        lengths = connection.execute("SELECT length(v) FROM bank.t").fetchall()
    assert lengths == [(8 if encoding == "SQL_ASCII" else 6,)]
    feed.put(20, "bank.t", {"id": 2, "v": "日本"})
    if encoding != "SQL_ASCII":
        with pytest.raises(
            SourceError, match=r"ErrTargetRefused.*does not fit into the database's encoding"
        ):
            keep(feed, uri, "upsert", (15, 20))


def test_a_text_that_postgresql_cannot_hold_is_told_with_a_way_out(postgres):
    feed = EvolvingFeed()
    feed.create(0, "bank.t", id=pa.int64(), v=pa.string())
    feed.put(10, "bank.t", {"id": 1, "v": "a\0b"})
    told = r"ErrTargetRefused\] bank\.t: a text holds the character U\+0000.*--columns"
    with pytest.raises(SourceError, match=told) as caught:
        keep(feed, postgres.create("nul"), "upsert", (5, 10))
    assert not caught.value.retryable


def test_a_user_may_be_called_as_a_database_of_the_source(changefeed, postgres, upstream):
    """The schema of the user's name comes first once it is there, and had new tables of ours."""
    with postgres.connect() as connection:
        connection.execute("CREATE ROLE bank SUPERUSER LOGIN")
    uri = postgres.create("of_bank").replace("tidemark@", "bank@")
    keep(changefeed, uri, "upsert")
    accounts = upstream.accounts.state(upstream.end_ts).values()
    assert ordered(rows(uri, "bank.accounts"), "id") == ordered(accounts, "id")


def test_a_job_that_wakes_up_amid_other_cuts_than_its_own_commits_nothing(
    changefeed, database, upstream
):
    """It lost its lock while it was about to write a longer cut than the other job's."""
    target = database_of(SinkUri.parse(database))
    with DatabaseManifest.opened(target, "bank") as manifest:
        applier(changefeed, target, manifest, "scd2").apply(Cut(0, 0, 300))
        applier(changefeed, target, manifest, "scd2").apply(Cut(1, 300, 450))
    meta = changefeed.describe(300).tables["bank.accounts"]
    slices = tuple(changefeed.plan(300, 600, ["bank.accounts"]))
    late = DatabaseTarget(target, "bank", mode="scd2")
    before = ordered(rows(database, "bank.accounts"), "id", "valid_from_ts")
    with pytest.raises(SourceError, match=r"ErrTargetBusy.*another job has applied"):
        late.apply(Changes(meta, 300, 600, slices, changefeed, {}))
    assert ordered(rows(database, "bank.accounts"), "id", "valid_from_ts") == before


def test_two_jobs_on_one_changefeed_are_told_apart(changefeed, database):
    target = database_of(SinkUri.parse(database))
    with (
        DatabaseManifest.opened(target, "bank"),
        pytest.raises(SourceError, match="ErrTargetBusy"),
        DatabaseManifest.opened(target, "bank"),
    ):
        pass


def test_a_job_begins_when_the_one_before_it_has_really_ended(changefeed, database, monkeypatch):
    """A server may hold the lock of a client that is gone for a moment more."""
    monkeypatch.setattr(manifest, "_LOCK_WAIT_S", 60.0)
    target = database_of(SinkUri.parse(database))
    before = ExitStack()
    before.enter_context(DatabaseManifest.opened(target, "bank"))
    ending = threading.Timer(0.3, before.close)
    ending.start()
    with DatabaseManifest.opened(target, "bank") as opened:
        assert opened.last is None
    ending.join()


def test_a_table_of_somebody_else_is_not_touched(changefeed, database):
    target = database_of(SinkUri.parse(database))
    connection = target.connect()
    with connection.cursor() as cursor:
        cursor.execute(target.namespace("bank.accounts"))
        cursor.execute(f"CREATE TABLE {target.quoted_table('bank.accounts')} (id int)")
    connection.commit()
    connection.close()
    with pytest.raises(SourceError, match=r"ErrTargetForeign.*bank\.accounts"):
        keep(changefeed, database, "upsert")
    assert rows(database, "bank.accounts") == []


def test_a_server_that_died_is_told_as_such_and_the_job_may_try_again(changefeed, postgres):
    uri = postgres.create("dying")
    target = database_of(SinkUri.parse(uri))
    with DatabaseManifest.opened(target, "bank") as manifest:
        cuts = applier(changefeed, target, manifest, "upsert")
        cuts.apply(Cut(0, 0, 300))
        postgres.restart()
        with pytest.raises(SourceError, match="ErrTargetUnavailable") as caught:
            cuts.apply(Cut(1, 300, 600))
        assert caught.value.retryable
    keep(changefeed, uri, "upsert", (600, 1000))


def test_a_job_whose_lock_is_gone_writes_no_table(database):
    """It found out at the cut's commit, when all tables were written."""
    feed = EvolvingFeed()
    feed.create(0, "bank.t", id=pa.int64())
    feed.put(10, "bank.t", {"id": 1})
    feed.put(20, "bank.t", {"id": 2})
    target = database_of(SinkUri.parse(database))
    with DatabaseManifest.opened(target, "bank") as opened:
        cuts = applier(feed, target, opened, "upsert")
        cuts.apply(Cut(0, 0, 10))
        if database.startswith("mysql"):
            execute(database, f"KILL {opened._connection.thread_id()}")
        else:
            process = opened._connection.info.backend_pid
            execute(database, f"SELECT pg_terminate_backend({process}, 60000)")
        with pytest.raises(SourceError, match="ErrTargetUnavailable"):
            cuts.apply(Cut(1, 10, 20))
    assert [row["id"] for row in rows(database, "bank.t")] == [1]


def test_a_wrong_password_is_told(mariadb, tmp_path):
    secret = tmp_path / "password"
    secret.write_text("wrong\n")
    mariadb.execute("CREATE OR REPLACE USER lake@'%' IDENTIFIED BY 'right'")
    uri = f"mysql://lake@127.0.0.1:{mariadb.port}/lake?password-file={secret}"
    target = database_of(SinkUri.parse(uri))
    with (
        pytest.raises(SourceError, match="ErrCredentials") as caught,
        DatabaseManifest.opened(target, "bank"),
    ):
        pass
    assert not caught.value.retryable
    assert "wrong" not in str(caught.value)


def test_a_cut_may_have_thousands_of_tables_and_a_table_a_thousand_columns(database):
    """What is noted of them took more than MySQL's 65,535 bytes of a text."""
    target = database_of(SinkUri.parse(database))
    tables = tuple(TableCut(f"bank.{'t' * 50}{number}", 1, 10, "0" * 16) for number in range(2000))
    wide = pa.schema([(f"{'c' * 50}{number}", pa.int64()) for number in range(1000)])
    with DatabaseManifest.opened(target, "bank") as opened:
        opened.commit(CutRecord("bank", 0, 10, 0, "2026-01-02T03:04:05.678+00:00", tables))
        with closing(target.connect()) as connection, connection.cursor() as cursor:
            manifest.insert_row(cursor, "bank", "bank.wide", wide)
            row = manifest.read_row(cursor, "bank", "bank.wide")
    assert row == manifest.TableRow(manifest.NOT_YET, wide, wide)
    with DatabaseManifest.opened(target, "bank") as opened:
        assert opened.last.tables == tables


def test_names_that_differ_in_case_or_accents_only_are_tables_of_their_own(database):
    """MySQL's row of `bank.Orders` was taken for that of `bank.orders`."""
    feed = EvolvingFeed()
    for number, name in enumerate(("bank.Orders", "bank.orders", "bank.été")):
        feed.create(0, name, id=pa.int64())
        feed.put(10 + number, name, {"id": number})
    feed.rename(20, "bank.été", "bank.ete")
    feed.rename(20, "bank.Orders", "bank.ORDERS")
    feed.put(30, "bank.ORDERS", {"id": 7})
    keep(feed, database, "upsert", (10, 20, 30))
    found = {name: sorted(row["id"] for row in rows(database, name)) for name in feed.state(30)}
    assert found == {"bank.ORDERS": [0, 7], "bank.orders": [1], "bank.ete": [2]}


def test_tables_of_ours_that_an_earlier_version_made_get_the_columns_of_today(mariadb):
    name, texts = "varchar(200) NOT NULL", "columns_now text NOT NULL, columns_next text NOT NULL"
    uris = [f"{mariadb.uri}/{mariadb.database('lake')}" for _ in range(2)]
    execute(
        uris[0],
        f"CREATE TABLE {manifest.TABLES} (app {name}, name {name}, end_ts bigint NOT NULL, {texts}, "
        "PRIMARY KEY (app, name)) CHARACTER SET utf8mb4",
    )
    execute(
        uris[0],
        f"CREATE TABLE {manifest.CUTS} (app {name}, end_ts bigint NOT NULL, applied_at varchar(40) "
        "NOT NULL, document text NOT NULL, PRIMARY KEY (app, end_ts)) CHARACTER SET utf8mb4",
    )
    created = []
    for uri in uris:
        with DatabaseManifest.opened(database_of(SinkUri.parse(uri)), "bank"):
            created.append(
                mariadb.execute(
                    "SELECT table_name, column_name, column_type, collation_name, is_nullable, "
                    "column_key FROM information_schema.columns WHERE table_schema = "
                    f"'{uri.rpartition('/')[2]}' ORDER BY table_name, ordinal_position"
                )
            )
    assert created[0] == created[1]
    types = {(column, kind, collation) for _, column, kind, collation, *_ in created[0]}
    assert types > {
        ("app", "varchar(200)", "utf8mb4_bin"),
        ("name", "varchar(200)", "utf8mb4_bin"),
    }
    assert {kind for column, kind, _ in types if column.startswith(("columns", "doc"))} == {
        "longtext"
    }


def test_deleted_rows_that_another_key_cannot_hold_make_room_for_it(database):
    """They repeat it, or have a null in it: the changefeed stopped for good."""
    feed, ids = EvolvingFeed(), {"id": pa.int64()}
    for name, columns in (("bank.t", ids), ("bank.u", {})):
        feed.create(0, name, **ids, v=pa.string())
        values = ["a", "A", "b", "b", None, "c"]
        feed.put(10, name, *({"id": number, "v": v} for number, v in enumerate(values, 1)))
        for number, ts in ((3, 11), (4, 12), (5, 13), (2, 14), (6, 16)):
            feed.delete(ts, name, number)
        feed.put(17, name, {"id": 7, "v": "A"})
        feed.alter(20, name, "ALTER TABLE …", v=pa.string(), **columns)
        feed.put(30, name, {"v": "c"} | dict.fromkeys(columns, 9))
    keep(feed, database, "soft-delete", (18, 20, 30))
    found = {row["v"]: (row["id"], bool(row["is_deleted"])) for row in rows(database, "bank.t")}
    assert found == {"a": (1, False), "A": (7, False), "b": (4, True), "c": (9, False)}
    others = sorted((row["v"], bool(row["is_deleted"])) for row in rows(database, "bank.u"))
    assert others == [("A", False), ("a", False), ("b", True), ("c", False)]


def test_keys_that_differ_in_blanks_or_case_only_are_rows_of_their_own(database):
    feed, name = EvolvingFeed(), "bank.words"
    feed.create(0, name, k=pa.string(), v=pa.int64())
    feed.put(10, name, {"k": "b", "v": 1}, {"k": "c", "v": 2})
    feed.put(
        20,
        name,
        {"k": "b ", "v": 3},
        {"k": "B", "v": 4},
        {"k": "c ", "v": 5},
        {"k": "", "v": 6},
        {"k": " ", "v": 7},
    )
    feed.delete(30, name, "c ")
    keep(feed, database, "upsert", (5, 10))
    if database.startswith("mysql"):  # as earlier versions made it: such a table is altered
        key = "varchar(768) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL"
        execute(database, f"ALTER TABLE {name} MODIFY k {key}")
    keep(feed, database, "upsert", (20, 30))
    found = {row["k"]: row["v"] for row in rows(database, name)}
    assert found == {"b": 1, "c": 2, "b ": 3, "B": 4, "": 6, " ": 7}


def test_moments_are_keys_and_a_key_that_no_index_holds_is_refused_by_table(database):
    feed = EvolvingFeed()
    moment = datetime(2001, 9, 9, 1, 46, 40, 1, tzinfo=UTC)
    feed.create(0, "bank.moments", k=pa.timestamp("us", tz="UTC"), v=pa.int64())
    feed.create(0, "bank.words", k=pa.string(), v=pa.int64())
    feed.put(
        10, "bank.moments", {"k": moment, "v": 1}, {"k": moment + timedelta(microseconds=1), "v": 2}
    )
    feed.put(20, "bank.moments", {"k": moment, "v": 3})
    keep(feed, database, "upsert", (10, 20))
    assert sorted(row["v"] for row in rows(database, "bank.moments")) == [2, 3]
    noise = "".join(chr(0x4E00 + number * 7919 % 20_000) for number in range(4000))
    feed.put(30, "bank.words", {"k": noise, "v": 1})
    with pytest.raises(SourceError, match=r"ErrTargetRefused\] bank\.words: "):
        keep(feed, database, "upsert", (30, 40))


def execute(uri, statement):
    connection = database_of(SinkUri.parse(uri)).connect()
    with connection.cursor() as cursor:
        cursor.execute(statement)
    connection.commit()
    connection.close()


def test_a_row_larger_than_the_target_takes_is_refused_by_name():
    """The server breaks the connection in the middle of such a packet, which looks like trouble of
    the network: it was sent again for ever.
    """
    columns = ["`id` bigint", "`text` longtext"]

    def staged(*sizes):
        batch = pa.record_batch(
            [pa.array(range(len(sizes)), pa.int64()), pa.array(["x" * size for size in sizes])],
            ["id", "text"],
        )
        with closing(database.connect()) as connection, connection.cursor() as cursor:
            database.stage(cursor, columns, [batch], ["id"])
            cursor.execute("SELECT id, length(text) FROM _tidemark_changes ORDER BY id")
            return list(cursor.fetchall())

    with running_mariadb(f"--max-allowed-packet={1 << 20}") as mariadb:
        database = database_of(SinkUri.parse(f"{mariadb.uri}/{mariadb.database('lake')}"))
        sizes = (10, (1 << 20) - 100, 10, 400_000, 400_000, 400_000)
        assert staged(*sizes) == list(enumerate(sizes))
        with pytest.raises(
            SourceError, match=r"max_allowed_packet is 1048576.* = 4194304"
        ) as error:
            staged(10, 3_000_000)
        assert (error.value.code, error.value.retryable) == ("ErrRowTooLarge", False)
        mariadb.execute(f"SET GLOBAL max_allowed_packet = {4 << 20}")
        assert staged(10, 3_000_000) == [(0, 10), (1, 3_000_000)]
