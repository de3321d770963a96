"""Columns that are added with a DEFAULT, in all forms:
rows that were there before hold what SELECT shows.

What is certain is computed from the statement; else the table is read again. Nothing is left null.
"""

from typing import Any

import pytest
from pyspark_tidemark.column_metadata import defaults_of, scalar

from server.dump.job import DumpRecords
from storage.meta.client import EtcdMeta
from tests.integration.mysql.replica import Feed, following
from tests.mariadb import MariaDb

FORMS = (
    "INT DEFAULT 5",
    "INT DEFAULT -5",
    "DECIMAL(4,2) DEFAULT .5",
    "DECIMAL(4,2) DEFAULT -.5",
    "INT DEFAULT '7'",
    "INT DEFAULT 0x41",
    "INT DEFAULT b'101'",
    "INT DEFAULT TRUE",
    "INT DEFAULT (1+1)",
    "INT DEFAULT (2 * 3 - 1)",
    "INT DEFAULT NULL",
    "INT",
    "INT NOT NULL",
    "INT NOT NULL DEFAULT 3",
    "TINYINT DEFAULT 1",
    "SMALLINT UNSIGNED DEFAULT 65535",
    "MEDIUMINT DEFAULT -8388608",
    "BIGINT DEFAULT 9223372036854775807",
    "BIGINT UNSIGNED DEFAULT 18446744073709551615",
    "BOOLEAN DEFAULT FALSE",
    "INT(5) ZEROFILL DEFAULT 42",
    "INT DEFAULT 1.5",
    "DECIMAL(10,2) DEFAULT 1.5",
    "DECIMAL(65,30) DEFAULT -0.5",
    "DECIMAL(5) DEFAULT 12",
    "DECIMAL(10,2) NOT NULL",
    "DECIMAL(4,1) DEFAULT 1.25",
    "FLOAT DEFAULT 1.5",
    "DOUBLE DEFAULT 2.25",
    "DOUBLE DEFAULT 1e10",
    "FLOAT(5,2) DEFAULT 1.25",
    "DOUBLE NOT NULL",
    "BIT(5) DEFAULT b'101'",
    "BIT(9) DEFAULT 5",
    "BIT(1) NOT NULL",
    "YEAR DEFAULT 2024",
    "YEAR DEFAULT '70'",
    "YEAR NOT NULL",
    "DATE DEFAULT '2024-01-01'",
    "DATE DEFAULT '2024-2-9'",
    "DATE DEFAULT 20240229",
    "DATE DEFAULT DATE'2024-03-04'",
    "DATE NOT NULL",
    "DATETIME DEFAULT '2024-01-01'",
    "DATETIME DEFAULT '2024-01-01 10:11:12'",
    "DATETIME(3) DEFAULT '2024-01-01 10:00:00.5'",
    "DATETIME(2) DEFAULT '2020-01-02 03:04:05.128'",
    "DATETIME(6) DEFAULT TIMESTAMP'2024-01-01 01:02:03.000004'",
    "DATETIME DEFAULT CURRENT_TIMESTAMP",
    "TIMESTAMP DEFAULT '2024-01-01 10:00:00'",
    "TIMESTAMP(3) DEFAULT '2024-01-01 10:00:00.5'",
    "TIMESTAMP DEFAULT CURRENT_TIMESTAMP",
    "TIMESTAMP NULL DEFAULT NULL",
    "TIME DEFAULT '10:00'",
    "TIME DEFAULT 100",
    "TIME DEFAULT '-1:02:03'",
    "TIME(3) DEFAULT '1:2:3.4'",
    "TIME NOT NULL",
    "VARCHAR(9) DEFAULT 'x'",
    "VARCHAR(9) DEFAULT _latin1'x'",
    "VARCHAR(9) DEFAULT N'x'",
    "VARCHAR(9) DEFAULT 'a' 'b'",
    "VARCHAR(9) DEFAULT 5.50",
    "VARCHAR(9) DEFAULT 0x41",
    "VARCHAR(9) DEFAULT 'é日'",
    "VARCHAR(9) DEFAULT ''",
    "CHAR(5) DEFAULT 'a '",
    "CHAR(5) NOT NULL",
    "VARCHAR(40) DEFAULT (CONCAT('a', 'b'))",
    "TEXT DEFAULT 'long'",
    "BLOB DEFAULT 'bytes'",
    "VARBINARY(5) DEFAULT 'é'",
    "BINARY(4) DEFAULT 'ab'",
    "ENUM('a','b') DEFAULT 'b'",
    "ENUM('a','b') NOT NULL",
    "SET('x','y') DEFAULT 'y,x'",
    "JSON DEFAULT '{\"a\": 1}'",
    "UUID DEFAULT '018f0000-0000-7000-8000-000000000001'",
    "UUID NOT NULL",
    "INET6 DEFAULT '::1'",
    "INET4 DEFAULT '10.0.0.1'",
)
CHUNKS = 8


