"""A comparison tells the truth, and all of it where its budget allows;
both sides are tables in memory.
"""

import asyncio
from dataclasses import dataclass

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark_tidemark.digest import RangeChecksums

from server.verify.comparison import Comparison, VerifyOptions
from server.verify.difference import TWICE, Budget
from server.verify.lake.question import Question
from server.verify.progress import Progress
from server.verify.spans import Extent, KeySpans

SCHEMA = pa.schema([("id", pa.int64()), ("n", pa.int64())])
TABLES = st.dictionaries(st.integers(0, 30), st.integers(0, 3), max_size=20)


@dataclass
class Table:
    """Stands in for `catalog.Table`."""

    name: str = "shop.t"
    ts: int = 7
    key: tuple[str, ...] = ("id",)
    schema: pa.Schema = SCHEMA
    spans: KeySpans | None = None

    def only(self, rows):
        return rows if self.spans is None else rows.filter(self.spans.inside(rows))


class Side:
    """Implements `Upstream` and `Lake` over rows (id, n); a lake may have an id more than once."""

    def __init__(self, rows):
        columns = [pa.array([row[place] for row in rows], pa.int64()) for place in (0, 1)]
        self._batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
        self.scans = 0
        self.repaired = None

    async def rows_of(self, table):
        self.scans += 1
        half = self._batch.num_rows // 2
        for part in (self._batch.slice(0, half), self._batch.slice(half)):
            yield part

    async def range_checksums(self, table, ranges):
        range_checksums = RangeChecksums(ranges)
        range_checksums.add(table.only(self._batch), table.key)
        return range_checksums

    async def rows(self, table, ranges, chosen):
        asked = Question(table.name, table.ts, 0, table.key, table.schema, ranges, tuple(chosen))
        return pa.Table.from_batches(
            asked.chosen_rows([table.only(self._batch)]), asked.answer_schema
        )

    async def repair(self, table, gone, live):
        with pa.OSFile(gone) as removed, pa.OSFile(live) as written:
            files = [pa.ipc.open_file(file).read_all() for file in (removed, written)]
        self.repaired = (
            files[0][0].to_pylist(),
            list(zip(*files[1].to_pydict().values(), strict=True)),
        )
        return 5


class Upstream:
    """The rows of a side, as `Upstream` names them."""

    def __init__(self, side):
        self.rows = side.rows_of


def compared(upstream, lake, **options):
    ours, theirs = Side(list(upstream.items())), Side(lake)
    progress = Progress()
    report = asyncio.run(
        Comparison(Upstream(ours), theirs, Table(), VerifyOptions(**options), progress).run()
    )
    assert progress.document()["waiting_for"] == []
    return report, ours, theirs


@settings(max_examples=60)
@given(TABLES, TABLES, st.sets(st.integers(0, 19), min_size=1))
def test_a_sample_tells_what_differs_in_its_ranges_and_names_them(upstream, lake, numbers):
    slots = Extent(1, 0, 30).slots()
    spans = KeySpans("id", tuple(slots[number] for number in sorted(numbers)))
    ours, theirs = Side(list(upstream.items())), Side(list(lake.items()))
    comparison = Comparison(
        Upstream(ours), theirs, Table(spans=spans), VerifyOptions(repair=True), Progress()
    )
    report = asyncio.run(comparison.run())
    wrong = {
        key
        for key in upstream.keys() | lake.keys()
        if upstream.get(key) != lake.get(key) and spans.of(key)
    }
    assert {each.key["id"] for each in report.differences} == wrong
    assert report.differing_spans == [
        span for span in spans.spans if span in {spans.of(key) for key in wrong}
    ]
    if wrong:
        gone, written = theirs.repaired
        assert set(gone) == wrong & lake.keys()
        assert dict(written) == {key: upstream[key] for key in wrong & upstream.keys()}


@settings(max_examples=60)
@given(TABLES, TABLES, st.integers(0, 12))
def test_what_is_told_is_true_and_complete_if_it_says_so(upstream, lake, most):
    wrong = {key for key in upstream.keys() | lake.keys() if upstream.get(key) != lake.get(key)}
    report, ours, _ = compared(upstream, list(lake.items()), budget=Budget(rows=most))
    found = {each.key["id"] for each in report.differences}
    assert report.equal == (not wrong)
    assert (report.upstream_rows, report.lake_rows) == (len(upstream), len(lake))
    assert found <= wrong
    assert report.differing_rows == len(found) <= most
    assert report.complete == (found == wrong)
    assert report.complete or most < len(wrong)
    assert ours.scans <= 3


