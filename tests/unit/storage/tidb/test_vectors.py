"""Every row a real TiDB wrote decodes to what its SELECT printed."""

from typing import Any

import pytest

from storage.tidb.record import decode_record
from storage.tidb.schema import TableInfo
from tests.unit.storage.tidb import vectors


def _decoded(table: TableInfo, state: dict[bytes, bytes]) -> list[list[str | None]]:
    rows = [
        decode_record(table, key, row)
        for table_id, key, row in vectors.record_pairs(state)
        if table_id in table.physical_ids
    ]
    return [
        [vectors.text(column, row[column.name]) for column in table.stored_columns] for row in rows
    ]


def _selected(table: TableInfo, result: dict[str, Any]) -> list[list[str | None]]:
    """The SELECT's rows without the columns that no row holds (virtual generated ones)."""
    stored = {column.name for column in table.stored_columns}
    at = [number for number, name in enumerate(result["columns"]) if name in stored]
    return [[row[number] for number in at] for row in result["rows"] or []]


def _sorted(rows: list[list[str | None]]) -> list[list[str | None]]:
    return sorted(rows, key=repr)


def test_the_final_rows_of_every_table_are_what_select_gave() -> None:
    state = {
        bytes.fromhex(pair["key"]): bytes.fromhex(pair["value"])
        for pair in vectors.lines("final_kv")[1:]
    }
    expected = vectors.lines("steps")[-1]["rows_after"]
    compared = 0
    for name, result in expected.items():
        table = vectors.tables()[name]
        rows = _decoded(table, state)
        if "aggregate" in result:
            sizes = [len(row[1] or "") for row in rows]
            assert [
                [str(len(rows)), str(sum(int(row[0] or 0) for row in rows)), str(sum(sizes))]
            ] == result["aggregate"]
        else:
            assert _sorted(rows) == _sorted(_selected(table, result)), name
        compared += len(rows)
    assert compared > 1000


@pytest.mark.parametrize("number", range(52))
def test_after_each_step_the_rows_are_what_select_gave_under_the_schema_of_then(
    number: int,
) -> None:
    step, state = next(pair for pair in vectors.states() if pair[0]["step"] == number)
    for name, result in step["rows_after"].items():
        if "rows" in result:
            table = vectors.schema_at(name, step["ts_after"])
            assert _sorted(_decoded(table, state)) == _sorted(_selected(table, result)), name
