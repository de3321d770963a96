"""Verified dumps of a real MariaDB: right ones pass under churn,
a decoding that goes wrong is found, or repaired.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from server.dump.progress import TableState
from storage.meta.client import EtcdMeta
from storage.mysql import arrow
from storage.mysql.schema import Type
from tests.integration.dump.dumping import applied, churn, over, source, start, until
from tests.integration.dump.more_types import MORE, MORE_ROWS
from tests.integration.mysql.every_type import COLUMNS, ROWS
from tests.integration.mysql.replica import following
from tests.mariadb import MariaDb

Fault = Callable[[pa.Array], pa.Array]


def plant(monkeypatch: pytest.MonkeyPatch, kind: Type, fault: Fault) -> None:
    """Rows of SELECTs are decoded wrongly in columns of a type."""
    right = arrow._BINARY_CELLS[kind]

    def wrong(*arguments: Any) -> pa.Array:
        return fault(right(*arguments))

    monkeypatch.setitem(arrow._BINARY_CELLS, kind, wrong)


async def test_every_chunk_of_all_column_types_is_verified_under_churn(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    database = mariadb.database()
    mariadb.execute(
        f"USE {database}",
        "SET sql_mode = 'ALLOW_INVALID_DATES'",
        f"CREATE TABLE {database}.everything (id INT PRIMARY KEY, {COLUMNS}{MORE})",
        f"CREATE TABLE {database}.t (id INT PRIMARY KEY, version INT, name VARCHAR(300))",
        f"INSERT INTO {database}.t SELECT seq, 0, REPEAT('n', 200) FROM seq_0_to_9999",
    )
    connection = mariadb.connect(database)
    with connection.cursor() as cursor:
        cursor.execute("SET sql_mode = 'ALLOW_INVALID_DATES', time_zone = '+00:00'")
        known = {
            column for column, *_ in mariadb.execute(f"SHOW COLUMNS FROM {database}.everything")
        }
        for number, all_values in enumerate([*ROWS, *MORE_ROWS]):
            row = {column: value for column, value in all_values.items() if column in known}
            values = ", ".join(["%s"] * (len(row) + 1))
            names = ", ".join(["id", *row])
            cursor.execute(
                f"INSERT INTO everything ({names}) VALUES ({values})", [number, *row.values()]
            )
    connection.close()
    async with following(mariadb.uri, meta, f"{database}.*") as feed:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(churn(mariadb, f"{database}.t", stop, 10_000))
            await start(meta, verify=True)
            found = await until(meta, feed, over)
            stop.set()
        for each in found.values():
            assert each.state is TableState.DONE, each
            assert each.chunks_verified == each.chunks > 0
            assert each.chunks_repaired == 0
        columns = ("id", "version", "name")
        await feed.until(
            lambda: applied(feed, f"{database}.t") == source(mariadb, f"{database}.t", columns)
        )
        assert len(applied(feed, f"{database}.everything")) == len(ROWS) + len(MORE_ROWS)


def two_tables(mariadb: MariaDb) -> tuple[str, str]:
    database = mariadb.database()
    for name in ("amounts", "names"):
        column = "DECIMAL(12,2)" if name == "amounts" else "VARCHAR(20)"
        mariadb.execute(
            f"USE {database}",
            f"CREATE TABLE {name} (id INT PRIMARY KEY, version {column})",
            f"INSERT INTO {name} SELECT seq, seq FROM seq_1_to_4000",
        )
    return f"{database}.amounts", f"{database}.names"


async def test_a_decoding_that_is_wrong_is_found_and_fails_its_table_only(
    mariadb: MariaDb, meta: EtcdMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    amounts, names = two_tables(mariadb)

    def off_by_a_cent(values: pa.Array) -> pa.Array:
        wrong = pc.equal(values, pa.scalar(3000, pa.decimal128(12, 2)))
        return pc.if_else(wrong, pa.scalar("3000.01").cast(values.type), values)

    plant(monkeypatch, Type.NEWDECIMAL, off_by_a_cent)
    async with following(mariadb.uri, meta, f"{amounts.split('.')[0]}.*") as feed:
        await start(meta, verify=True)
        found = await until(meta, feed, over)
        assert found[names].state is TableState.DONE
        assert found[names].chunks_verified == found[names].chunks
        failed = found[amounts]
        assert failed.state is TableState.FAILED
        assert failed.chunks_repaired >= 1, "it was read again first"
        for part in (
            "ErrDumpChunkDiffers",
            amounts,
            (3000).to_bytes(4, "little").hex(),
            "the server has",
        ):
            assert part in failed.error, failed.error
        assert 3000 not in applied(feed, amounts), "nothing wrong was delivered"


@pytest.mark.parametrize(
    "shift", [False, True], ids=["one value", "rows of a column shifted by one"]
)
async def test_what_went_wrong_once_is_read_again_and_right(
    mariadb: MariaDb, meta: EtcdMeta, monkeypatch: pytest.MonkeyPatch, *, shift: bool
) -> None:
    amounts, names = two_tables(mariadb)
    calls = 0

    def once(values: pa.Array) -> pa.Array:
        nonlocal calls
        calls += 1
        if calls > 1:
            return values
        moved = values.take(pa.array([*range(1, len(values)), 0]))
        return moved if shift else pa.concat_arrays([moved[:1], values[1:]])

    plant(monkeypatch, Type.VARCHAR, once)
    async with following(mariadb.uri, meta, f"{names.split('.')[0]}.*") as feed:
        await start(meta, verify=True)
        found = await until(meta, feed, over)
        for name in (amounts, names):
            assert found[name].state is TableState.DONE, found[name]
            assert found[name].chunks_verified == found[name].chunks
            assert found[name].chunks_repaired == (name == names)
            assert applied(feed, name) == source(mariadb, name, ("id", "version"))
