"""Records by column names; and real TiDB rows kept in the tree,
so that every checkout proves the formats.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from storage.model.errors import CorruptError, InvalidError
from storage.tidb.field_type import Flag, Type
from storage.tidb.record import decode_record, encode_record, record_key
from storage.tidb.row import encode_row
from storage.tidb.schema import Column, TableInfo
from tests.tidb_encoding import common_record_key
from tests.unit.storage.tidb import vectors

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "golden" / "tidb_rows.json").read_text()
)
ACCOUNTS = TableInfo.build(101, "accounts", [Column.bigint("id"), Column.varchar("owner", 64)])


@pytest.mark.parametrize("name", list(GOLDEN))
def test_rows_of_a_real_tidb_decode_to_what_its_select_gave(name: str) -> None:
    table = TableInfo.parse(json.dumps(GOLDEN[name]["table"]))
    for row in GOLDEN[name]["rows"]:
        values = decode_record(table, bytes.fromhex(row["key"]), bytes.fromhex(row["value"]))
        texts = {
            column.name: vectors.text(column, values[column.name])
            for column in table.stored_columns
        }
        assert texts == row["select"]


def test_a_record_gives_back_its_values() -> None:
    key, row = encode_record(ACCOUNTS, {"ID": -5, "owner": None})
    assert key == record_key(101, -5)
    assert decode_record(ACCOUNTS, key, row) == {"id": -5, "owner": None}


def test_an_unsigned_key_beyond_the_signed_ones_gives_back_itself() -> None:
    table = TableInfo.build(1, "t", [Column(name="id", type=Type.LONGLONG, flags=Flag.UNSIGNED)])
    for number in (0, 1 << 63, (1 << 64) - 1):
        assert decode_record(table, *encode_record(table, {"id": number})) == {"id": number}


@pytest.mark.parametrize(
    "values", [{}, {"id": None}, {"id": "1"}, {"id": 1, "nope": 1}, {"id": 1, "owner": 7}]
)
def test_a_record_without_key_or_with_strange_values_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidError):
        encode_record(ACCOUNTS, values)


def test_a_key_of_another_kind_is_refused() -> None:
    with pytest.raises(CorruptError, match="not an integer"):
        decode_record(ACCOUNTS, common_record_key(101, bytes(9)), encode_row({}))
