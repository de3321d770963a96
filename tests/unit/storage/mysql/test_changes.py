"""Row events to changes: waves and single steps agree,
and whole transactions do what their statements did.
"""

import struct
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.model.errors import CorruptError
from storage.model.event import DELETE, INSERT, UPDATE
from storage.mysql.changes import Plan, read_changes, rows_left
from storage.mysql.event import Events, EventType, EventUnsupportedError
from storage.mysql.rows import RowImageError, TableMaps, TableRows, completed, find_images
from tests.unit.storage.mysql.encode import (
    LONG,
    LONGLONG,
    VARCHAR,
    Cell,
    event,
    events,
    rows,
    table_map,
)

FIXED = {LONG: 4, LONGLONG: 8}
COLUMN = st.sampled_from([(LONG, 0), (LONGLONG, 0), (VARCHAR, 20), (VARCHAR, 300)])
WRITES = st.sampled_from([EventType.WRITE_ROWS_V1, EventType.WRITE_ROWS])


def cell_of(kind: int) -> st.SearchStrategy[bytes]:
    return (
        st.binary(min_size=FIXED[kind], max_size=FIXED[kind])
        if kind in FIXED
        else st.binary(max_size=20)
    )


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[list[list[Cell]]]]:
    columns = [(LONG, 0), *draw(st.lists(COLUMN, max_size=12))]
    row = st.tuples(cell_of(LONG), *(st.none() | cell_of(kind) for kind, _ in columns[1:])).map(
        list
    )
    return columns, draw(st.lists(st.lists(row, min_size=1, max_size=5), min_size=1, max_size=5))


@given(tables(), WRITES, st.integers(1, 4))
def test_images_are_the_same_by_waves_and_one_by_one(
    table: tuple[list[tuple[int, int]], list[list[list[Cell]]]], kind: EventType, wave: int
) -> None:
    columns, groups = table
    log = events(
        [event(19, table_map(7, "t", columns))]
        + [event(kind, rows(kind, 7, columns, group)) for group in groups]
    )
    (found,) = TableMaps(mariadb=True).group(log)
    shape = Plan.of(found.table.to_table(1)).shape
    images = find_images(log, found, shape, wave_rows_min=wave)
    alone = find_images(log, found, shape, wave_rows_min=1 << 30)
    assert images.begin.tolist() == alone.begin.tolist()
    assert images.end.tolist() == alone.end.tolist()
    assert images.event.tolist() == alone.event.tolist()
    view = log.data.u8s.data
    assert [shape.cells(view, at) for at in images.begin.tolist()] == [
        row for group in groups for row in group
    ]
    cells = shape.find(log.data, images.begin, range(len(columns)))
    for place in range(len(columns)):
        taken = log.data.slices(cells[place].begin, cells[place].end, cells[place].present)
        assert taken.to_pylist() == [row[place] for group in groups for row in group]


@given(tables(), st.integers(0, 2000), st.integers(1, 255))
def test_damaged_rows_are_an_error_of_ours_or_other_rows(
    table: tuple[list[tuple[int, int]], list[list[list[Cell]]]], at: int, flip: int
) -> None:
    columns, groups = table
    kind = EventType.WRITE_ROWS_V1
    bodies = [bytearray(rows(kind, 7, columns, group)) for group in groups]
    body = bodies[0]
    body[6 + at % (len(body) - 6)] ^= flip
    log = events(
        [event(19, table_map(7, "t", columns))] + [event(kind, bytes(each)) for each in bodies]
    )
    (found,) = TableMaps(mariadb=True).group(log)
    with suppress(CorruptError, RowImageError):
        read_changes(log, found, Plan.of(found.table.to_table(1)), np.full(len(log), 9, np.uint64))


@pytest.mark.parametrize(
    ("kind", "second"), [(EventType.WRITE_ROWS_V1, 0), (EventType.UPDATE_ROWS_V1, 1)]
)
def test_images_that_lack_columns_are_refused_with_their_names(
    kind: EventType, second: int
) -> None:
    """MariaDB 11.8 leaves generated columns out of UPDATE, and does not say so."""
    columns = [(LONG, 0), (VARCHAR, 20), *[(LONG, 0)] * 7]
    image: list[Cell] = [struct.pack("<I", 1), b"x", *[struct.pack("<I", 2)] * 7]
    body = bytearray(rows(kind, 7, columns, [image] * (1 + second)))
    body[9 + 2 * second : 11 + 2 * second] = b"\xfd\xfe"
    log = events([event(19, table_map(7, "t", columns)), event(kind, bytes(body))])
    (found,) = TableMaps(mariadb=True).group(log)
    with pytest.raises(RowImageError, match="without c1, c8: SET GLOBAL"):
        find_images(log, found, Plan.of(found.table.to_table(1)).shape)


