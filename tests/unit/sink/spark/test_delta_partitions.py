"""Values of partitions as Delta's log and directories write them: what is written is read back, or
refused before it would be another value. `tests/integration/lake/test_readers.py` asks engines.
"""

import json
import os
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.delta import files
from pyspark_tidemark.lake.delta.evolution import evolved
from pyspark_tidemark.lake.delta.files import Layout, NewFiles, pieces, without, written
from pyspark_tidemark.lake.delta.log import Listing, commit_on_disk, replayed
from pyspark_tidemark.lake.delta.partitions import (
    NULL_TEXTS,
    check_columns,
    decoded,
    directory,
    in_log,
    split,
)
from pyspark_tidemark.lake.delta.protocol import creation
from pyspark_tidemark.lake.keys import ColumnCache
from pyspark_tidemark.lake.partitioning import parse_fields
from pyspark_tidemark.lake.schema import SchemaChange
from pyspark_tidemark.sink_uri import SinkUri

INTEGERS = {kind: kind.bit_width for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())}
VALUES = {
    **{
        kind: st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        for kind, bits in INTEGERS.items()
    },
    pa.string(): st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
    pa.date32(): st.dates(),
    pa.timestamp("us"): st.datetimes(),
    pa.timestamp("us", "UTC"): st.datetimes(timezones=st.just(UTC)),
    pa.decimal128(9, 2): st.decimals(-9999999, 9999999, places=2),
    pa.decimal128(38, 10): st.decimals(-(10**27), 10**27, places=10),
    pa.bool_(): st.booleans(),
}
COLUMNS = st.sampled_from(list(VALUES)).flatmap(
    lambda kind: st.tuples(
        st.just(kind), st.lists(st.none() | VALUES[kind], min_size=1, max_size=6)
    )
)
SCHEMA = pa.schema([("id", pa.int64()), ("p", pa.string()), ("_commit_ts", pa.int64())])


@given(COLUMNS)
def test_each_row_is_under_its_own_value_and_comes_back_from_its_text(column):
    kind, values = column
    rows = pa.table({"p": pa.array(values, kind), "n": range(len(values))})
    found = {}
    for texts, part in split(rows, {"p": "col-p"}):
        text = json.loads(json.dumps(texts))["col-p"]
        value = decoded(text, kind)
        assert value.type == kind
        assert part["p"].to_pylist() == [value.as_py()] * len(part)
        assert (text is None) == (value.as_py() is None)
        assert part["n"].to_pylist() == sorted(part["n"].to_pylist())
        assert set(part["n"].to_pylist()).isdisjoint(found)
        found |= dict.fromkeys(part["n"].to_pylist(), value.as_py())
    assert [found[number] for number in range(len(values))] == values


@given(st.dictionaries(VALUES[pa.string()], st.none() | VALUES[pa.string()], min_size=1))
def test_directories_are_names_of_one_place_each_and_uris_lead_to_them(values):
    place = directory(values)
    names = place.removesuffix("/").split("/")
    assert len(names) == len(values)
    for name, (column, text) in zip(names, values.items(), strict=True):
        assert name.count("=") == 1
        assert not any(ord(letter) < 32 for letter in name)
        left, right = map(unquote, name.split("="))
        assert (left, right) == (column, text or "__HIVE_DEFAULT_PARTITION__")
    assert unquote(in_log(place)) == place


@pytest.mark.parametrize("text", NULL_TEXTS)
def test_a_text_that_would_be_read_as_a_null_is_refused(text):
    rows = pa.table({"p": ["x", text, None]})
    with pytest.raises(SourceError, match=r"ErrPartitionUnsupported.*in p,") as refused:
        list(split(rows, {"p": "p"}))
    assert not refused.value.retryable


def test_a_text_that_no_directory_can_have_is_refused_without_being_shown():
    assert list(split(pa.table({"p": ["x" * 253]}), {"p": "p"}))
    with pytest.raises(SourceError, match="ErrPartitionUnsupported") as refused:
        list(split(pa.table({"p": ["%" * 100]}), {"p": "p"}))
    assert "%%" not in refused.value.message


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("", pa.string(), None),
        ("2024-02-29 01:02:03", pa.timestamp("us", "UTC"), datetime(2024, 2, 29, 1, 2, 3)),  # noqa: DTZ001
        ("2024-02-29 01:02:03.5", pa.timestamp("us"), datetime(2024, 2, 29, 1, 2, 3, 500_000)),  # noqa: DTZ001
        ("1E-10", pa.decimal128(38, 10), Decimal("1E-10")),
        ("1.2", pa.decimal128(9, 2), Decimal("1.20")),
        ("0001-01-01", pa.date32(), date(1, 1, 1)),
        ("-7", pa.int64(), -7),
    ],
)
def test_values_that_other_engines_have_written_are_read(text, kind, value):
    found = decoded(text, kind).as_py()
    assert (found.replace(tzinfo=None) if isinstance(found, datetime) else found) == value


