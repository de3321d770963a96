"""Snapshot reads over random histories: point reads and scans agree with the history,
locks stop exactly their keys.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.codec import encode_bytes
from storage.model.ts import MAX_TS
from storage.mvcc.errors import KeyIsLockedError
from storage.mvcc.snapshot import Row, Snapshot, scan_locks
from tests.unit.storage.mvcc.histories import KEYS, TXNS, History, played

BOUNDS = st.none() | KEYS


def expected(
    history: History, ts: int, bypass: frozenset[int] = frozenset()
) -> dict[bytes, bytes | str]:
    rows: dict[bytes, bytes | str] = {}
    for key in {*history.versions, *history.open}:
        start_ts = history.open.get(key, (MAX_TS,))[0]
        if start_ts <= ts and start_ts not in bypass:
            rows[key] = "locked"
        elif (value := history.value(key, ts)) is not None:
            rows[key] = value
    return rows


def shown(row: Row) -> tuple[bytes, bytes | str]:
    return row.key, "locked" if row.error else row.value


@given(TXNS.map(played), st.integers(0, 160), st.sets(st.integers(1, 14).map(lambda n: n * 10)))
def test_get_sees_what_was_committed_and_stops_at_open_locks(
    history: History, ts: int, resolved: set[int]
) -> None:
    bypass = frozenset(resolved)
    snapshot = Snapshot(history.engine.kv, ts, resolved=bypass)
    rows = expected(history, ts, bypass)
    for key in [b"", b"a", b"ab", b"abcdefgh", b"abcdefghi", b"b"]:
        if rows.get(key) == "locked":
            with pytest.raises(KeyIsLockedError):
                snapshot.get(key)
        else:
            assert snapshot.get(key) == rows.get(key)


@given(
    TXNS.map(played),
    st.integers(0, 160),
    BOUNDS,
    BOUNDS,
    st.integers(0, 8),
    st.booleans(),
    st.booleans(),
)
def test_scan_gives_what_get_gives_in_order(
    history: History,
    ts: int,
    lower: bytes | None,
    upper: bytes | None,
    limit: int,
    reverse: bool,
    key_only: bool,
) -> None:
    low = b"" if lower is None else encode_bytes(lower)
    high = b"" if upper is None else encode_bytes(upper)
    rows = Snapshot(history.engine.kv, ts).scan(
        low, high, limit, reverse=reverse, key_only=key_only
    )
    wanted = [
        (key, value if value == "locked" or not key_only else b"")
        for key, value in sorted(expected(history, ts).items(), reverse=reverse)
        if low <= encode_bytes(key) and (not high or encode_bytes(key) < high)
    ]
    assert [shown(row) for row in rows] == wanted[:limit]


@given(TXNS.map(played), st.integers(0, 160))
def test_committed_locks_are_read_through(history: History, ts: int) -> None:
    starts = frozenset(start_ts for start_ts, _ in history.open.values())
    snapshot = Snapshot(history.engine.kv, ts, committed=starts)
    for key in {*history.versions, *history.open}:
        start_ts, value = history.open.get(key, (MAX_TS, None))
        assert snapshot.get(key) == (value if start_ts <= ts else history.value(key, ts))
    scanned = {row.key: row.value for row in snapshot.scan(b"", b"", 100)}
    assert scanned == {key: snapshot.get(key) for key in scanned}


def test_scan_passes_keys_with_many_versions() -> None:
    history = played([("commit", {b"a": b"x"})] * 100 + [("commit", {b"b": b"x"})])
    assert [row.key for row in Snapshot(history.engine.kv, history.end_ts).scan(b"", b"", 10)] == [
        b"a",
        b"b",
    ]
    assert [row.key for row in Snapshot(history.engine.kv, 20).scan(b"", b"", 10)] == [b"a"]


def test_an_autocommit_point_read_passes_the_primary_lock_only() -> None:
    history = played([("open", {b"a": b"x", b"b": b"x"})])
    latest = Snapshot(history.engine.kv, MAX_TS)
    assert latest.get(b"a") is None
    with pytest.raises(KeyIsLockedError):
        latest.get(b"b")


@given(TXNS.map(played), st.integers(0, 160), st.integers(0, 5))
def test_scan_locks_finds_the_oldest_keys_first(history: History, max_ts: int, limit: int) -> None:
    found = scan_locks(history.engine.kv, b"", b"", max_ts, limit)
    wanted = [
        (key, start_ts) for key, (start_ts, _) in sorted(history.open.items()) if start_ts <= max_ts
    ]
    assert [(key, lock.start_ts) for key, lock in found] == wanted[: limit or None]
