"""What a Delta table's log comes to, and what changes of columns put into it: no Spark."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.delta.evolution import evolved
from pyspark_tidemark.lake.delta.files import without, written
from pyspark_tidemark.lake.delta.log import Listing, commit_info, continues, fence, replayed
from pyspark_tidemark.lake.delta.protocol import creation
from pyspark_tidemark.lake.keys import ColumnCache
from pyspark_tidemark.lake.schema import SchemaChange

PROPERTIES = {"delta.enableDeletionVectors": "true"}
SCHEMA = pa.schema([("id", pa.int32()), ("text", pa.string()), ("_commit_ts", pa.int64())])
ODD = "a\u2028b\x85c"
"""Ends of lines to Python, not to JSON."""

GONE = pa.table({"id": pa.array([2], pa.int32())})


@pytest.fixture
def table(tmp_path):
    """A table of one version, and its log."""
    (tmp_path / "_delta_log").mkdir()
    actions = [
        commit_info("CUT", {}, -1),
        fence("tidemark:shop", 7),
        *creation(SCHEMA, {"id": 1, "text": 2}, PROPERTIES),
    ]
    found = put(Listing.before_the_first(str(tmp_path)), actions)
    rows = pa.table(
        {"id": [1, 2, 3], "text": [ODD, "b", "c"], "_commit_ts": [1, 2, 3]}, schema=SCHEMA
    )
    return put(found, written(found.layout, rows))


def put(known, actions):
    """The next version, in the log, too."""
    lines = "".join(json.dumps(action, ensure_ascii=False) + "\n" for action in actions)
    Path(f"{known.layout.root}/_delta_log/{known.version + 1:020}.json").write_text(lines)
    return known.after(actions)


def altered(known, change):
    return put(known, evolved(known.metadata, known.protocol, change))


def seen(known):
    files = {path: (file.bounds, file.rows, file.masked) for path, file in known.files.items()}
    return known.version, known.layout, files, known.metadata, known.protocol, known.positions


def test_a_log_that_is_read_again_shows_what_its_writer_knows(table):
    known = put(
        table,
        without(table.layout, table.files.values(), GONE, ColumnCache(1 << 20)),
    )
    known = put(
        known,
        [commit_info("CUT", {}, known.version), fence("tidemark:shop", 9), fence("another", 1)],
    )
    renamed = SchemaChange(renamed=(("text", "id"), ("id", "text")), ids={"text": 1, "id": 2})
    known = altered(known, renamed)
    known = altered(
        known, SchemaChange(dropped=("id",), added=(pa.field("id", pa.timestamp("us")),))
    )
    [file] = known.files.values()
    assert (known.positions, file.rows, file.masked) == ({"tidemark:shop": 9, "another": 1}, 3, 1)
    assert dict(file.bounds) == {"text": (1, 3), "_commit_ts": (1, 3)}, (
        "bounds follow their column's name"
    )
    assert seen(replayed(known.layout.root)) == seen(known)


def test_the_order_of_the_actions_in_a_version_says_nothing(table):
    actions = without(table.layout, table.files.values(), GONE, ColumnCache(1 << 20))
    assert [*actions[0], *actions[1]] == ["remove", "add"]
    assert seen(table.after(actions[::-1])) == seen(table.after(actions))


@pytest.mark.parametrize(
    "demand", [{"nullable": False}, {"metadata": {"delta.invariants": "id > 0"}}]
)
def test_a_table_whose_columns_do_not_take_any_value_is_written_by_delta(table, tmp_path, demand):
    schema = json.loads(table.metadata["schemaString"])
    schema["fields"][0] |= demand | {
        "metadata": schema["fields"][0]["metadata"] | demand.get("metadata", {})
    }
    put(table, [{"metaData": {**table.metadata, "schemaString": json.dumps(schema)}}])
    assert replayed(str(tmp_path)) is None


@pytest.mark.parametrize(
    "actions", [[{"remove": "a file"}], [{"txn": {"appId": "a", "version": "x"}}], ["text"]]
)
def test_a_log_of_other_values_than_delta_writes_is_named(table, tmp_path, actions):
    put(table, [])
    path = tmp_path / "_delta_log" / f"{1:020}.json"
    path.write_text("".join(json.dumps(action) + "\n" for action in actions))
    with pytest.raises(SourceError, match="ErrLakeDamaged"):
        replayed(str(tmp_path))


@pytest.mark.parametrize("name", ["00000000000000000001.checkpoint.parquet", "_last_checkpoint"])
def test_a_log_with_a_checkpoint_is_read_by_delta(table, tmp_path, name):
    assert replayed(str(tmp_path))
    (tmp_path / "_delta_log" / name).touch()
    assert replayed(str(tmp_path)) is None


def test_a_log_that_lacks_a_version_or_asks_for_what_is_not_known_is_read_by_delta(table, tmp_path):
    put(
        table,
        [
            {
                "protocol": {
                    **table.protocol,
                    "writerFeatures": [*table.protocol["writerFeatures"], "rowTracking"],
                }
            }
        ],
    )
    assert replayed(str(tmp_path)) is None
    (tmp_path / "_delta_log" / f"{2:020}.json").unlink()
    assert replayed(str(tmp_path))
    (tmp_path / "_delta_log" / f"{0:020}.json").unlink()
    assert replayed(str(tmp_path)) is None
    assert replayed(str(tmp_path / "nothing")) is None


@pytest.mark.parametrize(
    ("properties", "is_known"),
    [
        ({"delta.logRetentionDuration": "interval 2 days", "owner": "us"}, True),
        ({"delta.appendOnly": "true"}, False),
    ],
)
def test_a_table_with_a_property_is_written_where_it_asks_writers_for_nothing(
    table, properties, is_known
):
    metadata = {
        **table.metadata,
        "configuration": {**table.metadata["configuration"], **properties},
    }
    put(table, [{"metaData": metadata}])
    assert bool(replayed(table.layout.root)) is is_known


def test_a_change_that_is_made_already_commits_nothing(table):
    ids = {"number": 1, "text": 2}
    change = SchemaChange(
        renamed=(("id", "number"),), widened=(pa.field("number", pa.int64()),), ids=ids
    )
    known = altered(table, change)
    fields = {
        field["name"]: field for field in json.loads(known.metadata["schemaString"])["fields"]
    }
    assert fields["number"]["type"] == "long"
    assert fields["number"]["metadata"]["delta.typeChanges"] == [
        {"fromType": "integer", "toType": "long"}
    ]
    assert {"columnMapping", "typeWidening"} < {*known.protocol["readerFeatures"]}
    assert evolved(known.metadata, known.protocol, SchemaChange(ids=ids)) == []


@pytest.mark.parametrize(
    ("versions", "reader", "writer"),
    [
        ({"minReaderVersion": 1, "minWriterVersion": 2}, [], []),
        (
            {"minReaderVersion": 1, "minWriterVersion": 4},
            [],
            ["checkConstraints", "changeDataFeed", "generatedColumns"],
        ),
        (
            {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["appendOnly"]},
            [],
            None,
        ),
    ],
    ids=["by Delta's own writer", "after a property", "without readers' features"],
)
def test_a_protocol_without_lists_asks_for_what_its_versions_did_and_what_is_added(
    table, versions, reader, writer
):
    ids = {"number": 1, "text": 2}
    change = SchemaChange(renamed=(("id", "number"),), ids=ids)
    [protocol, _] = evolved(table.metadata, versions, change)
    named = ["appendOnly"] if writer is None else ["appendOnly", "invariants", *writer]
    assert protocol["protocol"] == {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": [*reader, "columnMapping"],
        "writerFeatures": [*named, "columnMapping"],
    }
    known = altered(table, change)
    mapped = {"minReaderVersion": 2, "minWriterVersion": 5}
    added = SchemaChange(added=(pa.field("n", pa.int32()),), ids=ids)
    [action] = evolved(known.metadata, mapped, added)
    assert "metaData" in action, "what its versions ask for is enough"


def commits(*operations):
    """Those after version 7, by what each says of itself."""
    for number, (operation, restored) in enumerate(operations, 8):
        info = {"operation": operation, "operationParameters": {"version": restored}}
        yield number, [{"protocol": {}}, {"commitInfo": info}]


@pytest.mark.parametrize(
    ("operations", "is_continued"),
    [
        ([], True),
        ([("OPTIMIZE", None), ("WRITE", None), ("CUT", None)], True),
        ([("RESTORE", 6)], False),
        ([("RESTORE", "6"), ("WRITE", None)], False),
        ([("RESTORE", 7)], True),
        ([("WRITE", None), ("RESTORE", 6), ("RESTORE", 8)], True),
        ([("RESTORE", 6), ("RESTORE", 8)], False),
        ([("RESTORE", None)], False),
        ([("CREATE OR REPLACE TABLE AS SELECT", None)], False),
        ([("CLONE", None)], False),
        ([("REPLACE TABLE", None), ("RESTORE", "7"), ("DELETE", None)], True),
    ],
)
def test_a_table_continues_from_a_version_unless_somebody_has_taken_it_back(
    operations, is_continued
):
    assert continues(7, commits(*operations)) is is_continued


def test_a_commit_may_say_nothing_of_itself():
    assert continues(7, [(8, [{"add": {}}]), (9, [{"commitInfo": {"operation": "RESTORE"}}])]) is (
        False
    )
    assert continues(7, [(8, [{"add": {}}])])