@given(tables(), st.data())
def test_columns_that_nobody_reads_may_be_lacking(
    table: tuple[list[tuple[int, int]], list[list[list[Cell]]]], data: st.DataObject
) -> None:
    columns, groups = table
    places = st.sets(st.integers(1, len(columns) - 1)) if len(columns) > 1 else st.just(set[int]())
    unread = data.draw(places)
    kinds = (EventType.WRITE_ROWS, EventType.UPDATE_ROWS_V1, EventType.DELETE_ROWS)
    whole, partial = ([event(19, table_map(7, "t", columns))] for _ in range(2))
    for group in groups:
        kind = data.draw(st.sampled_from(kinds))
        images = group * 2 if kind is EventType.UPDATE_ROWS_V1 else group
        lacking = [
            data.draw(st.sets(st.sampled_from(sorted(unread)))) if unread else set[int]()
        ] * 2
        if kind is EventType.UPDATE_ROWS_V1 and unread:
            lacking[1] = data.draw(st.sets(st.sampled_from(sorted(unread))))
        whole.append(event(kind, rows(kind, 7, columns, images)))
        partial.append(event(kind, rows(kind, 7, columns, images, lacking)))

    def read(parts: list[bytes]) -> list[dict[str, Any]]:
        log = events(parts)
        (found,) = TableMaps(mariadb=True).group(log)
        names = {each.name for place, each in enumerate(found.table.columns) if place not in unread}
        plan = Plan.of(found.table.to_table(1), read=names)
        commit_ts = np.arange(10, 10 + len(log)).astype(np.uint64)
        batch = read_changes(log, found, plan, commit_ts, commit_ts - np.uint64(2)).batch
        read_rows = []
        for row in batch.to_pylist():
            for name in ("value", "old_value"):
                if row[name] is not None:
                    padded = memoryview(row[name][1:] + bytes(16))
                    cells = plan.shape.cells(padded, 0)
                    row[name] = [cells[each] for each in range(len(columns)) if each not in unread]
            read_rows.append(row)
        return read_rows

    assert read(partial) == read(whole)


def test_a_lacking_column_without_nulls_has_some_value_and_one_that_is_read_is_named() -> None:
    columns = [(LONG, 0), (LONG, 0), (VARCHAR, 300), (LONG, 0)]
    first, last = struct.pack("<I", 1), struct.pack("<I", 2)
    kind, row = EventType.DELETE_ROWS, [first, first, b"x", last]
    # all columns are of the key, so none may be null
    described = event(19, table_map(7, "t", columns, key=(0, 1, 2, 3)))
    log = events([described, event(kind, rows(kind, 7, columns, [row], [{1, 2}]))])
    (found,) = TableMaps(mariadb=True).group(log)
    shape = Plan.of(found.table.to_table(1)).shape

    whole = completed(log, found, shape, {1, 2})

    images = find_images(whole, TableRows(found.table, np.arange(1)), shape)
    cells = shape.cells(whole.data.u8s.data, int(images.begin[0]))
    assert cells == [first, bytes(4), b"", last]
    with pytest.raises(RowImageError, match="without c2:"):
        completed(log, found, shape, {1})


COLUMNS = [(LONG, 0), (VARCHAR, 20)]


def test_rows_left_are_those_after_inserts_and_updates() -> None:
    one, two = struct.pack("<I", 1), struct.pack("<I", 2)
    groups: list[tuple[EventType, list[list[Cell]]]] = [
        (EventType.WRITE_ROWS_V1, [[one, b"a"], [two, None]]),
        (EventType.UPDATE_ROWS_V1, [[one, b"a"], [two, b"b"]]),
        (EventType.DELETE_ROWS_V1, [[two, None]]),
        (EventType.UPDATE_ROWS, [[two, b"b"], [two, b""]]),
    ]
    log = events(
        [event(19, table_map(7, "t", COLUMNS))]
        + [event(kind, rows(kind, 7, COLUMNS, group)) for kind, group in groups]
    )
    (found,) = TableMaps(mariadb=True).group(log)
    left = rows_left(log, found, Plan.of(found.table.to_table(1)))
    assert list(left) == [([one, b"a"], 1), ([two, None], 1), ([two, b"b"], 2), ([two, b""], 4)]


