"""Windows: which rows of a chunk are given, and when it must be read again."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.dump.mysql.window import HIGH, LOW, Chunk, Windows
from server.dump.progress import ChunkRead
from storage.model.event import RAW_SCHEMA

KEYS = st.lists(st.binary(max_size=3), max_size=8, unique=True)
READ = ChunkRead(0, 0, None, True, 0, 0)


def chunk(keys: list[bytes], version: int = 0, table_id: int = 1) -> Chunk:
    return Chunk(table_id, version, READ, pa.array(keys, pa.binary()), pa.array(keys, pa.binary()))


@given(KEYS, st.lists(KEYS, max_size=4), st.lists(KEYS, max_size=3), st.lists(KEYS, max_size=3))
def test_rows_whose_keys_changed_between_the_watermarks_are_left_out(
    keys: list[bytes],
    inside: list[list[bytes]],
    before: list[list[bytes]],
    after: list[list[bytes]],
) -> None:
    windows = Windows()
    windows.begin("low", "high", [1])
    for changed in before:
        windows.changed(1, pa.array(changed, pa.binary()))
    assert windows.watermark("low", LOW, 5) == []
    windows.fill("high", [chunk(keys)])
    for changed in inside:
        windows.changed(1, pa.array(changed, pa.binary()))
        windows.changed(2, pa.array(keys, pa.binary()))  # of another table
    [closed] = windows.watermark("high", HIGH, 9)
    for changed in after:
        windows.changed(1, pa.array(changed, pa.binary()))
    assert closed.rows is not None
    assert closed.rows.schema == RAW_SCHEMA
    assert closed.rows["key"].to_pylist() == [
        key for key in keys if key not in {each for part in inside for each in part}
    ]
    assert set(closed.rows["commit_ts"].to_pylist()) <= {9}
    assert len(windows) == 0


@pytest.mark.parametrize(
    ("moves", "prepared", "given"),
    [
        (
            [("x", True), ("x", False)],
            {"x"},
            False,
        ),  # logged, and not yet done when the chunk was read
        ([("x", True), ("x", False)], {"y"}, True),
        ([("x", True), ("x", False)], set(), True),
        ([("x", True)], {"x"}, True),  # it waits, in the log, too
        ([("x", True), ("x", False), ("x", True)], {"x"}, True),  # the next one of that name
        ([], {"x"}, True),  # prepared before all that the log was read for
        (
            [("x", True), ("x", False), *((f"y{number}", False) for number in range(4095))],
            {"x"},
            False,
        ),
        (  # more have committed since than the server has sessions
            [("x", True), ("x", False), *((f"y{number}", False) for number in range(4096))],
            {"x"},
            True,
        ),
    ],
)
def test_a_chunk_that_may_not_show_an_xa_transaction_committed_before_low_is_read_again(
    moves: list[tuple[str, bool]], prepared: set[str], given: bool
) -> None:
    windows = Windows()
    windows.begin("low", "high", [1])
    for xid, waits in moves:
        windows.xa_moved(xid, waits=waits)
    windows.watermark("low", LOW, 5)
    windows.xa_moved("x", waits=True)
    windows.xa_moved("x", waits=False)
    windows.fill("high", [chunk([b"a"])], frozenset(prepared))
    [closed] = windows.watermark("high", HIGH, 9)
    assert (closed.rows is not None) is given


def test_a_xid_that_a_round_did_not_find_prepared_is_another_transaction_s_later() -> None:
    windows = Windows()

    def given(prepared: set[str], *, between: tuple[tuple[str, bool], ...] = ()) -> bool:
        windows.begin("low", "high", [1])
        windows.watermark("low", LOW, 5)
        for xid, waits in between:
            windows.xa_moved(xid, waits=waits)
        windows.fill("high", [chunk([b"a"])], frozenset(prepared))
        [closed] = windows.watermark("high", HIGH, 9)
        return closed.rows is not None

    windows.xa_moved("x", waits=False)
    assert not given({"x"})
    assert windows.xa_unfinished == {"x"}
    # The one of the log has ended, but another with its xid was committed meanwhile.
    assert given({"y"}, between=(("x", True), ("x", False)))
    assert not windows.xa_unfinished
    assert not given({"x"})
    assert given({"y"})
    assert given({"x"}), "prepared by a transaction of which the log has nothing"


@pytest.mark.parametrize("late", ["before low", "between", "another table"])
def test_a_table_that_changed_is_read_again(late: str) -> None:
    windows = Windows()
    version = windows.version(1)
    windows.begin("low", "high", [1])
    if late == "before low":
        windows.table_changed(1)
    windows.watermark("low", LOW, 5)
    windows.fill("high", [chunk([b"a"], version)])
    if late != "before low":
        windows.table_changed(1 if late == "between" else 2)
    [closed] = windows.watermark("high", HIGH, 9)
    assert (closed.rows is None) == (late != "another table")


def test_watermarks_of_others_and_rounds_given_up_change_nothing() -> None:
    windows = Windows()
    windows.begin("low", "high", [1])
    assert windows.watermark("foreign", LOW, 1) == []
    assert windows.watermark("foreign", HIGH, 2) == []
    windows.fill("high", [chunk([b"a"])])
    windows.give_up("high")
    assert windows.watermark("high", HIGH, 3) == []


def test_a_high_watermark_without_its_low_one_gives_nothing() -> None:
    windows = Windows()
    windows.begin("low", "high", [1])
    windows.fill("high", [chunk([b"a"])])
    assert windows.watermark("low", HIGH, 3) == []
    assert windows.watermark("high", LOW, 3) == []
    assert windows.watermark("high", 3, 3) == []  # of no kind that this version writes
    [closed] = windows.watermark("high", HIGH, 4)
    assert closed.rows is None


def test_a_round_whose_high_watermark_never_came_is_read_again_with_the_next() -> None:
    windows = Windows()
    for name in ("1", "2"):
        windows.begin(f"low {name}", f"high {name}", [1])
        windows.watermark(f"low {name}", LOW, 1)
        windows.fill(f"high {name}", [chunk([name.encode()])])
    first, second = windows.watermark("high 2", HIGH, 4)
    assert first.rows is None
    assert second.rows is not None
    assert second.rows["key"].to_pylist() == [b"2"]


def test_a_window_with_too_many_keys_is_read_again_and_holds_none_of_them() -> None:
    windows = Windows(changed_bytes_max=1000)
    windows.begin("low", "high", [1])
    windows.watermark("low", LOW, 1)
    windows.fill("high", [chunk([b"a"])])
    for number in range(200):
        windows.changed(1, pa.array([b"%04d" % number], pa.binary()))
    assert [each.changed for each in windows._rounds] == [{}]
    [closed] = windows.watermark("high", HIGH, 2)
    assert closed.rows is None


def test_keys_of_tables_that_a_round_does_not_read_are_not_held() -> None:
    windows = Windows(changed_bytes_max=1000)
    windows.begin("low", "high", [1])
    windows.watermark("low", LOW, 1)
    windows.fill("high", [chunk([b"a"])])
    windows.changed(2, pa.array([b"x" * 2000], pa.binary()))
    [closed] = windows.watermark("high", HIGH, 2)
    assert closed.rows is not None
