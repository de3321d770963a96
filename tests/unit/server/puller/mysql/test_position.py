"""How transactions get their commit_ts, and the saved positions it goes on from."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.puller.mysql.log.position import STEP, LogPosition, SavedPosition, commit_timestamps
from server.puller.mysql.log.saved_positions import spare_positions
from storage.model.errors import CorruptError
from storage.model.ts import compose, physical_ms
from storage.mysql.control import MariaGtid

TIMES = st.lists(
    st.one_of(
        st.integers(0, 5),
        st.integers(1_700_000_000_000, 1_700_000_010_000),
        st.just(1000 * 0xFFFFFFFF),
    )
)


def one_by_one(previous_ts: int, times: list[int]) -> list[int]:
    found = []
    for physical in times:
        previous_ts = max(previous_ts + STEP, compose(physical))
        found.append(previous_ts)
    return found


@given(st.integers(0, compose(1_700_000_005_000)), TIMES)
def test_commit_ts_is_that_of_one_transaction_after_the_other(
    previous_ts: int, times: list[int]
) -> None:
    assert commit_timestamps(previous_ts, np.array(times, np.int64)).tolist() == one_by_one(
        previous_ts, times
    )


@given(st.integers(0, compose(1_700_000_005_000)), TIMES, st.integers(0, 20))
def test_any_transaction_is_an_anchor_that_the_rest_goes_on_from(
    start_ts: int, times: list[int], cut: int
) -> None:
    whole = commit_timestamps(start_ts, np.array(times, np.int64)).tolist()
    first = commit_timestamps(start_ts, np.array(times[:cut], np.int64)).tolist()
    rest = commit_timestamps(
        first[-1] if first else start_ts, np.array(times[cut:], np.int64)
    ).tolist()
    assert first + rest == whole


@given(TIMES)
def test_the_ts_before_each_commit_is_free_for_a_schema_change(times: list[int]) -> None:
    stamps = commit_timestamps(0, np.array(times, np.int64)).tolist()
    assert not {ts - 1 for ts in stamps} & set(stamps)


def test_a_position_keeps_its_last_gtid_of_each_domain() -> None:
    position = LogPosition(SavedPosition(7, "0-1-41,2-1-5", "binlog.000001", 4))
    position.passed(MariaGtid(seq=42, domain=0, server=3, flags=0), 9, 1234)
    assert position.snapshot == SavedPosition(9, "0-3-42,2-1-5", "binlog.000001", 1234)


def test_an_anchor_is_read_as_it_was_written_and_nothing_else_is() -> None:
    saved_position = SavedPosition(9, "0-3-42", "binlog.000002", 1234, 7, 8)
    assert saved_position.to_json() == (
        b'{"ts":9,"gtids":"0-3-42","file":"binlog.000002","position":1234,"file_began_s":7,'
        b'"last_s":8}'
    )
    assert SavedPosition.from_json(saved_position.to_json()) == saved_position
    earlier = b'{"ts":9,"gtids":"0-3-42","file":"binlog.000002","position":1234}'
    assert SavedPosition.from_json(earlier) == SavedPosition(9, "0-3-42", "binlog.000002", 1234)
    of_later_version = json.dumps({**json.loads(saved_position.to_json()), "later": 1})
    assert SavedPosition.from_json(of_later_version.encode()) == saved_position
    for damaged in (b"", b"[]", b'{"ts": 1}', b'{"other": 1}'):
        with pytest.raises(CorruptError):
            SavedPosition.from_json(damaged)


@given(st.lists(st.integers(1, 3_000_000), min_size=1, max_size=60), st.integers(0, 10_000_000))
def test_anchors_lie_no_further_apart_than_a_share_of_their_age(
    gaps: list[int], since_ms: int
) -> None:
    kept = [compose(1_700_000_000_000 + ms) for ms in np.cumsum(gaps).tolist()]
    now_ms = physical_ms(kept[-1]) + since_ms
    spare = set(spare_positions(kept, now_ms))
    left = [ts for ts in kept if ts not in spare]
    assert (left[0], left[-1]) == (kept[0], kept[-1])
    for before, after in itertools.pairwise(left):
        widest = max(
            (physical_ms(b) - physical_ms(a) for a, b in itertools.pairwise(kept)), default=0
        )
        assert physical_ms(after) - physical_ms(before) <= max(
            widest, (now_ms - physical_ms(before)) // 32
        )


def test_where_a_server_begins_to_send_is_no_place_that_was_reached() -> None:
    position = LogPosition(SavedPosition(9, "0-3-42", "binlog.000002", 1234))

    position.rotated("binlog.000001", 900, logged=False)  # where its index of GTIDs leads it
    position.file_begins(50)
    position.rotated("binlog.000002", 4, logged=True)
    position.rotated("binlog.000002", 4, logged=False)
    assert place_of(position) == ("binlog.000002", 1234, 0)
    position.file_begins(60)
    assert place_of(position) == ("binlog.000002", 1234, 60)
    position.rotated("binlog.000003", 4, logged=True)
    assert place_of(position) == ("binlog.000003", 4, 0)
    position.file_begins(70)
    position.passed(MariaGtid(seq=43, domain=0, server=3, flags=0, second=75), 11, 500)
    assert position.snapshot == SavedPosition(11, "0-3-43", "binlog.000003", 500, 70, 75)


def test_in_the_log_of_another_server_no_place_was_reached() -> None:
    position = LogPosition(SavedPosition(9, "0-3-42", "binlog.000007", 1234, 60, 70))
    position.forget_place()
    position.rotated("binlog.000002", 900, logged=False)
    position.file_begins(65)
    assert position.snapshot == SavedPosition(9, "0-3-42", "binlog.000002", 4, 65, 70)
    position.rotated("binlog.000003", 4, logged=True)
    assert place_of(position) == ("binlog.000003", 4, 0)


def test_a_transaction_of_an_earlier_file_moves_the_place_to_it() -> None:
    """A server whose log is not the one that was read, which was not seen."""
    position = LogPosition(SavedPosition(9, "0-3-42", "binlog.000007", 1234, 60))
    position.rotated("binlog.000005", 4, logged=False)
    position.passed(MariaGtid(seq=43, domain=0, server=3, flags=0), 11, 500)
    assert place_of(position) == ("binlog.000005", 500, 0)


def place_of(position: LogPosition) -> tuple[str, int, int]:
    snapshot = position.snapshot
    return snapshot.file, snapshot.position, snapshot.file_began_s
