"""Which files are joined: few are left, none is rewritten often, masked rows go."""

import json

from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.lake import compaction
from pyspark_tidemark.lake.compaction import (
    FULL_FILE_BYTES,
    MOST_BYTES,
    affordable,
    chosen,
    too_large,
)
from pyspark_tidemark.lake.delta.files import DataFile
from pyspark_tidemark.lake.target import Health


def sizes_of(groups):
    assert len(groups) <= 1
    return [file.size for group in groups for file in group]


def file_of(size, rows=100, masked=0, *, ended=False):
    add = {"path": f"{size}", "size": size, "stats": json.dumps({"numRecords": rows})}
    return DataFile(
        add | ({"deletionVector": {"cardinality": masked}} if masked else {}), {}, rows, ended
    )


@given(st.lists(st.integers(1, FULL_FILE_BYTES - 1)))
def test_what_is_left_is_few_files_each_more_than_twice_as_large_as_all_smaller_ones(sizes):
    found = sizes_of(chosen(map(file_of, sizes)))
    left = sorted(sizes)[len(found) :] + ([sum(found)] if found else [])
    assert sorted(sizes)[: len(found)] == found, "the smallest ones are joined"
    assert len(found) != 1
    left.sort()
    assert all(size > 2 * sum(left[:at]) for at, size in enumerate(left) if at)


def test_a_table_that_grows_for_long_is_rewritten_a_few_times_only():
    sizes, rewritten = [], 0
    for _ in range(200):
        sizes += [1000] * 64
        found = sizes_of(chosen(map(file_of, sizes)))
        sizes = [*sorted(sizes)[len(found) :], sum(found)]
        rewritten += sum(found)
        assert len(sizes) <= 6
    assert rewritten < 8 * sum(sizes), "rewritten whole each time, it would be a hundred times"


def test_a_file_with_many_masked_rows_is_rewritten_alone_or_whatever_its_size():
    assert chosen([file_of(1000, masked=21)]) == [[file_of(1000, masked=21)]]
    assert chosen([file_of(1000, masked=20)]) == []
    large = file_of(10 * FULL_FILE_BYTES, masked=21)
    assert chosen([large, file_of(5)]) == [[large, file_of(5)]]
    assert too_large([[large, file_of(5)]])
    assert affordable([[large, file_of(5)]]) == [], "one file is not joined with itself"
    assert not too_large([[file_of(FULL_FILE_BYTES - 1)] * 3])


@given(st.lists(st.tuples(st.integers(1, MOST_BYTES - 1), st.booleans())))
def test_the_driver_joins_the_smallest_files_and_never_stands_still(sizes):
    files = [file_of(size, masked=21 * masked) for size, masked in sizes]
    groups = chosen(files)
    parts = affordable(groups)
    assert bool(parts) == bool(groups)
    taken = sorted(file.size for part in parts for file in part)
    assert sum(taken[:-1]) < MOST_BYTES
    assert taken == sorted(file.size for group in groups for file in group)[: len(taken)]


def test_a_table_far_beyond_what_the_driver_joins_at_a_time_keeps_few_files():
    """It stood still for 15 seconds at each compaction, once it had more than 64 MiB."""
    sizes, rewritten = [], 0
    for _ in range(400):
        sizes += [1 << 20] * 16
        for part in affordable(chosen(map(file_of, sizes))):
            rewritten += sum(file.size for file in part)
            assert sum(file.size for file in part) < 2 * MOST_BYTES
            for file in part:
                sizes.remove(file.size)
            sizes.append(sum(file.size for file in part))
    assert len(sizes) < 2 * sum(sizes) / MOST_BYTES + 16
    assert rewritten < 4 * sum(sizes)


def test_full_files_are_left_alone():
    assert chosen([file_of(FULL_FILE_BYTES)] * 3) == []


def test_files_of_ended_versions_stay_among_themselves():
    files = [file_of(size, ended=size % 2 == 0) for size in (10, 11, 12, 13)]
    assert [[file.size for file in group] for group in chosen(files)] == [[11, 13], [10, 12]]


def test_the_report_counts_files_small_ones_rows_and_masked_rows():
    files = [file_of(1000, 50, 3), file_of(compaction.SMALL_FILE_BYTES, 70, 4)]
    assert compaction.health(files) == Health(2, 1, 120, 7)
    assert compaction.health([]) == Health()
