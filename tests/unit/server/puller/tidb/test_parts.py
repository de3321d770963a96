"""Parts of big tables: what can be split, what a part is, and that it has no rows of another."""

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from server.changefeed.event_filter import EventFilter, EventFilters
from server.changefeed.table import TableRecord
from server.puller.tidb.parts import WithinPart, regions_within
from server.puller.tidb.table import can_split, part, part_of, tidb_table
from storage.codec import encode_bytes
from storage.model.errors import InvalidError
from storage.model.event import INSERT, raw_batch
from storage.model.span import Span
from storage.tidb.record import record_key
from storage.tidb.schema import Column, TableInfo

DOC = json.loads(TableInfo.build(7, "t", [Column.bigint("id"), Column.bigint("v")]).to_json())
RECORD = TableRecord("s", DOC)
TABLE = tidb_table(RECORD)
LOW = Span(7, TABLE.span.start_key, record_key(7, 50))


def test_a_part_is_a_table_of_its_own_to_whoever_pulls_it() -> None:
    routed = tidb_table(RECORD.routed(("lake", "orders")))
    table = part(routed, LOW)
    assert table.span == part_of(table.record) == LOW
    assert table.name.startswith("s.t#")
    assert table.target_name == table.name, "readers never see it, and names must be unlike"
    assert table.mounter.schema.equals(TABLE.mounter.schema, check_metadata=True)
    assert part(routed, LOW).record == table.record
    other = part(routed, Span(7, LOW.end_key, TABLE.span.end_key))
    assert other.name != table.name
    # As it is sent to another capture.
    document = json.loads(table.record.table_info_json)
    assert tidb_table(TableRecord("s", document)).span == LOW
    assert part_of(RECORD) is None
    with pytest.raises(InvalidError):
        part_of(TableRecord("s", DOC | {"tidemark_part": ["no key"]}))


def test_only_tables_whose_rows_stay_where_their_key_is_are_split() -> None:
    assert can_split(TABLE)
    ignoring = EventFilters([EventFilter(matcher=("s.t",), ignore_event=("insert",))])
    assert not can_split(tidb_table(ignoring.of(RECORD)))
    hidden = DOC | {"pk_is_handle": False, "is_common_handle": False}
    if not TableInfo.parse(hidden).handle_is_key:
        index: Any = [
            {
                "id": 1,
                "idx_name": {"O": "PRIMARY", "L": "primary"},
                "idx_cols": [{"name": {"O": "id", "L": "id"}, "offset": 0, "length": -1}],
                "state": 5,
                "is_primary": True,
                "is_unique": True,
            }
        ]
        assert not can_split(tidb_table(TableRecord("s", hidden | {"index_info": index})))
    parts = [{"id": number, "name": {"O": f"p{number}", "L": f"p{number}"}} for number in (8, 9)]
    parted = DOC | {"partition": {"enable": True, "definitions": parts}}
    assert not can_split(tidb_table(TableRecord("s", parted)))


def test_rows_of_other_parts_are_left_out() -> None:
    added: list[pa.RecordBatch] = []
    sorter: Any = SimpleNamespace(
        add=lambda _span, batch: added.append(batch), resolve=lambda _span, ts: added.append(ts)
    )
    keys = [record_key(7, key) for key in (1, 49, 50, 51)]
    batch = raw_batch([5] * 4, [4] * 4, [INSERT] * 4, keys, [b"v"] * 4, [None] * 4)
    for span, inside in ((LOW, keys[:2]), (Span(7, LOW.end_key, b""), keys[2:])):
        rows = WithinPart(span, sorter)
        rows.add(span, batch)
        assert added.pop().column("key").to_pylist() == inside
    rows.resolve(LOW, 9)
    assert added == [9]


async def test_a_table_is_split_where_regions_begin_however_many_there_are() -> None:
    begins = [record_key(7, number) for number in range(3000)]
    regions = [b"", *map(encode_bytes, begins), b""]

    async def scan_regions(start_key: bytes, end_key: bytes, limit: int) -> list[Any]:
        routes = [
            SimpleNamespace(region=SimpleNamespace(start_key=begin, end_key=end))
            for begin, end in itertools.pairwise(regions)
            if (not end or end > start_key) and (not end_key or begin < end_key)
        ]
        return routes[:limit]

    pd: Any = SimpleNamespace(scan_regions=scan_regions)
    found = await regions_within(pd, record_key(7, 5), record_key(7, 2500))
    assert found == begins[6:2500]
    assert await regions_within(pd, record_key(6, 5), b"") == begins
