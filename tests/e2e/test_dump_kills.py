"""The matrix of dumps in small, and proof that its audit sees what it is there for."""

import base64
import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from tests.e2e.dump_audit import Again, Audit, Cut, Verdict
from tests.e2e.dump_writer import Entry, Row, Schema

T = "a.t"


@pytest.mark.timeout(1300)
def test_a_lake_equals_the_source_at_every_commit_ts_though_captures_are_killed_while_they_dump() -> (
    None
):
    command = [sys.executable, "-m", "tests.e2e.dump_matrix", "--runs", "5", "--seed", "9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"]
    assert [
        found[kind] for kind in ("lost", "duplicated", "backwards", "wrong", "unstable", "unequal")
    ] == [0] * 6
    assert found["runs"] == 5
    assert found["kills"] >= 2, "some steps do not come in time"
    assert found["brought"] > 5 * 2000


def row(key: int, version: int, **more: Any) -> Row:
    return {"id": key, "ver": version} | more


def cut(start: int, end: int, *changes: tuple[int, str, Row], schema: Any = None) -> Cut:
    docs = [{"_op": op, "_commit_ts": ts, **values} for ts, op, values in changes]
    return Cut(start, end, {T: pa.Table.from_pylist(docs)} if docs else {}, {T: ("id",)}, schema)


BASE = {T: {(1,): row(1, 0), (2,): row(2, 0)}}
HISTORY = [
    (20, Entry(1, {(T, (1,)): row(1, 1)})),
    (30, Entry(2, {(T, (3,)): row(3, 2)})),
    (40, Entry(3, {(T, (1,)): None})),
]
END = {T: {(2,): row(2, 0), (3,): row(3, 2)}}
GOOD = (
    cut(10, 25, (20, "update", row(1, 1)), (25, "insert", row(2, 0))),
    cut(25, 45, (30, "insert", row(3, 2)), (40, "delete", row(1, 1))),
)


def verdict(*cuts: Cut, again: tuple[Again, ...] = ()) -> Verdict:
    audit = Audit(BASE, HISTORY, 10)
    for each in cuts:
        audit.follow(each)
    for twice in again:
        audit.reread(twice)
    return audit.end(END)


def test_the_audit_passes_what_is_right() -> None:
    found = verdict(*GOOD)
    assert found.counts == Counter()
    assert (found.rows, found.brought) == (4, 1)


@pytest.mark.parametrize(
    ("kinds", "cuts"),
    [
        ({"lost"}, [cut(10, 25, (20, "update", row(1, 1))), GOOD[1]]),  # no dump has brought it
        ({"lost"}, [GOOD[0], cut(25, 45, (30, "insert", row(3, 2)))]),  # not the delete
        (
            {"duplicated"},
            [cut(10, 25, *[(20, "update", row(1, 1))] * 2, (25, "insert", row(2, 0))), GOOD[1]],
        ),
        (
            {"wrong", "backwards"},
            [GOOD[0], cut(25, 45, (35, "insert", row(1, 0)), (30, "insert", row(3, 2)))],
        ),
        (
            {"wrong"},
            [cut(10, 25, (20, "update", row(1, 1)), (15, "insert", row(3, 2))), GOOD[1]],
        ),  # too early
        (
            {"wrong"},
            [cut(10, 25, (20, "update", row(1, 1)), (26, "insert", row(2, 0))), GOOD[1]],
        ),  # behind its cut
    ],
)
def test_the_audit_sees_what_is_wrong(kinds: set[str], cuts: list[Cut]) -> None:
    assert set(verdict(*cuts).counts) >= kinds


def test_a_deleted_row_that_a_chunk_brings_again_is_wrong_and_at_the_end_too_much() -> None:
    found = verdict(*GOOD, cut(45, 50, (46, "insert", row(1, 1))))
    assert set(found.counts) == {"wrong", "unequal"}


def test_a_range_is_the_same_when_it_is_read_again_but_for_chunks_of_a_killed_capture() -> None:
    whole, logged = GOOD[0].tables[T], cut(10, 25, (20, "update", row(1, 1))).tables[T]
    assert not verdict(*GOOD, again=(Again(T, ("id",), whole, whole, other_capture=False),)).counts
    assert not verdict(*GOOD, again=(Again(T, ("id",), whole, logged, other_capture=True),)).counts
    assert (
        verdict(*GOOD, again=(Again(T, ("id",), whole, logged, other_capture=False),)).counts[
            "unstable"
        ]
        == 1
    )
    assert (
        verdict(*GOOD, again=(Again(T, ("id",), logged, whole, other_capture=True),)).counts[
            "unstable"
        ]
        == 1
    )
    less = whole.slice(1)
    assert (
        verdict(*GOOD, again=(Again(T, ("id",), whole, less, other_capture=True),)).counts[
            "unstable"
        ]
        == 1
    )


def test_tables_change_at_the_commit_ts_of_their_ddl() -> None:
    history = [
        (20, Entry(1, schema=Schema(T, "add", "c", 7))),
        (30, Entry(2, schema=Schema(T, "truncate"))),
    ]
    schema = pa.schema(
        [pa.field("id", pa.int64()), pa.field("ver", pa.int64()), pa.field("c", pa.int64())]
    )
    schema = schema.set(2, schema.field(2).with_metadata({"tidemark.default": "7"}))
    described = {
        "ddls": [{"dropped": [], "truncated": [], "tables": [T]}],
        "tables": [{"table": T, "schema": pa_base64(schema)}],
    }
    audit = Audit(BASE, history, 10)
    audit.follow(cut(10, 20, (15, "insert", row(1, 0)), schema=described))
    assert audit.lake == {T: {(1,): row(1, 0, c=7)}}
    audit.follow(
        cut(
            20,
            30,
            (25, "insert", row(2, 0, c=7)),
            schema={"ddls": [{"dropped": [], "truncated": [T], "tables": []}], "tables": []},
        )
    )
    assert not audit.end({T: {}}).counts


def pa_base64(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()
