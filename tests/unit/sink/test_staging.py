"""Staged rows: what is said to be covered is there, whole and once;
`_seq` counts on across batches.
"""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from sink.mounts import Mounting, SequenceMount, clip, coalesce
from sink.progress import ResolvedTs
from sink.staging import Staging


def batch(timestamps: list[int], first: int = 0) -> pa.RecordBatch:
    numbers = range(first, first + len(timestamps))
    return pa.record_batch(
        {"_commit_ts": pa.array(timestamps, pa.int64()), "n": pa.array(numbers, pa.int64())}
    )


def numbers(batches) -> list[int]:
    return [n for part in batches for n in part.column("n").to_pylist()]


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=8),
    st.lists(
        st.tuples(st.sampled_from(["append", "advance", "drop"]), st.integers(0, 40)), max_size=40
    ),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_a_covered_range_is_served_exactly(steps, history, start_ts, length) -> None:
    staging, ts, batches, appended, resolved, acknowledged = Staging(1, 0), 0, [], [], 0, 0
    for gaps in steps:
        timestamps = []
        for gap in gaps:
            ts += gap
            timestamps.append(ts + 1)
        batches.append(timestamps)
    waiting = list(batches)
    accounted = 0
    for operation, number in history:
        if operation == "append" and waiting:
            staging.append(batch(waiting[0], len(appended)), 10 * len(waiting[0]))
            accounted += 10 * len(waiting[0])
            appended += waiting.pop(0)
        elif operation == "advance":
            complete = waiting[0][0] - 1 if waiting else 100
            resolved = max(resolved, min(number, complete))
            accounted -= staging.advance(ResolvedTs(resolved))
            assert accounted == 10 * sum(row > resolved for row in appended)
        elif operation == "drop":
            acknowledged = max(acknowledged, min(number, resolved))
            staging.drop_up_to(acknowledged)
    assert (staging.covered_from, staging.covered_to) == (acknowledged, resolved)
    served = staging.rows(start_ts, start_ts + length)
    if start_ts < acknowledged or start_ts + length > resolved:
        assert served is None
    else:
        assert served is not None
        wanted = [n for n, row in enumerate(appended) if start_ts < row <= start_ts + length]
        assert numbers(served) == wanted
        assert all(part.num_rows for part in served)
    assert staging.pending_bytes() == accounted


def test_a_batch_id_covers_what_is_below_its_commit_ts_only() -> None:
    staging = Staging(1, 0)
    staging.append(batch([5, 9, 9]), 30)
    assert staging.advance(ResolvedTs(9, batch_id=1)) == 30
    assert staging.covered_to == 8
    assert numbers(staging.rows(0, 8) or []) == [0]
    staging.append(batch([9], 3), 10)
    staging.advance(ResolvedTs(9))
    assert numbers(staging.rows(8, 9) or []) == [1, 2, 3]


@given(st.lists(st.integers(0, 20)).map(sorted), st.integers(-1, 21), st.integers(-1, 21))
def test_clip_keeps_the_rows_of_a_half_open_range(timestamps, start_ts, length) -> None:
    clipped = clip(batch(timestamps), start_ts, start_ts + max(length, 0))
    assert clipped.column(0).to_pylist() == [
        ts for ts in timestamps if start_ts < ts <= start_ts + max(length, 0)
    ]


@given(st.lists(st.lists(st.integers(0, 9), max_size=4)), st.integers(1, 100))
def test_coalescing_changes_the_borders_only(parts, target_bytes) -> None:
    joined = list(coalesce([batch(part) for part in parts], target_bytes))
    assert [row for part in joined for row in part.to_pylist()] == [
        row for part in parts for row in batch(part).to_pylist()
    ]
    assert all(part.nbytes >= target_bytes for part in joined[:-1])


def sequence(timestamps: list[int]) -> list[int]:
    return [timestamps[:n].count(ts) for n, ts in enumerate(timestamps)]


def mount(raw: pa.RecordBatch) -> pa.RecordBatch:
    timestamps = raw.column(0).to_pylist()
    columns = {"_commit_ts": timestamps, "_start_ts": timestamps, "_seq": sequence(timestamps)}
    return pa.record_batch({name: pa.array(values, pa.int64()) for name, values in columns.items()})


@given(st.lists(st.integers(0, 3), min_size=1).map(sorted), st.lists(st.integers(1, 4), min_size=1))
def test_seq_does_not_depend_on_the_borders_of_batches(timestamps, sizes) -> None:
    whole, sequencer, found, first = batch(timestamps), SequenceMount(Mounting(mount)), [], 0
    while first < len(timestamps):
        size = sizes[len(found) % len(sizes)]
        found += sequencer(whole.slice(first, size)).column("_seq").to_pylist()
        first += size
    assert found == sequence(timestamps)
