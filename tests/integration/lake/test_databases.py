"""Tables in real databases equal the replay, in each mode, however often a cut is repeated."""

import threading
from contextlib import ExitStack

import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.barrier import Policy
from pyspark_tidemark.lake.cut import Cut, CutApplier
from pyspark_tidemark.lake.jdbc import manifest
from pyspark_tidemark.lake.jdbc.manifest import DatabaseManifest
from pyspark_tidemark.lake.jdbc.target import JdbcTarget
from pyspark_tidemark.lake.target import TargetUri
from pyspark_tidemark.lake.targets import database as database_of

CUTS = (10, 30, 200, 210, 600, 1000)


def applier(changefeed, database, manifest, mode, **policy):
    target = JdbcTarget(database, "bank", mode=mode)
    return CutApplier(
        changefeed, "bank", target, manifest, policy=Policy(mode, **policy), source_options={}, parallel=2
    )


def keep(changefeed, uri, mode, ends=CUTS, **policy):
    """Apply cuts up to each of `ends`, in two lives."""
    database = database_of(TargetUri.parse(uri))
    for life in (ends[: len(ends) // 2], ends[len(ends) // 2 :]):
        with DatabaseManifest.opened(database, "bank") as manifest:
            cuts = applier(changefeed, database, manifest, mode, **policy)
            for number, end_ts in enumerate(life):
                start_ts = 0 if manifest.last is None else manifest.last.end_ts
                cuts.apply(Cut(number, start_ts, end_ts))
                cuts.acknowledge()


def rows(uri, table):
    database = database_of(TargetUri.parse(uri))
    connection = database.connect()
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT * FROM {database.quoted(table)}")
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
    return sorted((plain(row) for row in found), key=lambda row: tuple(str(row[name]) for name in names))


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
        valid = [row for row in versions if row["valid_from_ts"] <= ts < (row["valid_to_ts"] or 1 << 62)]
        held = upstream.accounts.state(ts)
        assert {row["id"]: (row["balance"], row["valid_from_ts"]) for row in valid} == {
            key[0]: (row["balance"], row["_commit_ts"]) for key, row in held.items()
        }
    assert all(bool(row["is_current"]) == (row["valid_to_ts"] is None) for row in versions)


def test_a_cut_whose_tables_are_written_but_not_published_is_repeated_without_a_trace(changefeed, database, upstream):
    target = database_of(TargetUri.parse(database))
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


def test_two_jobs_on_one_changefeed_are_told_apart(changefeed, database):
    target = database_of(TargetUri.parse(database))
    with (
        DatabaseManifest.opened(target, "bank"),
        pytest.raises(SourceError, match="ErrTargetBusy"),
        DatabaseManifest.opened(target, "bank"),
    ):
        pass


def test_a_job_begins_when_the_one_before_it_has_really_ended(changefeed, database, monkeypatch):
    """A server may hold the lock of a client that is gone for a moment more."""
    monkeypatch.setattr(manifest, "_ENDING_S", 60.0)
    target = database_of(TargetUri.parse(database))
    before = ExitStack()
    before.enter_context(DatabaseManifest.opened(target, "bank"))
    ending = threading.Timer(0.3, before.close)
    ending.start()
    with DatabaseManifest.opened(target, "bank") as opened:
        assert opened.last is None
    ending.join()


def test_a_table_of_somebody_else_is_not_touched(changefeed, database):
    target = database_of(TargetUri.parse(database))
    connection = target.connect()
    with connection.cursor() as cursor:
        cursor.execute(target.namespace("bank.accounts"))
        cursor.execute(f"CREATE TABLE {target.quoted('bank.accounts')} (id int)")
    connection.commit()
    connection.close()
    with pytest.raises(SourceError, match=r"ErrTargetForeign.*bank\.accounts"):
        keep(changefeed, database, "upsert")
    assert rows(database, "bank.accounts") == []


def test_a_server_that_died_is_told_as_such_and_the_job_may_try_again(changefeed, postgres):
    uri = postgres.create("dying")
    target = database_of(TargetUri.parse(uri))
    with DatabaseManifest.opened(target, "bank") as manifest:
        cuts = applier(changefeed, target, manifest, "upsert")
        cuts.apply(Cut(0, 0, 300))
        postgres.restart()
        with pytest.raises(SourceError, match="ErrTargetUnavailable") as caught:
            cuts.apply(Cut(1, 300, 600))
        assert caught.value.retryable
    keep(changefeed, uri, "upsert", (600, 1000))


def test_a_wrong_password_is_told(mariadb, tmp_path):
    secret = tmp_path / "password"
    secret.write_text("wrong\n")
    mariadb.execute("CREATE OR REPLACE USER lake@'%' IDENTIFIED BY 'right'")
    uri = f"mysql://lake@127.0.0.1:{mariadb.port}/lake?password-file={secret}"
    target = database_of(TargetUri.parse(uri))
    with pytest.raises(SourceError, match="ErrCredentials") as caught, DatabaseManifest.opened(target, "bank"):
        pass
    assert not caught.value.retryable
    assert "wrong" not in str(caught.value)