def default_of(field: Any) -> Any:
    told = defaults_of([field])
    return scalar(told["c"], field.type).as_py() if "c" in told else None


@pytest.mark.parametrize("part", range(CHUNKS))
async def test_older_rows_hold_what_the_server_gives_them(
    mariadb: MariaDb, meta: EtcdMeta, part: int
) -> None:
    """A row that is written behind the DDL with the same DEFAULT is read from the log:
    all others must equal it.
    """
    forms = FORMS[part::CHUNKS]
    assert len(FORMS) == 81
    database = mariadb.database()
    names = [f"{database}.t{place}" for place in range(len(forms))]
    mariadb.execute(
        *(f"CREATE TABLE {name} (id INT PRIMARY KEY)" for name in names),
        *(f"INSERT INTO {name} VALUES (1), (2)" for name in names),
    )
    async with following(f"{mariadb.uri}?idle-row-ms=200", meta, f"{database}.*") as feed:
        for name, form in zip(names, forms, strict=True):
            try:
                mariadb.execute("SET sql_mode=''", f"ALTER TABLE {name} ADD c {form}")
            except pytest.skip.Exception:  # a MySQL lacks the form
                mariadb.execute(f"ALTER TABLE {name} ADD c INT")
        mariadb.execute(*(f"UPDATE {name} SET id = 3 WHERE id = 2" for name in names))
        await feed.until(
            lambda: len(feed.target.changes) == len(names) and not feed.target.holds.open_since
        )
        await feed.until(lambda: all(feed.rows_of(_span(feed, name)) for name in names))
        job = await DumpRecords(meta, "feed").job()
        reread = set(job.reasons) if job is not None else set()
        await feed.until(lambda: all(1 in _ids(feed, name) for name in reread))
        wrong = {}
        for name, form in zip(names, forms, strict=True):
            told = older(feed, name, reread)
            if told is not None:
                wrong[form] = told
    again = sorted(forms[int(name.rpartition(".t")[2])] for name in reread)
    print(f"\n{len(names) - len(reread)} computed, {len(reread)} read again: {again}")
    assert not wrong


def _span(feed: Feed, name: str) -> Any:
    return next(
        span for span, versions in feed.target.versions.items() if versions[-1][1].name == name
    )


def _ids(feed: Feed, name: str) -> set[int]:
    return {change["id"] for change in feed.target.changes_of(_span(feed, name))}


def older(feed: Feed, name: str, reread: set[str]) -> Any:
    """What rows 1 and 3 hold, if that is not the same: the one was never written,
    the other one was, by the log.
    """
    span = _span(feed, name)
    rows = {
        change["id"]: change.get("c")
        for change in feed.target.changes_of(span)
        if change["_op"] != "delete"
    }
    held = (
        rows.get(1)
        if name in reread
        else default_of(feed.target.versions[span][-1][1].mounter.schema.field("c"))
    )
    return (
        None
        if 3 in rows and (1 in rows) == (name in reread) and repr(held) == repr(rows[3])
        else (held, rows)
    )
