"""Progress, jobs and queries: documents survive, and say what docs/format/dump.md says."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.dump.job import Job, parse_progress
from server.dump.mysql.check import Check
from server.dump.mysql.chunk import ChunkQuery, ChunkSize, integer, split_ranges
from server.dump.progress import Cell, Range, TableProgress, TableState
from storage.model.errors import CorruptError
from storage.mysql.schema import Column, Table, Type

CURSORS = st.none() | st.lists(
    st.builds(Cell, st.integers(0, 0xFFFF), st.binary(max_size=9)), min_size=1
).map(tuple)
PROGRESS = st.builds(
    TableProgress,
    name=st.text(max_size=9),
    table_id=st.integers(0, 1 << 52),
    job=st.text(max_size=5),
    state=st.sampled_from(TableState),
    error=st.text(max_size=9),
    ranges=st.lists(st.builds(Range, CURSORS, CURSORS, st.booleans()), max_size=3).map(tuple),
    rows=st.integers(0),
    bytes=st.integers(0),
    chunks=st.integers(0),
    rows_estimated=st.integers(0),
    high_ts=st.integers(0),
    rows_per_s=st.integers(0),
    rows_read=st.integers(0),
    chunks_verified=st.integers(0),
    chunks_repaired=st.integers(0),
)
GOLDEN = (
    '{"name":"shop.t","table_id":7,"job":"j","state":"dumping","error":"","ranges":[{"after":[[8,"0500000000000000"]],'
    '"until":null,"done":false}],"rows":5,"bytes":50,"chunks":1,"rows_estimated":9,"high_ts":11,"rows_per_s":3,'
    '"rows_read":8,"chunks_verified":1,"chunks_repaired":2}'
)


@given(PROGRESS)
def test_progress_survives(progress: TableProgress) -> None:
    assert parse_progress(json.dumps(progress.to_doc()).encode()) == progress


def test_the_documents_are_those_of_the_format() -> None:
    cursor = (Cell(8, (5).to_bytes(8, "little")),)
    progress = TableProgress(
        "shop.t", 7, "j", TableState.DUMPING, "", (Range(cursor),), 5, 50, 1, 9, 11, 3, 8, 1, 2
    )
    assert json.dumps(progress.to_doc(), separators=(",", ":")) == GOLDEN
    assert parse_progress(GOLDEN.encode()) == progress
    older = GOLDEN.replace(',"rows_read":8,"chunks_verified":1,"chunks_repaired":2', "")
    assert parse_progress(older.encode()).rows_read == 5, "as those before it were written"
    job = Job("j", tables=("shop.*",), where={"shop.t": "id > 1"}, rows_per_s=5)
    assert job.to_json().decode() == (
        '{"id":"j","state":"running","tables":["shop.*"],"where":{"shop.t":"id > 1"},"rows_per_s":5,"bytes_per_s":0,'
        '"parallel":4,"attempt":0}'
    )
    assert Job.parse(job.to_json()) == job
    newer = replace(job, verify=True, priority={"shop.*": 2})
    assert newer.to_json() == job.to_json()[:-1] + b',"priority":{"shop.*":2},"verify":true}'
    assert Job.parse(newer.to_json()) == newer


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"name": 1}', b'{"id": "j", "tables": 5}'])
def test_other_documents_are_damaged(text: bytes) -> None:
    with pytest.raises(CorruptError):
        parse_progress(text)
    with pytest.raises(CorruptError):
        Job.parse(text)


def test_jobs_take_tables_by_patterns() -> None:
    assert Job("j").takes("shop.t")
    assert Job("j", tables=("shop.*", "crm.a?")).takes("crm.ab")
    assert not Job("j", tables=("shop.*",)).takes("crm.shop")


@given(
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.integers(1, 16),
)
def test_ranges_follow_one_another_without_gap(one: int, other: int, parts: int) -> None:
    column = Column(name="id", type=Type.LONGLONG)
    ranges = split_ranges(column, min(one, other), max(one, other), parts)
    assert ranges[0].after is None
    assert ranges[-1].until is None
    assert [each.until for each in ranges[:-1]] == [each.after for each in ranges[1:]]
    numbers = [
        int.from_bytes(each.until[0].data, "little", signed=True)
        for each in ranges[:-1]
        if each.until
    ]
    assert numbers == sorted(set(numbers))


def test_queries_name_every_part_of_a_composite_key_and_quote_all_names() -> None:
    columns = (
        Column(name="a`b", type=Type.LONG, nullable=False),
        Column(name="c", type=Type.VARCHAR, meta=20, collation=45, nullable=False),
        Column(name="e", type=Type.ENUM, meta=1, elems=("x",)),
    )
    query = ChunkQuery(
        "sh`op", Table(1, "t", columns, ("a`b", "c")), {"c": "utf8mb4_general_ci"}, "e = 1 OR 1"
    )
    bound = "CONVERT(? USING utf8mb4) COLLATE utf8mb4_general_ci"
    assert query.sql(after=True, until=True) == (
        "SELECT `a``b`, `c`, `e` | 0 FROM `sh``op`.`t` WHERE (e = 1 OR 1) AND "
        f"(`a``b` >= ? AND (`a``b` > ? OR (`a``b` = ? AND `c` > {bound}))) AND "
        f"(`a``b` <= ? AND (`a``b` < ? OR (`a``b` = ? AND `c` <= {bound}))) ORDER BY `a``b`, `c` "
        "LIMIT ?"
    )
    cells = (integer(1), Cell(252, b"\x01x"))
    assert query.parameters(Range(cells, cells), 5) == [
        *[integer(1)] * 3,
        cells[1],
        *[integer(1)] * 3,
        cells[1],
        integer(5),
    ]


def test_columns_that_are_left_out_are_read_as_null_and_compared_with_nothing() -> None:
    columns = (
        Column(name="id", type=Type.LONG, nullable=False),
        Column(name="secret", type=Type.LONG),
    )
    query = ChunkQuery("shop", Table(1, "t", columns, ("id",)), {}, left_out=frozenset({"secret"}))
    assert (
        query.sql(after=False, until=False)
        == "SELECT `id`, NULL FROM `shop`.`t` ORDER BY `id` LIMIT ?"
    )
    assert "secret" not in Check(query).total_sql(Range()) + Check(query).rows_sql(Range())
    assert Check(query).unchecked == ()


@given(
    st.lists(
        st.tuples(st.integers(1, 10**5), st.integers(1, 10**9), st.floats(0, 100)), max_size=20
    )
)
def test_chunk_sizes_stay_within_their_bounds_and_move_by_a_factor_of_two(
    took: list[tuple[int, int, float]],
) -> None:
    size = ChunkSize()
    for rows, size_bytes, seconds in took:
        before = size.rows
        size.took(rows, size_bytes, seconds)
        assert 1 <= size.rows <= 65536
        assert before // 2 <= size.rows <= before * 2


def test_chunks_of_huge_rows_have_one_and_those_of_slow_servers_no_less_than_at_first() -> None:
    huge, slow = ChunkSize(), ChunkSize()
    for _ in range(20):
        huge.took(huge.rows, huge.rows << 24, 0.01)
        slow.took(slow.rows, slow.rows * 100, 60.0)
    assert (huge.rows, slow.rows) == (1, 64)