STEPS = st.lists(
    st.tuples(st.sampled_from("iud"), st.integers(0, 3), st.integers(0, 3)), max_size=12
)


def transaction(state: dict[int, bytes], steps: list[tuple[str, int, int]]) -> list[bytes]:
    """What statements that do `steps`, as far as they can, log; `state` becomes what they leave."""
    log = [event(19, table_map(7, "t", COLUMNS))]

    def cells(key: int) -> list[Cell]:
        return [struct.pack("<I", key), state[key]]

    for number, (step, key, other) in enumerate(steps):
        value = b"v%d" % number
        if step == "i" and key not in state:
            state[key] = value
            log.append(event(23, rows(EventType.WRITE_ROWS_V1, 7, COLUMNS, [cells(key)])))
        elif step == "d" and key in state:
            log.append(event(25, rows(EventType.DELETE_ROWS_V1, 7, COLUMNS, [cells(key)])))
            del state[key]
        elif step == "u" and key in state and (other == key or other not in state):
            before = cells(key)
            del state[key]
            state[other] = value
            log.append(
                event(24, rows(EventType.UPDATE_ROWS_V1, 7, COLUMNS, [before, cells(other)]))
            )
    return log


@given(st.lists(STEPS, max_size=4))
def test_sorted_changes_of_transactions_do_what_the_statements_did(
    transactions: list[list[tuple[str, int, int]]],
) -> None:
    state: dict[int, bytes] = {}
    parts: list[bytes] = []
    commit_ts: list[int] = []
    after: list[dict[int, bytes]] = []
    for number, steps in enumerate(transactions):
        log = transaction(state, steps)
        parts += log
        commit_ts += [number + 5] * len(log)
        after.append(dict(state))
    replica: dict[bytes, bytes] = {}
    for number, wanted in enumerate(after):
        for change in sorted(
            changes(events(parts), commit_ts),
            key=lambda row: (row["commit_ts"], row["op"], row["key"]),
        ):
            if change["commit_ts"] == number + 5:
                apply(replica, change)
        assert replica == {struct.pack("<I", key): value for key, value in wanted.items()}


def changes(log: Events, commit_ts: list[int]) -> list[dict[str, Any]]:
    found = TableMaps(mariadb=True).group(log)
    if not found:
        return []
    plan = Plan.of(found[0].table.to_table(1))
    rows: list[dict[str, Any]] = read_changes(
        log, found[0], plan, np.array(commit_ts, np.uint64)
    ).batch.to_pylist()
    return rows


@given(st.lists(STEPS, max_size=4))
def test_changes_without_a_key_come_to_the_rows_of_each_transaction(
    transactions: list[list[tuple[str, int, int]]],
) -> None:
    state: dict[int, bytes] = {}
    parts: list[bytes] = []
    commit_ts: list[int] = []
    after: list[Counter[bytes]] = []
    for number, steps in enumerate(transactions):
        log = transaction(state, steps)
        parts += log
        commit_ts += [number + 5] * len(log)
        after.append(Counter(struct.pack("<I", key) + value for key, value in state.items()))
    log = events(parts)
    groups = TableMaps(mariadb=True).group(log)
    if not groups:
        return
    plan = Plan.of(replace(groups[0].table.to_table(1), primary_key=()))
    batch = read_changes(log, groups[0], plan, np.array(commit_ts, np.uint64)).batch
    found = batch.to_pylist()
    assert [row["key"] for row in found] == sorted({row["key"] for row in found}), "log order"
    held: Counter[bytes] = Counter()
    for number, wanted in enumerate(after):
        for row in found:
            if row["commit_ts"] == number + 5:
                assert row["op"] in {INSERT, DELETE}, "nothing tells what an update has changed"
                image = row["value"] if row["op"] == INSERT else row["old_value"]
                held[image[2:6] + image[7:]] += 1 if row["op"] == INSERT else -1
        assert +held == wanted == Counter({row: count for row, count in held.items() if count})


