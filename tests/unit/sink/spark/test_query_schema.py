import subprocess
import sys

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import ChangefeedMeta, Ddl, TableMeta
from pyspark_tidemark.query_schema import check_schema, check_truncated, segments, spark_schema
from pyspark_tidemark.stream import CUT_SCHEMA

OLD = TableMeta(
    "s.t", ("id",), pa.schema([("id", pa.int64()), ("n", pa.int32()), ("gone", pa.string())])
)
NEW = TableMeta(
    "s.t", ("id",), pa.schema([("id", pa.int64()), ("n", pa.int64()), ("more", pa.string())]), 20
)
ALTER = Ddl(20, "alter table t …", tables=("s.t",))


def described(*tables, ddls=()):
    return ChangefeedMeta(0, 100, {table.name: table for table in tables}, ddls)


def test_the_same_columns_pass():
    check_schema(described(OLD, ddls=(ALTER,)), "s.t", 10, spark_schema(OLD))


def test_other_columns_are_told_with_the_statement_and_what_to_do():
    with pytest.raises(SourceError, match="start the query again") as caught:
        check_schema(described(NEW, ddls=(ALTER,)), "s.t", 20, spark_schema(OLD))
    assert caught.value.code == "ErrSchemaChanged"
    for part in (
        "gets more string",
        "loses gone",
        "changes n from int to bigint",
        "above 20 by: alter table t",
    ):
        assert part in caught.value.message


def test_a_dropped_and_a_renamed_table_are_told():
    rename = Ddl(20, "rename table t to u", dropped=("s.t",), renamed=(("s.t", "s.u"),))
    with pytest.raises(
        SourceError, match=r"\[TM:ErrTableDropped\] table s.t ends at 20 by: rename .*it is s.u now"
    ):
        check_schema(described(ddls=(rename,)), "s.t", 20, spark_schema(OLD))


def test_a_truncated_table_is_told():
    truncate = described(OLD, ddls=(Ddl(20, "truncate table t", truncated=("s.t",)),))
    check_truncated(truncate, "s.t", 10)
    with pytest.raises(SourceError, match=r"\[TM:ErrTableTruncated\]"):
        check_truncated(truncate, "s.t", 20)


def test_a_range_is_cut_at_each_schema_change_within():
    ddls = [Ddl(ts, "") for ts in (10, 20, 30, 40)]

    def describe(ts):
        return described(ddls=tuple(ddl for ddl in ddls if ddl.ts >= ts))

    assert [part[:2] for part in segments(describe, 10, 30)] == [(10, 20), (20, 30)]
    assert [part[:2] for part in segments(describe, 5, 45)] == [
        (5, 10),
        (10, 20),
        (20, 30),
        (30, 40),
        (40, 45),
    ]
    assert [part[:2] for part in segments(describe, 50, 60)] == [(50, 60)]


def test_spark_learns_of_cuts_without_arrow():
    # It does so in two Python processes of each query, half of whose CPU Arrow would be.
    code = (
        "import sys; from pyspark_tidemark import DefaultSource; "
        "options = {'endpoint': 'grpc://nowhere:1', 'changefeed': 'c', 'cuts': 'true'}; "
        "print(DefaultSource(options).schema().json()); "
        "print(sorted({'pyarrow', 'numpy', 'pandas'} & set(sys.modules)))"
    )
    path = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=path, capture_output=True, text=True, check=True)
    schema, loaded = done.stdout.splitlines()
    assert schema == from_arrow_schema(CUT_SCHEMA).json()
    assert loaded == "[]"
