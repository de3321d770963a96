"""A table at a cut is a later look at it, without the keys that changed in between,
and what these were before.
"""

from types import MappingProxyType

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.verify.before_images import BeforeImages, ChangedKeys
from server.verify.errors import VerifyHistoryError
from storage.model.event import DELETE, INSERT, RAW_SCHEMA, UPDATE
from storage.model.span import Span

SPAN, OTHER = Span(7, b"", b""), Span(8, b"", b"")
KEYS = st.integers(0, 5)
STEPS = st.lists(st.tuples(KEYS, st.none() | st.integers(0, 99)), max_size=30)
"""A key and its new value, None to delete it; each is a transaction of its own."""


def changes(steps):
    """RAW_SCHEMA batches at commit_ts 1, 2, …; and what the table is after each of them."""
    held, batches, states = {}, [], [MappingProxyType({})]
    for ts, (key, value) in enumerate(steps, 1):
        old = held.pop(key, None)
        if value is not None:
            held[key] = str(value).encode()
        if old is not None or value is not None:
            op = DELETE if value is None else INSERT if old is None else UPDATE
            row = [[ts], [ts - 1], [op], [str(key).encode()], [held.get(key)], [old]]
            batches.append(
                pa.RecordBatch.from_arrays(
                    list(map(pa.array, row, RAW_SCHEMA.types)), schema=RAW_SCHEMA
                )
            )
        states.append(MappingProxyType(dict(held)))
    return batches, states


def joined(parts):
    return [pa.Table.from_batches(parts).combine_chunks().to_batches()[0]] if parts else []


@given(STEPS, st.data())
def test_any_later_look_and_the_changes_until_then_give_the_table_at_the_cut(steps, data):
    batches, states = changes(steps)
    cut = data.draw(st.integers(0, len(steps)))
    look = data.draw(st.integers(cut, len(steps)))
    before = BeforeImages({SPAN.table_id: cut})
    for batch in joined(batches) if data.draw(st.booleans()) else batches:
        before.add(SPAN, batch)
        before.add(OTHER, batch)
        if data.draw(st.booleans()):
            before._compact()
    there = pa.array([str(key).encode() for key in states[look]], pa.binary())
    changed = before.changed(SPAN.table_id).contain_each(there).to_pylist()
    seen = {
        key: value
        for (key, value), late in zip(states[look].items(), changed, strict=True)
        if not late
    }
    rows = before.rows(SPAN.table_id)
    was = {int(row["key"]): row["old_value"] for row in rows.to_pylist()}
    assert len(was) == rows.num_rows
    assert seen | was == states[cut]


@given(st.lists(st.binary(max_size=2)), st.lists(st.binary(max_size=2)))
def test_a_piece_of_keys_in_any_order_is_found_among_those_that_changed(late, piece):
    held = ChangedKeys(pa.array(late, pa.binary())).contain_each(pa.array(piece, pa.binary()))
    assert held.to_pylist() == [key in late for key in piece]


def test_changes_that_do_not_fit_into_memory_are_an_error_that_says_what_to_do():
    before = BeforeImages({SPAN.table_id: 0}, bytes_max=1 << 20)
    row = [[1], [0], [DELETE], [b"k"], [None], [bytes(40 << 20)]]
    with pytest.raises(VerifyHistoryError, match="--table"):
        before.add(
            SPAN,
            pa.RecordBatch.from_arrays(
                list(map(pa.array, row, RAW_SCHEMA.types)), schema=RAW_SCHEMA
            ),
        )