def apply(replica: dict[bytes, bytes], change: dict[str, Any]) -> None:
    """A consumer that finds every change to be what it says it is."""
    key, value, old = change["key"], change["value"], change["old_value"]
    assert (key in replica) == (change["op"] != INSERT)
    assert (value is None) == (change["op"] == DELETE)
    if change["op"] in {UPDATE, DELETE}:
        assert old[7:] == replica[key], "behind format, bitmap, key and size"
    if value is None:
        del replica[key]
    else:
        assert value[2:6] == key
        replica[key] = value[7:]


def test_a_table_number_that_changes_its_meaning_is_followed() -> None:
    wide = [(LONG, 0), (LONG, 0)]
    log = events(
        [
            event(19, table_map(7, "a", COLUMNS)),
            event(23, rows(EventType.WRITE_ROWS_V1, 7, COLUMNS, [[b"\1\0\0\0", b"x"]])),
            event(19, table_map(7, "b", wide)),
            event(23, rows(EventType.WRITE_ROWS_V1, 7, wide, [[b"\1\0\0\0", b"\2\0\0\0"]])),
        ]
    )
    maps = TableMaps(mariadb=True)
    assert [(group.table.name, group.numbers.tolist()) for group in maps.group(log)] == [
        ("shop.a", [1]),
        ("shop.b", [3]),
    ]
    again = [(group.table.name, group.numbers.tolist()) for group in maps.group(log)]
    assert again == [("shop.a", [1]), ("shop.b", [3])]


def test_numbers_of_one_table_make_one_group_and_other_columns_another() -> None:
    """A flush in the middle of a transaction: its changes of one row are folded in order."""
    wide = [(LONG, 0), (LONG, 0)]
    log = events(
        [
            event(19, table_map(7, "a", COLUMNS)),
            event(23, rows(EventType.WRITE_ROWS_V1, 7, COLUMNS, [[b"\1\0\0\0", b"x"]])),
            event(19, table_map(8, "a", COLUMNS)),
            event(25, rows(EventType.DELETE_ROWS_V1, 8, COLUMNS, [[b"\1\0\0\0", b"x"]])),
            event(19, table_map(9, "a", wide)),
            event(23, rows(EventType.WRITE_ROWS_V1, 9, wide, [[b"\1\0\0\0", b"\2\0\0\0"]])),
        ]
    )
    groups = TableMaps(mariadb=True).group(log)
    assert [group.numbers.tolist() for group in groups] == [[1, 3], [5]]


def test_numbers_and_tables_without_end_are_forgotten_the_oldest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("storage.mysql.rows.IDS_MAX", 5)
    monkeypatch.setattr("storage.mysql.rows.SHAPES_MAX", 7)
    maps, kind = TableMaps(mariadb=True), EventType.WRITE_ROWS_V1

    def group(number: int, name: str, *, told: bool = True) -> list[str]:
        log = [event(19, table_map(number, name, COLUMNS))] * told
        log += [event(kind, rows(kind, number, COLUMNS, [[b"\1\0\0\0", b"x"]]))]
        return [found.table.name for found in maps.group(events(log))]

    for number in range(100):  # one table that is opened again and again
        assert group(number, "a") == ["shop.a"]
    assert (len(maps._tables), len(maps._parsed)) == (6, 1)
    for number in range(100):  # and as many as somebody makes
        assert group(number, f"t{number}") == [f"shop.t{number}"]
        group(0, "t0")
    assert len(maps._tables) <= 6
    assert len(maps._parsed) <= 8
    # what was told of lately goes on over the border of a take
    assert group(0, "", told=False) == ["shop.t0"]
    assert group(99, "", told=False) == ["shop.t99"]
    with pytest.raises(CorruptError, match="TABLE_MAP"):
        group(50, "", told=False)


def test_rows_of_an_unknown_table_and_partial_updates_are_refused() -> None:
    unknown = events([event(23, rows(EventType.WRITE_ROWS_V1, 7, COLUMNS, [[b"\1\0\0\0", b"x"]]))])
    with pytest.raises(CorruptError, match="TABLE_MAP"):
        TableMaps(mariadb=True).group(unknown)
    with pytest.raises(EventUnsupportedError, match="binlog_row_value_options"):
        TableMaps(mariadb=False).group(events([event(39, b"")]))
