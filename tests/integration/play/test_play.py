"""The playground's parts: the MariaDB that it starts, its shop, and the script of its SQL shell.

`make walk` runs the whole of it.
"""

import subprocess

import pytest

from server.play.mariadb import MariaDb, MariaDbError
from server.play.playground import TABLES, PlayConfig, hints, write_shell
from tests.ports import free_port

GOODS = (
    "SELECT (SELECT sum(stock) FROM shop.products) + (SELECT coalesce(sum(quantity), 0) FROM "
    "shop.orders)"
)


async def test_the_shop_trades_and_a_second_run_finds_it_again(tmp_path):
    place, log, port = tmp_path / "data", tmp_path / "log", free_port()
    async with MariaDb.running(place, port, log) as server:
        for _ in range(3):
            await server.one_second_of_the_shop()
        assert await server.ask("SELECT count(*) FROM shop.orders") == [(3,)]
        assert await server.ask(GOODS) == [(5_000_000,)]
        with pytest.raises(MariaDbError, match="--mariadb-port"):
            async with MariaDb.running(tmp_path / "other", port, tmp_path / "other-log"):
                pass
        with pytest.raises(MariaDbError, match="nothing_here"):
            await server.ask("SELECT 1; SELECT * FROM shop.nothing_here")
    with pytest.raises(MariaDbError, match=f"does not answer. If it has ended, {log} says why"):
        await server.ask("SELECT 1")
    async with MariaDb.running(place, port, log) as again:
        assert await again.ask("SELECT count(*) FROM shop.orders") == [(3,)]


async def test_without_mariadb_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(MariaDbError, match="make deps"):
        async with MariaDb.running(tmp_path / "data", free_port(), tmp_path / "log"):
            pass


def test_the_shell_knows_the_tables_wherever_the_lake_lies(tmp_path, monkeypatch):
    monkeypatch.setattr("server.play.playground.install", lambda *_: [tmp_path / "delta.jar"])
    lake = tmp_path / "Ada's lake"
    write_shell(tmp_path / "sql", lake, TABLES)
    subprocess.run(["bash", "-n", tmp_path / "sql"], check=True)
    tables, terminal = (
        (tmp_path / "spark" / name).read_text() for name in ("tables.sql", "terminal.sql")
    )
    assert terminal.startswith(tables)
    assert terminal.removeprefix(tables) == "!printf \\033[2A\\033[J;\n"
    assert (
        f"CREATE TABLE shop.orders USING delta LOCATION '{tmp_path}/Ada\\'s lake/shop/orders';"
        in tables
    )
    assert (
        f"spark.jars {tmp_path}/delta.jar"
        in (tmp_path / "spark" / "spark-defaults.conf").read_text()
    )


def test_the_shell_prints_results_and_errors_only(tmp_path, monkeypatch):
    """The lines are those of spark-sql 4.2.1 with three tables."""
    monkeypatch.setattr("server.play.playground.install", lambda *_: [])
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    spark_sql = tmp_path / "spark-sql"
    spark_sql.write_text(
        "#!/bin/sh\n"
        "echo 'WARNING: Using incubator modules: jdk.incubator.vector' >&2\n"
        "echo 'Time taken: 3.91 seconds' >&2\n"
        "printf 'key\\tvalue\\nspark.sql.cli.print.header\\ttrue\\n'\n"
        "printf 'name\\tprice\\ntea\\t3\\n'\n"
        "echo '[UNRESOLVED_COLUMN] no such column' >&2\n"
        "exit 3\n"
    )
    spark_sql.chmod(0o755)
    write_shell(tmp_path / "sql", tmp_path / "lake", TABLES)
    done = subprocess.run(
        [tmp_path / "sql", "-e", "SELECT"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        3,
        "name\tprice\ntea\t3\n",
        "[UNRESOLVED_COLUMN] no such column\n",
    )


def test_the_hints_name_what_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = {"capture": "127.0.0.1:1", "coordinator": "127.0.0.1:2"}
    shown = hints(tmp_path / "data" / "play", PlayConfig(any_ports=True), places)
    assert '  data/play/sql -e "SELECT status' in shown
    assert "-P 3316" in shown
    assert "cli --server 127.0.0.1:1 --pd 127.0.0.1:2 verify -c shop" in shown
    # The default ports need not be named.
    assert "tidemark cli verify -c shop" in hints(tmp_path / "data" / "play", PlayConfig(), places)