@settings(max_examples=40)
@given(TABLES, TABLES, st.sets(st.integers(0, 30)))
def test_a_repair_makes_the_lake_what_the_upstream_is(upstream, lake, doubled):
    rows = [*lake.items(), *((key, lake[key]) for key in doubled & lake.keys())]
    report, _, side = compared(upstream, rows, repair=True)
    if report.equal:
        assert side.repaired is None
        return
    gone, live = side.repaired
    kept = [row for row in rows if row[0] not in gone]
    assert sorted(kept + live) == sorted(upstream.items())
    assert (report.repaired.removed, report.repaired.written, report.repaired.version) == (
        len(gone),
        len(live),
        5,
    )
    dry, _, untouched = compared(upstream, rows, repair=True, dry_run=True)
    assert untouched.repaired is None
    assert (dry.repaired.removed, dry.repaired.written, dry.repaired.version) == (
        len(gone),
        len(live),
        None,
    )


def test_no_more_differences_are_told_than_asked_for_and_all_are_counted():
    report, _, _ = compared({}, [(key, 0) for key in range(50)], limit=3)
    assert (len(report.differences), report.differing_rows, report.complete) == (3, 50, True)


def test_a_row_that_the_lake_has_very_often_is_counted_not_fetched():
    report, _, _ = compared({1: 1, 2: 2}, [(1, 1)] * 300_000)
    assert (report.lake_rows, report.complete) == (300_000, False)
    assert [(each.key["id"], each.kind) for each in report.differences] == [(2, "only upstream")]
    assert TWICE not in {each.kind for each in report.differences}


@pytest.mark.parametrize("names", [("key", "row"), ("row", "key"), ("0", "1")])
def test_a_table_may_have_columns_that_are_called_as_those_of_an_answer(names):
    ours, theirs = Side([(1, 1), (2, 2)]), Side([(1, 1), (2, 0), (3, 3)])
    for side in (ours, theirs):
        side._batch = side._batch.rename_columns(list(names))
    table = Table(key=(names[0],), schema=ours._batch.schema)
    report = asyncio.run(
        Comparison(Upstream(ours), theirs, table, VerifyOptions(repair=True), Progress()).run()
    )
    assert [each.key for each in report.differences] == [{names[0]: 2}, {names[0]: 3}]
    assert (sorted(theirs.repaired[0]), theirs.repaired[1]) == ([2, 3], [(2, 2)])


def test_rows_of_shards_are_told_by_the_shard_that_they_are_of_and_those_of_none_by_the_first():
    schema = pa.schema([("_shard", pa.string()), ("id", pa.int64()), ("n", pa.int64())])

    def side(*rows):
        columns = {name: [row[place] for row in rows] for place, name in enumerate(schema.names)}
        made = Side([])
        made._batch = pa.RecordBatch.from_pydict(columns, schema)
        return made

    def compared(shard, in_lake, *own):
        theirs = side(*in_lake)
        spans = KeySpans("id", ((None, 5), (5, None)))
        table = Table(f"{shard}.t", key=("_shard", "id"), schema=schema, spans=spans)
        options = VerifyOptions(repair=True)
        comparison = Comparison(Upstream(side(*own)), theirs, table, options, Progress())
        return asyncio.run(comparison.run()), theirs.repaired

    # What the lake's process gives for the first shard has rows of no shard, too.
    lake = [("a", 1, 1), ("gone", 1, 1), ("a", 7, None)]
    report, repaired = compared("a", lake, ("a", 1, 1), ("a", 7, 7))
    assert [(each.key, each.kind) for each in report.differences] == [
        ({"_shard": "a", "id": 7}, "differs"),
        ({"_shard": "gone", "id": 1}, "only in the lake"),
    ]
    assert (sorted(repaired[0]), repaired[1]) == (["a", "gone"], [("a", 7, 7)])
    report, repaired = compared("b", [("b", 1, 1)], ("b", 1, 1))
    assert (report.equal, repaired) == (True, None)
