"""The checksum log: rows lost, doubled or changed between `add` and `fetch` are noticed,
whatever ranges are read.
"""

import sys
from collections import Counter
from types import FrameType

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sorter import checksum_log
from sorter.checksum_log import BUCKET_SHIFT, Checksum, ChecksumLog, by_bucket
from sorter.errors import RowsLostError
from storage.model.event import raw_batch

SECOND = 1 << BUCKET_SHIFT

timestamps = st.integers(1, 4 * SECOND)
changes = st.tuples(
    timestamps,
    st.integers(0, 9),
    st.integers(1, 3),
    st.binary(max_size=20),
    st.none() | st.binary(max_size=9),
    st.none(),
)


def batch_of(rows: list[tuple]) -> pa.RecordBatch:
    return raw_batch(*(zip(*rows, strict=True) if rows else [[]] * 6))


def sums(rows: list[tuple]) -> dict[int, Checksum]:
    return by_bucket(batch_of(rows), BUCKET_SHIFT)


@given(st.lists(changes, max_size=30), st.randoms(use_true_random=False))
def test_a_checksum_knows_neither_order_nor_batches(rows: list[tuple], random) -> None:
    shuffled = random.sample(rows, len(rows))
    cut = random.randint(0, len(rows))
    parts: Counter[int] = Counter()
    total: dict[int, Checksum] = {}
    for part in (shuffled[:cut], shuffled[cut:]):
        for bucket, checksum in sums(part).items():
            total[bucket] = total.get(bucket, Checksum()) + checksum
            parts[bucket] += checksum.rows
    assert total == sums(rows)
    assert parts == Counter(row[0] >> BUCKET_SHIFT for row in rows)


@given(changes, changes, st.integers(0, 5))
def test_a_changed_row_changes_the_checksum_unless_only_its_blocks_crc_can_tell(
    row, other, field
) -> None:
    changed = (*row[:field], other[field], *row[field + 1 :])

    def seen(change: tuple) -> tuple:
        key, value, old_value = change[3:]
        return (*change[:3], key[-8:], len(key), len(value or b""), len(old_value or b""))

    assert (sums([changed]) == sums([row])) == (seen(changed) == seen(row))


@given(st.lists(changes, max_size=40), st.lists(timestamps, max_size=8), st.data())
def test_ranges_read_one_after_another_pass_and_a_lost_row_does_not(rows, cuts, data) -> None:
    log = ChecksumLog(1, 0)
    log.add(batch_of(rows))
    ends = sorted({*cuts, 5 * SECOND - 1})
    lost = data.draw(st.sampled_from(rows)) if rows and data.draw(st.booleans()) else None
    kept = [row for row in rows if row is not lost]

    def read() -> None:
        lower = 1
        for end in ends:
            log.check(lower, end, sums([row for row in kept if lower <= row[0] <= end]))
            lower = end + 1

    if lost is None:
        read()
        read()
    else:
        with pytest.raises(RowsLostError):
            read()


def test_a_range_read_again_must_be_as_before() -> None:
    first, second = (10, 9, 3, b"key-no-1", b"v", None), (20, 9, 3, b"key-no-2", b"v", None)
    log = ChecksumLog(1, 5)
    log.add(batch_of([first, second]))
    log.check(6, 15, sums([first]))
    log.check(6, 15, sums([first]))
    with pytest.raises(RowsLostError, match="commit_ts 6 to 15: 1 rows were added"):
        log.check(1, 15, {})
    log.check(16, 20, sums([second]))
    log.add(batch_of([(30, 9, 3, b"key-no-3", b"v", None)]))
    with pytest.raises(RowsLostError):
        log.check(21, SECOND - 1, {})


def test_a_bucket_entered_where_nothing_ended_cannot_be_checked() -> None:
    log = ChecksumLog(1, 0)
    log.add(batch_of([(10, 9, 3, b"k", b"v", None), (20, 9, 3, b"k", b"v", None)]))
    log.check(15, SECOND - 1, {})
    with pytest.raises(RowsLostError):
        log.check(1, SECOND - 1, {})


def test_rows_that_nobody_added_are_noticed() -> None:
    with pytest.raises(RowsLostError, match="0 rows were added"):
        ChecksumLog(1, 0).check(1, SECOND - 1, sums([(10, 9, 3, b"k", b"v", None)]))


def test_forgotten_buckets_take_no_memory() -> None:
    log = ChecksumLog(1, 0)
    log.add(batch_of([(bucket * SECOND + 1, 0, 3, b"k", None, None) for bucket in range(10)]))
    log.drop_up_to(4 * SECOND + 5)
    assert len(log) == 6
    log.drop_up_to(5 * SECOND - 1)
    assert len(log) == 5


@given(st.lists(st.integers(1, 1 << 35), min_size=1, max_size=200, unique=True), st.data())
def test_a_long_backlog_takes_bounded_memory_and_a_lost_row_is_noticed_still(seconds, data) -> None:
    log = ChecksumLog(1, 0)
    rows = [(second * SECOND, 0, 3, b"k", None, None) for second in seconds]
    for row in rows:
        log.add(batch_of([row]))
        assert len(log) <= 64
    rows.sort()
    lost = data.draw(st.none() | st.sampled_from(rows))
    end_ts = (1 << 64) - 1

    def read(upto: int) -> None:
        for lower, upper in ((1, upto), (upto + 1, end_ts)):
            kept = [row for row in rows if lower <= row[0] <= upper and row is not lost]
            log.check(lower, upper, sums(kept))

    cut = data.draw(st.sampled_from(rows))[0]
    if lost is None:
        read(cut)
        log.drop_up_to(cut)
        log.check(cut + 1, end_ts, sums([row for row in rows if row[0] > cut]))
    else:
        with pytest.raises(RowsLostError):
            read(cut)


def test_what_lies_under_a_null_does_not_count() -> None:
    clean = batch_of([(10, 9, 1, b"k", None, b"o"), (11, 9, 3, b"l", b"v", None)])
    offsets = pa.array([0, 4, 5], pa.int32()).buffers()[1]
    validity = pa.py_buffer(bytes([0b10]))
    odd = pa.Array.from_buffers(pa.binary(), 2, [validity, offsets, pa.py_buffer(b"junkv")])
    assert by_bucket(clean.set_column(4, clean.schema.field(4), odd), BUCKET_SHIFT) == by_bucket(
        clean, BUCKET_SHIFT
    )


def test_a_log_with_rows_looks_empty_at_no_step() -> None:
    """Whether a table has rows is asked without its lock."""
    book, lengths = ChecksumLog(7, 0), []
    book.add(batch_of([(1, 0, 1, b"", None, None)]))

    def look(frame: FrameType, *_: object) -> object:
        if frame.f_code.co_filename == checksum_log.__file__:
            lengths.append(len(book))
        return look

    tracing = sys.gettrace()
    sys.settrace(look)
    try:
        book.add(batch_of([(number * SECOND, 0, 1, b"", None, None) for number in range(1, 200)]))
    finally:
        sys.settrace(tracing)
    assert book.shift > BUCKET_SHIFT
    assert min(lengths) > 0
