"""Windows in which tables are read again: what cuts bring of them, and where readers empty them."""

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from sink.errors import RangeHeldError
from sink.holds import Holds
from sink.mounter import with_column_id
from sink.versions import Versions
from storage.model.span import Span

SINCE, LATER, END = 50, 60, 80
SPAN = Span(1, b"t1", b"")


def held(end_ts: int | None = END) -> Holds:
    holds = Holds()
    holds.begin(SINCE, 1)
    if end_ts is not None:
        holds.end(end_ts)
    return holds


def test_the_cut_that_reaches_the_end_brings_all_rows_and_those_before_none() -> None:
    holds = held()
    assert holds.tables(SINCE, END, [SINCE]) == {1: SINCE}
    assert holds.tables(SINCE, LATER, [SINCE, LATER]) == {1: None}
    assert holds.tables(LATER, END, [LATER]) == {1: SINCE}
    assert holds.tables(END, END + 9, []) == {}
    with pytest.raises(RangeHeldError):
        held(None).tables(SINCE, LATER, [])


def test_a_reader_at_the_end_that_the_window_had_before_a_crash_gets_what_follows_only() -> None:
    """All rows once more would double those of a changelog."""
    assert held().tables(70, END, []) == {}
    assert held().tables(70, END + 9, []) == {}


def test_what_waits_is_told_with_its_reason_until_the_end() -> None:
    holds = held(None)
    holds.begin(LATER, 2, "its values change beside the log")
    holds.error = RangeHeldError("it cannot be read")
    assert holds.waiting == {1: (SINCE, ""), 2: (LATER, "its values change beside the log")}
    holds.begin(LATER + 1, 2)
    assert holds.waiting[2] == (LATER + 1, "its values change beside the log")
    holds.end(END)
    assert (holds.waiting, holds.error) == ({}, None)


def test_windows_are_forgotten_with_the_log_and_below_the_checkpoint() -> None:
    holds = held()
    holds.drop_below(END - 1)
    assert holds.acknowledged(LATER) == SINCE
    holds.drop_below(END)
    assert holds.acknowledged(LATER) == LATER
    holds = held(None)
    holds.error = RangeHeldError("it cannot be read")
    holds.clear()
    assert (holds.open_since, holds.error) == (0, None)


def change(ts: int, mounter: Any = None) -> Any:
    tables = (SimpleNamespace(name="s.t", span=SPAN, mounter=mounter),) if mounter else ()
    return SimpleNamespace(
        commit_ts=ts, query="", tables=tables, dropped=(), truncated=() if mounter else ("s.u",)
    )


def mounted(*key: tuple[str, int]) -> Any:
    """A table of two columns, with their identities, of which some are the key."""
    columns = [
        with_column_id(pa.field(name, pa.int64()), number)
        for name, number in {"a": 1, "b": 2, **dict(key)}.items()
    ]
    return SimpleNamespace(schema=pa.schema(columns), key_columns=tuple(name for name, _ in key))


@pytest.mark.parametrize(
    ("key", "emptied"), [([("a", 1)], ()), ([("b", 2)], ("s.t",)), ([("a", 2)], ("s.t",))]
)
def test_a_table_is_emptied_at_the_last_ddl_and_where_it_gets_another_key(
    key: list[tuple[str, int]], emptied: tuple[str, ...]
) -> None:
    holds = held()
    other = SimpleNamespace(name="s.u", span=Span(2, b"t2", b""), mounter=mounted(("a", 1)))
    versions = Versions(
        10, [SimpleNamespace(name="s.t", span=SPAN, mounter=mounted(("a", 1))), other]
    )
    versions.change(change(SINCE, mounted(*key)))
    versions.change(change(LATER))
    shown = holds.shown(versions.ddls(SINCE), versions)
    assert [(ddl.ts, ddl.truncated) for ddl in shown] == [(SINCE, emptied), (LATER, ("s.u", "s.t"))]


@pytest.mark.parametrize(
    ("name", "kind", "emptied"),
    [
        ("B", pa.int64(), ()),
        ("b", pa.string(), ("s.t",)),
        ("B", pa.string(), ("s.t",)),
        ("x", pa.int32(), ("s.t",)),
    ],
)
def test_a_table_is_emptied_where_a_column_gets_another_type_and_maybe_name(
    name: str, kind: Any, emptied: tuple[str, ...]
) -> None:
    """The lake stopped for good at the first of the DDLs: no format keeps the old values."""
    now = mounted(("a", 1))
    retyped = [now.schema.field("a"), with_column_id(pa.field(name, kind), 2)]
    now.schema = pa.schema(retyped)
    other = SimpleNamespace(name="s.u", span=Span(2, b"t2", b""), mounter=mounted(("a", 1)))
    versions = Versions(
        10, [SimpleNamespace(name="s.t", span=SPAN, mounter=mounted(("a", 1))), other]
    )
    versions.change(change(SINCE, now))
    versions.change(change(LATER))
    assert held().shown(versions.ddls(SINCE), versions)[0].truncated == emptied


@pytest.mark.parametrize(("key", "emptied"), [([("a", 1)], ()), ([("b", 2)], ("s.t",))])
def test_a_table_that_ends_in_the_window_is_emptied_where_it_gets_another_key(
    key: list[tuple[str, int]], emptied: tuple[str, ...]
) -> None:
    """Its old rows could not be kept there, and a lake that is behind has to come to its end."""
    holds = held(None)
    versions = Versions(10, [SimpleNamespace(name="s.t", span=SPAN, mounter=mounted(("a", 1)))])
    versions.change(change(SINCE, mounted(*key)))
    versions.change(
        SimpleNamespace(commit_ts=LATER, query="", tables=(), dropped=("s.t",), truncated=())
    )
    holds.leave(1)
    holds.end(END)
    shown = holds.shown(versions.ddls(SINCE), versions)
    assert [(ddl.ts, ddl.truncated) for ddl in shown] == [(SINCE, emptied), (LATER, ())]
