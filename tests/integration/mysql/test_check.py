"""`tidemark cli source check` against a real MariaDB: one document, exit codes,
and a way out for each fault.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from server.cli.main import main
from tests.mariadb import MariaDb, mariadb_only, running_mariadb


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["cli", "--json", "source", "check", *arguments])
    document = json.loads(capsys.readouterr().out)
    return status, document | {each["name"]: each for each in document["checks"]}


def test_a_good_server_passes_and_a_written_row_comes_back(
    mariadb: MariaDb, capsys: pytest.CaptureFixture[str]
) -> None:
    name = mariadb.database()
    mariadb.execute("CREATE TABLE t (id INT PRIMARY KEY)", database=name)
    status, found = check(capsys, "--source-uri", mariadb.uri, "--filter", f"{name}.*")
    assert (status, found["ok"]) == (0, True)
    assert found["watermark"]["found"].startswith("came back through the log")
    assert found["tables"]["found"] == "1 can be replicated"


@mariadb_only("COMPRESSED columns, system versioning")
def test_tables_and_foreign_keys_that_would_make_a_target_wrong_fail(
    mariadb: MariaDb, capsys: pytest.CaptureFixture[str]
) -> None:
    name = mariadb.database()
    mariadb.execute(
        *("CREATE TABLE p (id INT PRIMARY KEY)", "CREATE TABLE nokey (x INT)"),
        "CREATE TABLE c (id INT PRIMARY KEY, p INT, FOREIGN KEY (p) REFERENCES p (id) ON DELETE "
        "CASCADE)",
        *(
            "CREATE TABLE m (id INT PRIMARY KEY) ENGINE=MyISAM",
            "CREATE TABLE z (id INT PRIMARY KEY, x TEXT COMPRESSED)",
        ),
        "CREATE TABLE v (id INT PRIMARY KEY) WITH SYSTEM VERSIONING",
        database=name,
    )
    status, found = check(
        capsys, "--source-uri", mariadb.uri, "--filter", f"{name}.*", "--no-write"
    )
    failed = [each["name"] for each in found["checks"] if each["state"] == "failure"]
    assert (status, found["ok"]) == (1, False)
    assert failed == [
        *(f"table {name}.{table}" for table in ("c", "m", "nokey", "v", "z")),
        f"foreign key {name}.c.c_ibfk_1",
    ]
    assert all(
        each["fix"] and each["why"] for each in found["checks"] if each["state"] == "failure"
    )


@mariadb_only("binlog_row_metadata=NO_LOG")
def test_settings_filters_and_a_user_without_privileges_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--binlog-format=MIXED",
        "--binlog-row-image=MINIMAL",
        "--binlog-row-metadata=NO_LOG",
        "--binlog-do-db=x",
    )
    with running_mariadb(*flags, "--expire-logs-days=0.1") as server:
        status, found = check(capsys, "--source-uri", server.uri)
        failed = {each["name"]: each["state"] for each in found["checks"] if each["state"] != "ok"}
        assert status == 1
        assert failed == {
            **dict.fromkeys(
                ("binlog_format", "binlog_row_image", "binlog_row_metadata", "binlog_do_db"),
                "failure",
            ),
            **dict.fromkeys(("log retention", "sync_binlog"), "warning"),
            "watermark": "failure",  # it is not logged: binlog_do_db
        }
        server.execute("CREATE USER u IDENTIFIED BY 'x'")
        (tmp_path / "password").write_text("x")
        uri = f"mysql://u@127.0.0.1:{server.port}?password-file={tmp_path / 'password'}"
        status, found = check(capsys, "--source-uri", uri)
        assert (status, found["SHOW MASTER STATUS"]["fix"]) == (
            1,
            "GRANT BINLOG MONITOR ON *.* TO the user",
        )


def test_names_that_the_sink_cannot_hold_fail_until_the_printed_option_is_given(
    mariadb: MariaDb, capsys: pytest.CaptureFixture[str]
) -> None:
    name = mariadb.database()
    mariadb.execute(
        "CREATE TABLE `odd one` (id INT PRIMARY KEY, ctid INT, `a b.c` INT)", database=name
    )
    asked = ("--source-uri", mariadb.uri, "--filter", f"{name}.*", "--no-write", "--sink-uri")
    assert check(capsys, *asked, "delta:///lake/shop")[0] == 0
    status, found = check(capsys, *asked, "postgresql://me@host/db")
    why = found[f"table {name}.odd one"]["why"]
    assert (status, "each table has a column ctid of its own" in why) == (1, True)
    (option,) = re.findall(r"--columns '[^']*'", why)
    status, found = check(capsys, *asked, "postgresql://me@host/db", *shlex.split(option))
    assert (status, found["tables"]["found"]) == (0, "1 can be replicated")
