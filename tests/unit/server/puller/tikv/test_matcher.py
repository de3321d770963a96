"""The matcher against a model region that knows every transaction."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.puller.open_transactions import OpenTransactions
from server.puller.tikv import matcher
from server.puller.tikv.changes import Changes
from server.puller.tikv.matcher import LateCommitError, Matcher, UnmatchedCommitError
from storage.model.event import DELETE, INSERT, RAW_SCHEMA, UPDATE
from storage.spill_codec import COMPRESSIONS, SpillCodec

PUT, DEL = 1, 2


@dataclass(frozen=True)
class Row:
    type: int
    start_ts: int = 0
    key: bytes = b""
    commit_ts: int = 0
    op_type: int = PUT
    value: bytes = b""
    old_value: bytes = b""
    generation: int = 0


def prewrite(start_ts, key, value=b"v", op=PUT, old=b"", generation=0):
    return Row(matcher.PREWRITE, start_ts, key, 0, op, value, old, generation)


def commit(start_ts, key, commit_ts, op=PUT):
    return Row(matcher.COMMIT, start_ts, key, commit_ts, op)


INITIALIZED = Row(matcher.INITIALIZED)


def pulled(rows, start_ts=0):
    out = Changes()
    Matcher(start_ts).apply(rows, out)
    return list(
        zip(out.commit_ts, out.start_ts, out.key, out.op, out.value, out.old_value, strict=True)
    )


def test_a_commit_takes_the_value_of_its_prewrite():
    assert pulled([INITIALIZED, prewrite(5, b"k", b"new", old=b"old"), commit(5, b"k", 9)]) == [
        (9, 5, b"k", UPDATE, b"new", b"old")
    ]


def test_a_put_without_old_value_is_an_insert_and_a_delete_has_no_value():
    rows = [
        INITIALIZED,
        prewrite(5, b"a"),
        commit(5, b"a", 9),
        prewrite(10, b"b", b"", DEL, b"o"),
        commit(10, b"b", 12, DEL),
    ]
    assert pulled(rows) == [(9, 5, b"a", INSERT, b"v", None), (12, 10, b"b", DELETE, None, b"o")]


def test_a_fake_prewrite_of_a_heartbeat_does_not_overwrite():
    rows = [
        INITIALIZED,
        prewrite(5, b"k", b"real"),
        prewrite(5, b"k", b"", old=b"?"),
        commit(5, b"k", 9),
    ]
    assert pulled(rows) == [(9, 5, b"k", INSERT, b"real", None)]


def test_a_later_flush_wins_and_an_earlier_one_does_not():
    rows = [
        INITIALIZED,
        prewrite(5, b"k", b"two", generation=2),
        prewrite(5, b"k", b"one", generation=1),
    ]
    assert pulled([*rows, commit(5, b"k", 9)]) == [(9, 5, b"k", INSERT, b"two", None)]
    rows += [prewrite(5, b"k", b"", DEL, generation=3), commit(5, b"k", 9, 0)]
    assert pulled(rows) == [(9, 5, b"k", DELETE, None, None)]


def test_an_early_commit_takes_the_last_flush_that_the_scan_brings():
    rows = [
        prewrite(5, b"k", b"one", generation=1),
        commit(5, b"k", 9),
        prewrite(5, b"k", b"two", generation=2),
    ]
    assert pulled(rows) == []
    assert pulled([*rows, INITIALIZED]) == [(9, 5, b"k", INSERT, b"two", None)]


def test_the_scans_prewrite_takes_the_place_of_a_heartbeats():
    rows = [prewrite(5, b"k", b""), prewrite(5, b"k", b"real"), INITIALIZED, commit(5, b"k", 9)]
    assert pulled(rows) == [(9, 5, b"k", INSERT, b"real", None)]


def test_the_op_of_a_commit_goes_before_its_prewrites():
    rows = [INITIALIZED, prewrite(5, b"k", b"", 0, b"o"), commit(5, b"k", 9, DEL)]
    assert pulled(rows) == [(9, 5, b"k", DELETE, None, b"o")]


def test_a_scanned_lock_behind_its_early_commit_is_no_second_change_and_leaves_nothing():
    shared, out = OpenTransactions(), Changes()
    region = Matcher(0, shared)
    region.apply([prewrite(5, b"k"), commit(5, b"k", 9)], out)
    assert out.commit_ts == [9], "a whole prewrite need not wait for the scan"
    region.apply([prewrite(5, b"k"), INITIALIZED], out)
    assert out.commit_ts == [9]
    assert (len(region), shared.used_bytes) == (0, 0)


def test_before_initialized_a_delete_waits_for_the_scan():
    rows = [prewrite(5, b"k", b"", DEL), commit(5, b"k", 9, DEL)]
    assert pulled(rows) == []
    assert pulled([*rows, INITIALIZED]) == [(9, 5, b"k", DELETE, None, None)]


def test_before_initialized_a_commit_may_come_before_its_prewrite():
    assert pulled([commit(5, b"k", 9), prewrite(5, b"k", b"x"), INITIALIZED]) == [
        (9, 5, b"k", INSERT, b"x", None)
    ]


def test_prewrites_and_early_commits_wait_until_their_transaction_has_come_out():
    region = Matcher(0)
    region.apply([prewrite(5, b"j"), commit(6, b"k", 9), commit(7, b"l", 9)], Changes())
    assert len(region) == 3
    region.apply([INITIALIZED], Changes())
    assert len(region) == 1


def test_an_early_commit_that_the_scan_brought_is_not_repeated():
    scanned = Row(matcher.COMMITTED, 5, b"k", 9, PUT, b"x")
    assert pulled([commit(5, b"k", 9), scanned, INITIALIZED]) == [(9, 5, b"k", INSERT, b"x", None)]


def test_a_delete_behind_its_fake_prewrite_keeps_its_old_value():
    rows = [
        INITIALIZED,
        prewrite(5, b"k", b"", DEL),
        prewrite(5, b"k", b"", DEL, b"o"),
        commit(5, b"k", 9, DEL),
    ]
    assert pulled(rows) == [(9, 5, b"k", DELETE, None, b"o")]
    rows[1:3] = rows[2:0:-1]
    assert pulled(rows) == [(9, 5, b"k", DELETE, None, b"o")]


def test_an_early_commit_with_only_a_fake_prewrite_was_brought_by_the_scan():
    scanned = Row(matcher.COMMITTED, 5, b"k", 9, PUT, b"x")
    assert pulled([prewrite(5, b"k", b""), commit(5, b"k", 9), scanned, INITIALIZED]) == [
        (9, 5, b"k", INSERT, b"x", None)
    ]


def test_an_early_rollback_removes_the_scanned_lock():
    region = Matcher(0)
    region.apply([Row(matcher.ROLLBACK, 5, b"k"), prewrite(5, b"k"), INITIALIZED], Changes())
    assert len(region) == 0


def test_after_initialized_a_commit_without_prewrite_is_an_error():
    with pytest.raises(UnmatchedCommitError):
        pulled([INITIALIZED, commit(5, b"k", 9)])


def test_changes_at_or_below_the_start_are_dropped():
    rows = [
        Row(matcher.COMMITTED, 5, b"k", 9, PUT, b"x"),
        INITIALIZED,
        prewrite(6, b"k"),
        commit(6, b"k", 9),
    ]
    assert pulled(rows, start_ts=9) == []


def test_a_change_at_or_below_resolved_is_an_error():
    region = Matcher(0)
    region.apply([INITIALIZED, prewrite(5, b"k")], Changes())
    assert region.resolve(9)
    region.apply([prewrite(6, b"l")], Changes())
    with pytest.raises(LateCommitError):
        region.apply([commit(6, b"l", 10), commit(5, b"k", 9)], Changes())


def test_resolved_ts_counts_only_after_initialized_and_never_goes_back():
    region = Matcher(3)
    assert not region.resolve(7)
    region.apply([INITIALIZED], Changes())
    assert region.resolve(7)
    assert not region.resolve(7)
    assert not region.resolve(6)
    assert region.resolved_ts == 7


def test_changes_become_a_batch_of_the_raw_schema():
    out = Changes()
    Matcher(0).apply([INITIALIZED, prewrite(5, b"k", b"", DEL, b"o"), commit(5, b"k", 9, DEL)], out)
    batch = out.to_batch()
    assert batch.schema == RAW_SCHEMA
    assert batch.to_pylist() == [
        {"commit_ts": 9, "start_ts": 5, "op": DELETE, "key": b"k", "value": None, "old_value": b"o"}
    ]


@st.composite
def histories(draw):
    """Transactions on disjoint moments of each key,
    as the live stream of events with the moment they happened.
    """
    ts, live, committed = 1, [], []
    state: dict[bytes, bytes] = {}
    open_txns: list[tuple[int, dict[bytes, Row]]] = []
    for _ in range(draw(st.integers(0, 12))):
        locked = {key for _, rows in open_txns for key in rows}
        free = [key for key in (b"a", b"b", b"c") if key not in locked]
        action = draw(st.sampled_from(["begin", "commit", "rollback", "heartbeat"]))
        if action == "begin" and free:
            keys = draw(st.lists(st.sampled_from(free), min_size=1, unique=True))
            rows = {}
            for key in keys:
                op = draw(st.sampled_from([PUT, DEL]))
                value = b"" if op == DEL else b"v%d" % ts
                rows[key] = prewrite(ts, key, value, op, state.get(key, b""))
            open_txns.append((ts, rows))
            live += [("lock", row) for row in rows.values()]
        elif action != "begin" and open_txns:
            at = draw(st.integers(0, len(open_txns) - 1))
            start_ts, rows = open_txns[at]
            if action == "heartbeat":
                row = next(iter(rows.values()))
                live.append(("fake", prewrite(start_ts, row.key, b"", row.op_type, row.old_value)))
            else:
                open_txns.pop(at)
                for key, row in rows.items():
                    if action == "commit":
                        live.append(("commit", commit(start_ts, key, ts, row.op_type)))
                        committed.append((ts, row))
                        state[key] = row.value
                    else:
                        live.append(("rollback", Row(matcher.ROLLBACK, start_ts, key)))
        ts += 1
    return live, committed


def scanned(live, start_ts):
    """What an incremental scan finds after the events `live`."""
    locks, found = {}, []
    for kind, row in live:
        at = (row.start_ts, row.key)
        if kind == "lock":
            locks[at] = row
        elif kind == "rollback":
            del locks[at]
        elif kind == "commit":
            data = locks.pop(at)
            if row.commit_ts > start_ts:
                found.append(
                    Row(
                        matcher.COMMITTED,
                        *at,
                        row.commit_ts,
                        data.op_type,
                        data.value,
                        data.old_value,
                    )
                )
    return found + list(locks.values())


def still_open(live):
    """The rows of transactions that have not ended after the events `live`."""
    locked = {(row.start_ts, row.key) for kind, row in live if kind == "lock"}
    return locked - {
        (row.start_ts, row.key) for kind, row in live if kind in ("commit", "rollback")
    }


def in_memory(rows):
    """The bytes of a map, counted anew."""
    return sum(rows._size(at, value) for at, value in rows.memory.items())


@pytest.mark.parametrize("limit", [1 << 30, 900, 0])
@settings(max_examples=60)
@given(history=histories(), data=st.data())
def test_whatever_the_interleaving_each_commit_after_the_start_comes_out_and_nothing_else(
    limit, history, data
):
    live, committed = history
    start_ts = data.draw(st.integers(0, 6))
    attach = data.draw(st.integers(0, len(live)))
    snapshot = data.draw(st.integers(attach, len(live)))
    scan = data.draw(st.permutations(scanned(live[:snapshot], start_ts)))
    stream = [row for _, row in live[attach:]]
    # What the scan read comes at any time before INITIALIZED, also behind what happened since.
    initialized = data.draw(st.integers(snapshot - attach, len(stream)))
    codec = SpillCodec(data.draw(st.sampled_from(COMPRESSIONS)), encrypted=data.draw(st.booleans()))
    merged = stream[:initialized]
    for row in scan:
        merged.insert(data.draw(st.integers(0, len(merged))), row)
    merged += [INITIALIZED, *stream[initialized:]]

    with (
        TemporaryDirectory() as directory,
        closing(OpenTransactions(Path(directory) / "open", limit, codec=codec)) as shared,
    ):
        region, out = Matcher(start_ts, shared), Changes()
        while merged:
            size = data.draw(st.integers(1, len(merged)))
            region.apply(merged[:size], out)
            assert shared.used_bytes == sum(map(in_memory, region._maps))
            region.spill_if_short()
            merged = merged[size:]
        assert shared.spilled == sum(rows.spilled for rows in region._maps)
        assert len(region) == len(still_open(live)), "entries of ended transactions remain"
        region.clear()
        assert (shared.spilled, shared.used_bytes, Path(directory, "open").exists()) == (
            0,
            0,
            False,
        )

    expected = {
        (
            ts,
            row.start_ts,
            row.key,
            DELETE if row.op_type == DEL else UPDATE if row.old_value else INSERT,
            None if row.op_type == DEL else row.value,
            row.old_value or None,
        )
        for ts, row in committed
        if ts > start_ts
    }
    got = set(
        zip(out.commit_ts, out.start_ts, out.key, out.op, out.value, out.old_value, strict=True)
    )
    assert got == expected


def test_one_run_of_commits_may_end_several_transactions_and_a_key_twice_in_it_is_unmatched():
    rows = [
        INITIALIZED,
        prewrite(5, b"a"),
        prewrite(6, b"a", b"", DEL, b"v"),
        commit(5, b"a", 7),
        commit(6, b"a", 9, 0),
    ]
    assert pulled(rows) == [(7, 5, b"a", INSERT, b"v", None), (9, 6, b"a", DELETE, None, b"v")]
    with pytest.raises(UnmatchedCommitError, match="the commit at 8 of the transaction 5"):
        pulled([*rows[:2], commit(5, b"a", 7), commit(5, b"a", 8)])


def test_of_a_scanned_run_only_what_is_above_the_start_comes_out():
    rows = [
        Row(matcher.COMMITTED, 5, b"a", 9, PUT, b"x"),
        Row(matcher.COMMITTED, 7, b"b", 12, DEL, b"", b"o"),
        Row(matcher.COMMITTED, 8, b"c", 13, PUT, b"y", b"o"),
    ]
    assert pulled(rows, start_ts=9) == [
        (12, 7, b"b", DELETE, None, b"o"),
        (13, 8, b"c", UPDATE, b"y", b"o"),
    ]
