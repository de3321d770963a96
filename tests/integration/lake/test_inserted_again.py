"""Inserts of keys that a table has already: replaced, counted in the manifest and told,
in every way of writing.
"""

import json
from dataclasses import dataclass

import pytest
from pyspark_tidemark.lake import changes
from pyspark_tidemark.lake.delta import modes
from pyspark_tidemark.lake.reading import as_of_cut

from tests.integration.lake import test_delta_modes, test_iceberg
from tests.integration.spark.upstream import Upstream

pytestmark = pytest.mark.timeout(400)
CUTS = (300, 600, 610, 1000)


@dataclass(frozen=True)
class Way:
    """Which table format and mode, and who writes."""

    target: str
    mode: str = "upsert"
    by_tasks: bool = False

    def __str__(self):
        return f"{self.target} {self.mode} {'by tasks' if self.by_tasks else 'by the driver'}"


WAYS = [
    Way("delta"),
    Way("delta", by_tasks=True),
    Way("delta", "scd2"),
    Way("delta", "scd2", by_tasks=True),
]
WAYS += [Way("iceberg"), Way("iceberg", by_tasks=True)]


@pytest.fixture
def upstream():
    """Every third update comes as an insert, as if a delete of its key had been lost on the way."""
    upstream = Upstream(20261122, transactions=100)
    for table in upstream.tables.values():
        updates = [row for row in table.rows if row["_op"] == "update"]
        for row in updates[::3]:
            row["_op"] = "insert"
    return upstream


def again(table, ends):
    """For each cut how many keys it inserts first that are there at its start."""
    found, start = {}, 0
    for end in ends:
        first = {}
        for row in table.between(start, end):
            first.setdefault(tuple(row[name] for name in table.key), row["_op"])
        before = table.state(start)
        found[end] = sum(op == "insert" and key in before for key, op in first.items())
        start = end
    return found


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_key_that_is_inserted_again_is_replaced_counted_and_told(
    spark, changefeed, captures, upstream, tmp_path, monkeypatch, caplog, way
):
    if way.by_tasks:
        for most in ("DRIVER_READ_MAX_BYTES", "ARROW_READ_MAX_BYTES"):
            monkeypatch.setattr(changes, most, -1)
        monkeypatch.setattr(modes, "MOST_SEARCHED_BYTES", -1)
    ends = CUTS[:2] if way.by_tasks else CUTS
    if way.target == "delta":
        test_delta_modes.keep(spark, changefeed, captures, tmp_path, way.mode, ends[:2])
        test_delta_modes.keep(
            spark, changefeed, captures, tmp_path, way.mode, ends[2:]
        )  # the job starts again
    else:
        test_iceberg.keep(spark, changefeed, captures, tmp_path, ends[:2])
        test_iceberg.keep(spark, changefeed, captures, tmp_path, ends[2:])
    shown = as_of_cut(spark, f"{way.target}://{tmp_path}")
    for name, table in upstream.tables.items():
        rows = [row.asDict() for row in shown[name].collect()]
        current = [row for row in rows if way.mode == "upsert" or row["is_current"]]
        held = table.state(ends[-1])
        keys = [tuple(row[column] for column in table.key) for row in current]
        assert sorted(keys) == sorted(held), "each key once"
        written = "_commit_ts" if way.mode == "upsert" else "valid_from_ts"
        assert {key: row[written] for key, row in zip(keys, current, strict=True)} == {
            key: row["_commit_ts"] for key, row in held.items()
        }
    if way.mode == "scd2" and way.by_tasks:
        return  # a MERGE that ends versions does not tell which were inserted
    for name, table in upstream.tables.items():
        expected = {end: count for end, count in again(table, ends).items() if count}
        assert expected, "the history has such inserts"
        assert counted(tmp_path, name) == expected
        assert sum(
            name in record.message and "were in the table already" in record.message
            for record in caplog.records
        ) == len(expected)


def counted(root, name):
    lines = [
        line
        for path in (root / "_tidemark_cuts").glob("*.json")
        for line in path.read_text().splitlines()
    ]
    cuts = [json.loads(line) for line in lines]
    tables = [
        (cut["end_ts"], table) for cut in cuts for table in cut["tables"] if table["table"] == name
    ]
    return {end_ts: table["replaced"] for end_ts, table in tables if "replaced" in table}
