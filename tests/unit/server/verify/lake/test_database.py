"""What a lake in a database can be asked for; its rows are read from real servers in
tests/integration/verify.
"""

import pyarrow as pa
import pytest
from pyspark_tidemark.digest import RangeChecksums, Ranges
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.cut_record import CutRecord
from pyspark_tidemark.sink_uri import SinkUri

from server.verify.lake.database_lake import DatabaseLake, current_rows
from server.verify.lake.question import Question

URI = SinkUri.parse("postgresql://u@h:1/lake")
SCHEMA = pa.schema([("id", pa.int64()), ("n", pa.int64())])
ASKED = Question("shop.t", 50, 7, ("id",), SCHEMA, Ranges(), ())


class Reader:
    """A database with one row, at a cut and with fences."""

    def __init__(
        self, cut=50, fences=(("shop.t", 40), ("shop.new", 60), ("shop.made", -1)), mode="upsert"
    ):
        self._record = CutRecord("feed", 0, cut, 0, "", (), mode).to_json() if cut else None
        self._fences = dict(fences)

    def manifest(self, changefeed):
        assert changefeed == "feed"
        return self._record, self._fences

    def quoted(self, name):
        return f"<{name}>"

    quoted_table = quoted

    def batches(self, table, query, schema):
        assert (table, query) == ("shop.t", "SELECT {columns} FROM <shop.t>")
        yield pa.RecordBatch.from_pylist([{"id": 1, "n": 2}], schema)


def lake(**given):
    return DatabaseLake(URI, "feed", Reader(**given))


def test_the_newest_cut_is_told_with_the_tables_that_are_further():
    for at in (None, 50, 70):
        found = lake().cut(at)
        assert found == {
            "cut": 50,
            "mode": "upsert",
            "beyond": {"shop.new": 60},
            "newest_only": True,
        }


@pytest.mark.parametrize(("at", "cut"), [(49, 50), (None, None)])
def test_an_older_cut_is_refused_with_the_reason(at, cut):
    with pytest.raises(
        SourceError, match=r"ErrCutNotFound.*(newest cut only, which ends at 50|no cut of feed yet)"
    ):
        lake(cut=cut).cut(at)


def test_a_table_that_has_no_cut_yet_has_no_rows():
    made = Question("shop.made", 50, 0, ("id",), SCHEMA, Ranges())
    assert lake().range_checksums(made) == RangeChecksums(Ranges()).to_bytes()
    assert lake().range_checksums(ASKED) != RangeChecksums(Ranges()).to_bytes()


@pytest.mark.parametrize(
    ("name", "mode", "reason"),
    [
        ("shop.t", "append", "not histories"),
        ("shop.new", "upsert", "not ended"),
        ("shop.none", "upsert", "anew"),
    ],
)
def test_what_cannot_be_repaired_is_refused(name, mode, reason):
    lake().check_repair(ASKED)
    with pytest.raises(SourceError, match=f"ErrRepairUnsupported.*{reason}"):
        lake(mode=mode).check_repair(Question(name, 50, 0, ("id",), SCHEMA, Ranges()))


def test_current_rows_of_a_changelog_begin_behind_what_emptied_the_table():
    assert (
        current_rows(str.upper, ASKED.name, ASKED, "append").count(
            "_commit_ts <= 50 AND _commit_ts > 7"
        )
        == 1
    )
