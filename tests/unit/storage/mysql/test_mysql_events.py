"""Events that a MySQL 8.0 and a 9.7 wrote, and what those servers printed of the same rows and
GTIDs.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sink.mysql_mounter import MysqlMounter
from storage.mysql.changes import Plan, read_changes
from storage.mysql.compressed import expanded
from storage.mysql.control import MysqlGtid
from storage.mysql.event import HEADER_BYTES, Events, split_events
from storage.mysql.gtid import MysqlGtidSet
from storage.mysql.rows import TableMaps
from storage.mysql.table_map import TableMap

GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[3] / "golden/mysql_events.json").read_text(encoding="utf-8")
)
NEWEST = GOLDEN[0]
each_server = pytest.mark.parametrize("golden", GOLDEN, ids=[each["version"] for each in GOLDEN])


def read(*events: str) -> Events:
    """Events as they were captured, without checksums; each says the size that it had with one."""
    data = b"".join(resized(bytes.fromhex(each)) for each in events)
    return split_events(data + bytes(8), checksums=False, end=len(data))[0]


def resized(event: bytes) -> bytes:
    return event[:9] + len(event).to_bytes(4, "little") + event[13:]


def body(event: str) -> bytes:
    return bytes.fromhex(event)[HEADER_BYTES:]


def mounted(table_map: str, rows: str) -> tuple[pa.RecordBatch, TableMap]:
    events = read(table_map, rows)
    (found,) = TableMaps(mariadb=False).group(events)
    table = found.table.to_table(1)
    commit_ts = np.full(len(events), 10, np.uint64)
    return MysqlMounter(table, "a").mount(
        read_changes(events, found, Plan.of(table), commit_ts).batch
    ), found.table


@each_server
def test_signs_and_character_sets_belong_to_the_columns_that_the_server_means(
    golden: dict[str, Any],
) -> None:
    """YEAR has a sign and VECTOR a character set; a functional index is no column,
    an invisible column is one.
    """
    batch, told = mounted(**golden["types"])
    columns = {column.name: column for column in told.columns}
    assert [name for name, column in columns.items() if column.unsigned] == ["id", "f"]
    assert {name: column.charset for name, column in columns.items() if column.is_text} == {
        "c": "latin1",
        "v": "utf8mb4",
        **({"n": "utf8mb4"} if "n" in columns else {}),
    }
    (row,) = batch.to_pylist()
    found = {name: row[name] for name in ("id", "t", "y", "e", "f", "g", "se", "c", "v", "j", "i")}
    assert found == {
        "id": 18446744073709551615,
        "t": -3,
        "y": 2000,
        "e": "é",
        "f": 2.5,
        "g": -2,
        "se": "x,y",
        "c": "é",
        "v": "ß",
        "j": "[1]",
        "i": None,
    }


def test_binary_json_is_what_the_server_prints() -> None:
    wanted = NEWEST["json"]["printed"]
    batch, _ = mounted(NEWEST["json"]["table_map"], NEWEST["json"]["rows"])
    found = {str(row["id"]): json.loads(row["j"]) for row in batch.to_pylist()}
    assert found == {number: json.loads(text) for number, text in wanted.items()}


@each_server
def test_a_replica_repeats_when_a_transaction_was_committed_but_not_the_second_of_its_event(
    golden: dict[str, Any],
) -> None:
    primary, replica = (golden["gtid"][side] for side in ("primary", "replica"))
    assert read(primary).timestamps[0] > read(replica).timestamps[0]
    one, other = MysqlGtid.parse(body(primary)), MysqlGtid.parse(body(replica))
    assert one == other
    assert one.committed_us // 1_000_000 == read(primary).timestamps[0]


def test_a_gtid_with_a_tag_is_the_same_on_a_replica() -> None:
    one, other = (
        MysqlGtid.parse_tagged(body(NEWEST["tagged"][side])) for side in ("primary", "replica")
    )
    assert one == other
    assert str(one) == "3c22d75d-e5e0-11f1-ba82-02fc00000001:blue:1"
    assert one.committed_us // 1_000_000 == read(NEWEST["tagged"]["primary"]).timestamps[0]


@each_server
def test_the_gtids_before_a_file_are_those_executed(golden: dict[str, Any]) -> None:
    data = body(golden["previous"])
    assert str(MysqlGtidSet.decode(data)) == golden["executed"]
    assert MysqlGtidSet.parse(golden["executed"]).encode() == data


@each_server
def test_a_compressed_transaction_ends_where_its_payload_does(golden: dict[str, Any]) -> None:
    packed = read(golden["payload"])
    [events] = expanded(packed)
    assert events.types.tolist() == [2, 19, 30, 16]
    assert set(events.next_positions.tolist()) == {int(packed.next_positions[0])} != {0}
    (rows,) = TableMaps(mariadb=False).group(events)
    assert rows.table.name == "a.j"
