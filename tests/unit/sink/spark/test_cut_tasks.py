"""Which task of a cut's job writes what, and what its outcomes come to."""

import dataclasses

import pyarrow as pa
import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Changefeed, SliceEndpoint, TableMeta
from pyspark_tidemark.lake import cut_tasks
from pyspark_tidemark.lake.changes import Changes
from pyspark_tidemark.lake.cut_tasks import (
    SHARE_BYTES,
    Part,
    Share,
    check_arrived,
    check_mounted,
    divided,
    packed,
)
from pyspark_tidemark.options import parse

CHANGEFEED = Changefeed(
    parse({"endpoint": "grpc://127.0.0.1:1", "changefeed": "bank", "cuts": "true"})
)
SCHEMA = pa.schema([("id", pa.int64())])


@dataclasses.dataclass(frozen=True)
class Writer:
    """A file a share."""

    is_divisible: bool = True
    fails: bool = False

    def write(self, changes):
        if self.fails:
            raise SourceError("ErrTargetUnusable", "no directory")
        return Part(len(changes.slices), 1 << 63, [part.rows for part in changes.slices])


def of(name, *sizes):
    slices = tuple(
        SliceEndpoint(name, (), b'{"start": 0}', number, size) for number, size in enumerate(sizes)
    )
    return Changes(TableMeta(name, ("id",), SCHEMA), 0, 9, slices, CHANGEFEED, {})


def test_the_slices_of_a_large_changelog_are_several_shares_and_come_once():
    changes = of("bank.log", *[SHARE_BYTES // 2] * 5)
    shares = list(divided(changes, Writer()))
    assert [len(share.changes.slices) for share in shares] == [2, 2, 1]
    assert [part for share in shares for part in share.changes.slices] == list(changes.slices)
    [whole] = divided(changes, Writer(is_divisible=False))
    assert whole.changes == changes


def test_many_small_tables_share_as_many_tasks_as_run_at_a_time():
    shares = [Share(f"bank.t{n}", of(f"bank.t{n}", 100 * n), Writer()) for n in range(500)]
    groups = packed(shares, 4)
    assert sorted(share.table for group in groups for share in group) == sorted(
        share.table for share in shares
    )
    assert len(groups) > 4, "500 tables cost more than four tasks are meant to"
    costs = [sum(share.cost for share in group) for group in groups]
    assert max(costs) < 1.1 * min(costs)
    assert len(packed(shares[:3], 4)) == 3, "no task without a table"


def test_a_large_table_does_not_keep_small_ones_waiting():
    shares = [Share("bank.large", of("bank.large", 20 << 20), Writer())]
    shares += [Share(f"bank.t{n}", of(f"bank.t{n}", 1), Writer()) for n in range(10)]
    alone, others = sorted(packed(shares, 2), key=len)
    assert [share.table for share in alone] == ["bank.large"]
    assert len(others) == 10


def test_an_error_of_a_task_names_its_table():
    with pytest.raises(SourceError, match=r"ErrTargetUnusable\] bank\.t1: no directory"):
        list(cut_tasks._written([Share("bank.t1", of("bank.t1", 1), Writer(fails=True))]))


def test_parts_of_a_table_add_up():
    joined = cut_tasks._joined([Part(2, 1 << 63, "a"), Part(3, (1 << 63) + 5, "b")])
    assert joined.counted.rows == 5
    assert joined.counted.checksum == "0000000000000005"
    assert joined.parts == ("a", "b")


def test_a_directory_that_is_not_there_for_both_is_told_by_name(tmp_path):
    check_mounted(str(tmp_path))
    with pytest.raises(SourceError, match=r"ErrTargetUnusable.*mount the lake"):
        check_mounted(str(tmp_path / "none"))
    file = tmp_path / "part"
    file.write_bytes(b"1234")
    check_arrived(file, 4)
    for path, size in ((file, 5), (tmp_path / "none", 4)):
        with pytest.raises(SourceError, match=r"ErrTargetUnusable.*does not see it"):
            check_arrived(path, size)
