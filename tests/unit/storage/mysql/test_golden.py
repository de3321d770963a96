"""The formats of docs/format/mysql-rows.md, in the bytes and the record that a MariaDB 10.11
gave.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sink.mysql_mounter import MysqlMounter
from storage.model.errors import InvalidError
from storage.model.event import INSERT, raw_batch
from storage.mysql.binary_row import binary_keys
from storage.mysql.buffer import Bytes
from storage.mysql.changes import Plan
from storage.mysql.image import image_keys
from storage.mysql.schema import Table
from storage.mysql.table_map import RowMetadataError, TableMap

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "golden/mysql_table.json").read_text(encoding="utf-8")
)
TABLE = Table.parse(GOLDEN["record"])


def test_a_table_map_becomes_the_record_and_the_record_survives() -> None:
    found = TableMap.parse(bytes.fromhex(GOLDEN["table_map"]), mariadb=True)
    assert found.to_table(7) == replace(TABLE, next_column_id=0)
    assert json.loads(TABLE.to_json()) == GOLDEN["record"]
    assert found.name == "shop.orders"


def test_columns_of_a_record_that_knows_no_ids_are_numbered_by_place() -> None:
    columns = [
        {member: value for member, value in each.items() if member != "id"}
        for each in GOLDEN["record"]["columns"]
    ]
    assert Table.parse({**GOLDEN["record"], "columns": columns}).to_doc() == GOLDEN["record"]


def test_without_full_metadata_the_way_out_is_told() -> None:
    body = bytes.fromhex(GOLDEN["table_map"])
    bare = TableMap.parse(body[: body.index(b"\x02id\x06region") - 2], mariadb=True)
    with pytest.raises(RowMetadataError, match="binlog_row_metadata='FULL'"):
        bare.to_table(7)


@pytest.mark.parametrize("row", GOLDEN["rows"])
def test_image_and_binary_row_have_the_same_key_and_values(row: dict[str, Any]) -> None:
    plan = Plan.of(TABLE)
    image, binary = bytes.fromhex(row["image"]), bytes.fromhex(row["binary"])
    at = np.ones(1, np.int64)
    assert image_keys(Bytes.padded(image), at, plan.shape, plan.key)[0].as_py().hex() == row["key"]
    assert (
        binary_keys(Bytes.padded(binary), at, TABLE.columns, plan.key)[0].as_py().hex()
        == row["key"]
    )
    raw = raw_batch([9, 10], [8, 9], [INSERT] * 2, [b"k"] * 2, [image, binary], [None] * 2)
    mounted = MysqlMounter(TABLE, "shop").mount(raw)
    assert {field.name: str(field.type) for field in list(mounted.schema)[4:]} == GOLDEN["types"]
    for number in range(2):
        assert {name: plain(mounted[name][number].as_py()) for name in row["values"]} == row[
            "values"
        ]


@pytest.mark.parametrize(
    "doc", [{}, {"id": 1}, {**GOLDEN["record"], "primary_key": ["nobody"]}, {"columns": 5}]
)
def test_other_documents_are_no_record(doc: dict[str, Any]) -> None:
    with pytest.raises(InvalidError):
        Table.parse(doc)


def plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, int | float | str) else str(value)
