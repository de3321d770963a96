"""Folding against a replay, change by change."""

from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.lake import fold as module
from pyspark_tidemark.lake.fold import fold

TYPES = {"_op": pa.string(), "b": pa.string()}
NAMES = ("_op", "_commit_ts", "_start_ts", "_seq", "a", "b", "v")
SCHEMA = pa.schema([(name, TYPES.get(name, pa.int64())) for name in NAMES])
KEY = ("a", "b")
COLUMNS = ["a", "b", "v", "_commit_ts"]

# transactions: sets of keys with a coin for "delete it if it is there"
HISTORIES = st.lists(st.dictionaries(st.integers(0, 5), st.booleans(), max_size=4), max_size=12)


def changes_of(history):
    """Valid changes: a key is inserted before it is updated or deleted, once in a transaction."""
    living, rows = set(), []
    for number, transaction in enumerate(history, 1):
        for seq, (key, delete) in enumerate(transaction.items()):
            op = "insert" if key not in living else "delete" if delete else "update"
            living = living - {key} if op == "delete" else living | {key}
            envelope = {"_op": op, "_commit_ts": number, "_start_ts": number - 1, "_seq": seq}
            rows.append(envelope | {"a": key, "b": f"k{key}", "v": 100 * number + key})
    return rows


def replayed(rows, held=()):
    state = {(row["a"], row["b"]): row for row in held}
    for row in rows:
        if row["_op"] == "delete":
            del state[row["a"], row["b"]]
        else:
            state[row["a"], row["b"]] = {name: row[name] for name in COLUMNS}
    return state


def by_key(table):
    rows = table.select(COLUMNS).to_pylist()
    assert len({(row["a"], row["b"]) for row in rows}) == len(rows)
    return {(row["a"], row["b"]): row for row in rows}


def after(held, folded):
    """A lake that holds these rows, after a cut."""
    known = {(row["a"], row["b"]) for row in folded.existing.to_pylist()}
    return {key: row for key, row in held.items() if key not in known} | by_key(folded.live)


@given(HISTORIES, st.randoms(use_true_random=False))
def test_a_fold_from_nothing_is_the_replay_whatever_the_order_of_arrival(history, chance):
    rows = changes_of(history)
    arrived = chance.sample(rows, len(rows))
    folded = fold(pa.Table.from_pylist(arrived, schema=SCHEMA), KEY)
    assert by_key(folded.live) == replayed(rows)
    assert len(folded.existing) == 0


@given(HISTORIES, st.integers(0, 12))
def test_a_lake_without_the_known_keys_and_with_the_live_rows_is_the_replay_up_to_that_cut(
    history, cut_ts
):
    rows = changes_of(history)
    before = [row for row in rows if row["_commit_ts"] <= cut_ts]
    later = [row for row in rows if row["_commit_ts"] > cut_ts]
    held = after({}, fold(pa.Table.from_pylist(before, schema=SCHEMA), KEY))
    assert held == replayed(before)
    assert after(held, fold(pa.Table.from_pylist(later, schema=SCHEMA), KEY)) == replayed(rows)


@given(HISTORIES, st.integers(0, 12))
def test_known_keys_are_exactly_those_the_lake_held_before(history, cut_ts):
    rows = changes_of(history)
    held = replayed([row for row in rows if row["_commit_ts"] <= cut_ts])
    after = [row for row in rows if row["_commit_ts"] > cut_ts]
    folded = fold(pa.Table.from_pylist(after, schema=SCHEMA), KEY)
    touched = {(row["a"], row["b"]) for row in after}
    assert {(row["a"], row["b"]) for row in folded.existing.to_pylist()} == touched & held.keys()


@given(HISTORIES, st.integers(0, 12), st.sets(st.integers(0, 5)))
def test_rows_that_a_dump_brings_again_are_there_once_whether_the_lake_had_them_or_not(
    history, cut_ts, told
):
    rows = changes_of(history)
    before = [row for row in rows if row["_commit_ts"] <= cut_ts]
    held = replayed(before)
    envelope = {"_op": "update", "_commit_ts": 99, "_start_ts": 98, "_seq": 0}
    chunk = [{**envelope, "a": key, "b": f"k{key}", "v": -key} for key in told]
    folded = fold(pa.Table.from_pylist(chunk, schema=SCHEMA), KEY)
    assert after(held, folded) == replayed(chunk, held.values())


def test_columns_may_be_called_as_a_fold_would_call_its_own():
    changes = pa.Table.from_pylist(changes_of([{1: False}, {1: False, 2: False}]), schema=SCHEMA)
    odd = changes.rename_columns([*SCHEMA.names[:4], "_row", "row", "_row_max"])
    folded = fold(odd, ("_row", "row"))
    assert (
        folded.live["_row_max"].to_pylist()
        == fold(changes, KEY).live["v"].to_pylist()
        == [201, 202]
    )


KEY_TYPES = (pa.int64(), pa.uint64(), pa.int8(), pa.string(), pa.binary(), pa.decimal128(12, 2))
EDGES = {
    pa.int64(): (-(1 << 63), (1 << 63) - 1, 0),
    pa.uint64(): (0, (1 << 64) - 1, 1 << 63),
    pa.int8(): (-128, 127, 0),
    pa.string(): ("", "a", "ab"),
    pa.binary(): (b"", b"\0", b"\0\0"),
    pa.decimal128(12, 2): (Decimal("0.00"), Decimal("-0.01"), Decimal("9999999999.99")),
}


@given(
    st.lists(st.sampled_from(KEY_TYPES), min_size=1, max_size=4),
    st.lists(st.tuples(*[st.integers(0, 2)] * 4), max_size=12),
    st.sampled_from([1, 3, 1 << 31]),
    st.integers(0, 12),
)
def test_changes_of_a_key_of_any_type_come_to_its_last_one(types, places, large, cut):
    keys = [tuple(EDGES[kind][at] for kind, at in zip(types, row, strict=False)) for row in places]
    names = [f"k{number}" for number in range(len(types))]
    parts = [[key[at] for key in keys] for at in range(len(types))]
    columns = [
        pa.chunked_array([part[:cut], part[cut:]], kind)
        for kind, part in zip(types, parts, strict=True)
    ]
    count = len(keys)
    ops = ["insert" if number % 2 else "update" for number in range(count)]
    meta = [ops, list(range(count)), list(range(count)), [0] * count]
    changes = pa.table(
        [*map(pa.array, meta, [SCHEMA.field(name).type for name in NAMES[:4]]), *columns],
        names=[*NAMES[:4], *names],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LARGE", large)
        folded = fold(changes, names)
    last = {key: number for number, key in enumerate(keys)}
    assert folded.last["_commit_ts"].to_pylist() == sorted(last.values())
    first = {key: ops[number] for number, key in reversed(list(enumerate(keys)))}
    for side, op in ((folded.existing, "update"), (folded.new, "insert")):
        there = [tuple(row.values()) for row in side.to_pylist()]
        assert there == [
            keys[number] for number in sorted(last.values()) if first[keys[number]] == op
        ]