def test_columns_that_partition_no_delta_table_are_refused_by_name():
    schema = pa.schema([("id", pa.int64()), ("f", pa.float64()), ("code", pa.binary())])
    for text in ("f", "code", "no"):
        with pytest.raises(SourceError, match=rf"ErrPartitionUnsupported.*shop\.t.*{text}"):
            check_columns("shop.t", parse_fields(text), schema)
    with pytest.raises(SourceError, match=r"ErrPartitionUnsupported.*must be left"):
        check_columns("shop.t", parse_fields("id"), schema.remove(1).remove(1))
    check_columns("shop.t", parse_fields("id"), schema)


def test_a_delta_uri_takes_columns_and_refuses_transforms():
    uri = SinkUri.parse("delta:///lake?partition-by=shop.*=region,`a b`")
    assert uri.partitions(uri.settings["partition-by"]).of("shop.t")
    with pytest.raises(SourceError, match="columns as they are for a delta target"):
        SinkUri.parse("delta:///lake?partition-by=shop.*=days(at)")


@pytest.fixture
def table(tmp_path):
    """A table of one version, in the log, too."""
    return made(tmp_path, ["p"])


def made(root, partitions, rows=((1, "a/b=c %20", 1), (2, "日本", 1), (3, None, 1))):
    (root / "_delta_log").mkdir()
    nothing = Listing.before_the_first(str(root))
    actions = creation(
        SCHEMA, {"id": 1, "p": 2}, {"delta.enableDeletionVectors": "true"}, partitions
    )
    names = SCHEMA.names
    table = pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows], SCHEMA)
    return put(nothing, [*actions, *written(nothing.after(actions).layout, table)])


def put(known, actions):
    assert commit_on_disk(known.layout.root, known.version + 1, actions)
    return known.after(json.loads(json.dumps(actions)))


def shown(known):
    return sorted(
        (
            tuple(row.values())
            for file in known.files.values()
            for piece in pieces(known.layout, file.add, [])
            for row in piece.to_pylist()
        ),
        key=repr,
    )


def test_a_log_that_is_read_again_shows_the_partitions_that_were_written(table):
    again = replayed(table.layout.root)
    assert again.layout == table.layout
    assert again.layout.partitions == ("p",)
    assert shown(again) == shown(table) == [(1, "a/b=c %20", 1), (2, "日本", 1), (3, None, 1)]
    assert [file.bounds.get("p") for file in again.files.values()] == [
        ("a/b=c %20", "a/b=c %20"),
        ("日本", "日本"),
        None,
    ]


def test_files_and_the_directories_that_are_new_are_durable_before_the_version(
    tmp_path, monkeypatch
):
    synced, fsync = [], os.fsync

    def noted(descriptor):
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    known = made(tmp_path, ["p", "_commit_ts"])
    begun = next(at for at, path in enumerate(synced) if path.suffix == ".tmp")
    for file in known.files.values():
        path = Path(known.layout.location(file.add))
        assert {path, path.parent, path.parent.parent, tmp_path} <= set(synced[:begun])


def test_a_partition_column_keeps_its_values_when_it_is_renamed_and_widened(tmp_path):
    known = made(tmp_path, ["_commit_ts", "p"])
    change = SchemaChange(renamed=(("p", "q"), ("id", "p")), dropped=())
    known = put(known, evolved(known.metadata, known.protocol, change))
    assert known.layout.partitions == ("_commit_ts", "q")
    assert known.layout.schema.names == ["p", "q", "_commit_ts"]
    assert shown(known) == [(1, "a/b=c %20", 1), (2, "日本", 1), (3, None, 1)]
    rows = pa.Table.from_pylist([{"p": 9, "q": "x", "_commit_ts": 2}], known.layout.schema)
    known = put(known, written(known.layout, rows))
    assert list(known.files.values())[-1].partition == {"_commit_ts": "2", "p": "x"}
    gone = pa.table({"q": ["x", "日本"]})
    known = put(known, without(known.layout, known.files.values(), gone, ColumnCache(1 << 20)))
    assert shown(replayed(str(tmp_path))) == [(1, "a/b=c %20", 1), (3, None, 1)]


def test_a_partition_column_is_not_dropped(table):
    with pytest.raises(SourceError, match=r"ErrPartitionUnsupported.*partitioned by p.*dropped"):
        evolved(table.metadata, table.protocol, SchemaChange(dropped=("p",)))


def test_more_partitions_than_may_be_open_have_further_files(tmp_path, monkeypatch):
    for most in ("_OPEN_FILES_MAX", "_PENDING_BYTES_MAX", "_GROUP_BYTES"):
        monkeypatch.setattr(files, most, 2)
    layout = Layout(str(tmp_path), SCHEMA, {name: name for name in SCHEMA.names}, {}, True, ("p",))
    writing = NewFiles(layout)
    for number in range(4):
        writing.add(
            pa.Table.from_pylist(
                [{"id": number * 5 + at, "p": f"x{at}", "_commit_ts": 1} for at in range(5)], SCHEMA
            )
        )
    known = Listing(0, layout, {}, 0.0).after(writing.close())
    assert len(known.files) > 5
    assert sorted(shown(known)) == [(id_, f"x{id_ % 5}", 1) for id_ in range(20)]
