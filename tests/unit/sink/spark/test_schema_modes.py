"""What a target's tables look like by mode."""

import re

import pyarrow as pa
import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake.format import APPEND, SCD2, UPSERT
from pyspark_tidemark.lake.schema import ENVELOPE, check_held


def table(*columns: str) -> TableMeta:
    fields = [pa.field(name, pa.int64()) for name in (*ENVELOPE, "id", *columns)]
    return TableMeta("shop.t", ("id",), pa.schema(fields))


@pytest.mark.parametrize("target", ["delta", "postgresql", "mysql"])
def test_columns_called_like_those_of_scd2_are_refused_in_that_mode_only(target: str) -> None:
    clashing = table("Is_Current", "valid_to_ts", "valid_to")
    for mode in UPSERT, APPEND:
        check_held(clashing, mode, target)
    with pytest.raises(
        SourceError, match=r"shop\.t has Is_Current, valid_to_ts\. .*--columns"
    ) as refused:
        check_held(clashing, SCD2, target)
    assert re.search(
        r"'shop\.t=\*,Is_Current->upstream_Is_Current,valid_to_ts->\w+'", refused.value.message
    )
    check_held(table("valid_to"), SCD2, target)
