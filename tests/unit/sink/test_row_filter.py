"""Changes that readers do not get: the same rows wherever batches end, staged or read, with
before-images or without.
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sink.manager import SinkManager
from sink.mounter import SelectedMounter, WithBefore, as_deletes
from sink.mounts import Mounting, SequenceMount
from sink.row_filter import (
    CONDITIONS,
    OPERATIONS,
    Condition,
    ConditionError,
    FilteredMounter,
    RowFilter,
)
from sink.versions import Version
from sorter import Sorter, SorterSettings
from storage.model.event import DELETE, INSERT, UPDATE, raw_batch
from storage.model.span import Span
from storage.tidb.record import record_key
from tests.unit.sink.test_key_moves import MOUNTER, TABLE, row

SPAN = Span(TABLE, b"t", b"u")
CHANGES = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.sampled_from([DELETE, UPDATE, INSERT]),
        st.integers(0, 3) | st.none(),
        st.integers(0, 3),
        st.integers(0, 9),
        st.integers(0, 9) | st.none(),
    ),
    min_size=1,
    max_size=30,
)
FILTERS = st.builds(
    RowFilter,
    st.sets(st.sampled_from(sorted(OPERATIONS)), max_size=1).map(frozenset),
    st.dictionaries(
        st.sampled_from(sorted(CONDITIONS)),
        st.integers(0, 9).map(lambda most: Condition(f"b < {most}")),
        max_size=3,
    ),
)


def raw(changes: list[tuple]) -> pa.RecordBatch:
    """By commit_ts and operation, as a sorter gives them."""
    rows = [
        (
            2 * ts,
            2 * ts - 1,
            op,
            record_key(TABLE, number),
            None if op == DELETE else row(new, b),
            None if op == INSERT or (op == UPDATE and was is None) else row(old, was or 0),
        )
        for number, (ts, op, old, new, b, was) in enumerate(sorted(changes, key=lambda c: c[:2]))
    ]
    return raw_batch(*map(list, zip(*rows, strict=True)))


def kept(changes: pa.RecordBatch, row_filter: RowFilter, *, before: bool = False) -> list[dict]:
    """What is left of the whole, row by row."""
    whole = MOUNTER.split(changes)
    old = WithBefore(MOUNTER).mount(whole).column("_before").to_pylist()
    rows = []
    for each, was in zip(MOUNTER.mount(whole).to_pylist(), old, strict=True):
        values = dict.fromkeys(("insert", "update_new", "delete"), each["b"])
        values["update_old"] = was["b"] if was else None
        op = "insert" if each["_op"] == "update" and was is None else each["_op"]
        asked = [name for name in row_filter.conditions if CONDITIONS[name][0] == OPERATIONS[op]]
        limits = {name: int(row_filter.conditions[name].text.split()[-1]) for name in asked}
        if op in row_filter.operations or any(
            values[name] is not None and values[name] < limits[name] for name in asked
        ):
            continue
        rows.append(each | ({"_before": was} if before else {}))
    return rows


@given(CHANGES, FILTERS, st.data())
def test_what_is_left_does_not_depend_on_where_batches_end(
    changes: list[tuple], row_filter: RowFilter, data: st.DataObject
) -> None:
    mounter, whole = FilteredMounter(MOUNTER, row_filter), MOUNTER.split(raw(changes))
    mounting = Mounting(
        mounter.mount, WithBefore(mounter).mount, keep=mounter.kept, split_all=mounter.split
    ).checked(TABLE)
    ends = sorted({*data.draw(st.sets(st.integers(1, whole.num_rows))), whole.num_rows})
    for before in (False, True):
        mount = SequenceMount(mounting, before=before)
        parts = [
            mount(whole.slice(begin, end - begin))
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
        found = [each for part in parts for each in part.to_pylist()]
        assert found == kept(raw(changes), row_filter, before=before)


@pytest.mark.parametrize("quota", [64 << 20, 64 << 10])
def test_staged_or_read_from_disk_readers_get_the_same(tmp_path: Path, quota: int) -> None:
    row_filter = RowFilter(frozenset({"delete"}), {"insert": Condition("b < 5")})
    changes = [(ts, INSERT, None, ts % 4, ts % 10, 0) for ts in range(1, 4000)]
    changes += [(ts, DELETE, ts % 4, 0, 0, ts % 10) for ts in range(1, 4000, 7)]
    sorter = Sorter(tmp_path, SorterSettings(memory_bytes=0, shards=1, clean_interval_s=0))
    manager = SinkManager(sorter, memory_quota_bytes=quota, workers=1)
    try:
        version = Version("db.t", SPAN, FilteredMounter(MOUNTER, row_filter), 0)
        manager.follow([version], 0)
        manager.start()
        sorter.add(SPAN, raw(changes))
        sorter.resolve(SPAN, 10_000)
        expected = kept(raw(changes), row_filter)
        for _ in range(2):
            found = pa.Table.from_batches(list(manager.read(SPAN, 0, 10_000)))
            assert found.to_pylist() == expected
            manager.wait_resolved(9_999, 10.0)
    finally:
        manager.stop()
        sorter.close()


def test_conditions_are_about_columns_that_are_taken() -> None:
    row_filter = RowFilter(conditions={"insert": Condition("B = 1 OR a = 2")})
    row_filter.check(MOUNTER)
    row_filter.check(SelectedMounter(MOUNTER, ["b"], {"b": "shown"}))
    assert RowFilter.parse(row_filter.to_document()) == row_filter
    with pytest.raises(ConditionError, match="is about b, which the changefeed does not take"):
        row_filter.check(SelectedMounter(MOUNTER, ["a"]))
    with pytest.raises(ConditionError, match="there is no column 'c'"):
        RowFilter(conditions={"delete": Condition("c = 1")}).check(MOUNTER)


UPDATES = st.lists(
    st.tuples(
        st.integers(1, 30),
        st.just(UPDATE) | st.just(INSERT) | st.just(DELETE),
        st.integers(0, 1) | st.none(),
        st.integers(0, 1),
        st.integers(0, 1),
        st.integers(0, 1) | st.none(),
    ),
    min_size=1,
    max_size=20,
)


@given(UPDATES, st.sampled_from([("a",), ("b",), ("A", "b")]), st.sampled_from([None, ("b", "a")]))
def test_an_update_is_ignored_that_changes_columns_of_one_set_only(changes, first, second) -> None:
    sets = tuple(frozenset(map(str.lower, names)) for names in (first, second) if names)
    row_filter = RowFilter(only_columns=sets)
    row_filter.check(MOUNTER)
    assert RowFilter.parse(row_filter.to_document()) == row_filter
    split = MOUNTER.split(raw(changes))
    given_rows = FilteredMounter(MOUNTER, row_filter).kept(split, MOUNTER.mount(split)).to_pylist()
    whole = MOUNTER.mount(split).to_pylist()
    is_change = pc.and_(pc.equal(split["op"], UPDATE), split["old_value"].is_valid())
    before = iter(MOUNTER.mount(as_deletes(split.filter(is_change))).to_pylist())
    own = [name for name in MOUNTER.schema.names if not name.startswith("_")]
    expected = []
    for new, is_update in zip(whole, is_change.to_pylist(), strict=True):
        old = next(before) if is_update else {}
        differing = {name for name in own if new[name] != old.get(name)}
        if not (is_update and any(differing <= names for names in sets)):
            expected.append(new)
    assert given_rows == expected


def test_the_columns_of_an_update_must_be_there() -> None:
    with pytest.raises(ConditionError, match="nowhere"):
        RowFilter(only_columns=(frozenset({"b", "nowhere"}),)).check(MOUNTER)
