import json

import pytest

from storage.model.errors import InvalidError
from storage.tidb.field_type import Flag, Type
from storage.tidb.schema import Column, Index, TableInfo
from tests.unit.storage.tidb import vectors

NOTE = Column(
    name="e",
    type=Type.ENUM,
    elems=("a", "b"),
    charset="utf8mb4",
    collate="utf8mb4_bin",
    origin_default="a",
)
BITS = Column(name="x", type=Type.BIT, flags=Flag.UNSIGNED, flen=9, origin_default=b"\x01\xff")
TABLE = TableInfo.build(
    101, "Accounts", [Column.bigint("Id"), Column.varchar("owner", 64), NOTE, BITS]
)


def test_a_built_table_numbers_its_columns_and_keys_the_first() -> None:
    assert [(column.id, column.offset) for column in TABLE.columns] == [
        (1, 0),
        (2, 1),
        (3, 2),
        (4, 3),
    ]
    assert TABLE.handle_column is TABLE.columns[0]
    assert TABLE.key_columns == TABLE.columns[:1]
    assert TABLE.handle_is_key
    assert TABLE.physical_ids == (101,)


def test_a_built_table_gives_back_itself_from_json() -> None:
    assert TableInfo.parse(TABLE.to_json()) == TABLE


def test_a_built_table_needs_an_integer_first() -> None:
    with pytest.raises(InvalidError, match="must be an integer"):
        TableInfo.build(1, "t", [Column.varchar("v", 5)])


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"id": 1}'])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidError, match="TableInfo"):
        TableInfo.parse(text)


def test_an_unknown_column_is_refused_and_case_does_not_matter() -> None:
    assert TABLE.column("ID").name == "Id"
    with pytest.raises(InvalidError, match="no column 'nope'"):
        TABLE.column("nope")


def test_columns_that_rows_do_not_hold_are_left_out() -> None:
    columns = (
        Column(name="a", type=Type.LONG),
        Column(name="virtual", type=Type.LONG, generated="`a` + 1"),
        Column(name="stored", type=Type.LONG, generated="`a` * 2", generated_stored=True),
        Column(name="hidden", type=Type.LONG, hidden=True),
        Column(name="adding", type=Type.LONG, state=3),
    )
    assert [column.name for column in TableInfo(1, "t", columns).stored_columns] == ["a", "stored"]


def _table(*indices: Index, nullable: bool = False) -> TableInfo:
    flags = Flag(0) if nullable else Flag.NOT_NULL
    columns = tuple(
        Column(name=name, type=Type.LONG, id=n + 1, offset=n, flags=flags)
        for n, name in enumerate("abc")
    )
    return TableInfo(1, "t", columns, indices)


def _index(
    number: int, *offsets: int, unique: bool = True, primary: bool = False, whole: bool = True
) -> Index:
    return Index(
        number, f"i{number}", offsets, unique=unique, primary=primary, public=True, whole=whole
    )


@pytest.mark.parametrize(
    ("table", "key"),
    [
        (_table(), ""),
        (_table(_index(1, 2), _index(2, 0, 1, primary=True)), "ab"),
        (_table(_index(3, 2), _index(2, 0, 1)), "ab"),
        (_table(_index(1, 2, unique=False)), ""),
        (_table(_index(1, 2, whole=False)), ""),
        (_table(_index(1, 2), nullable=True), ""),
    ],
)
def test_the_key_is_the_primary_one_or_the_first_unique_one_without_nulls(
    table: TableInfo, key: str
) -> None:
    assert "".join(column.name for column in table.key_columns) == key
    assert not table.handle_is_key


def test_real_schemas_give_back_themselves_from_our_json() -> None:
    for name, table in vectors.tables().items():
        assert TableInfo.parse(table.to_json()) == table, name


def test_our_json_has_the_members_of_tidbs_for_the_same_table() -> None:
    real = next(
        job["binlog"]["TableInfo"]
        for job in vectors.lines("ddl_jobs")
        if job["table_name"] == "upk"
    )
    ours = json.loads(TableInfo.parse(json.dumps(real)).to_json())
    assert ours == {member: real[member] for member in ours}
    assert {
        member for member in real if member not in ours and real[member] not in (None, 0, "", False)
    } == {"update_timestamp"}


@pytest.mark.parametrize(
    ("name", "key", "fixed"),
    [
        ("ints", "id", True),
        ("cpk", "a,b", False),
        ("binpk", "b", True),
        ("cipk", "s", False),
        ("nopk", "", False),
        ("nopkuk2", "a", False),
        ("ncpk", "a,b", False),
    ],
)
def test_real_tables_have_their_keys(name: str, key: str, fixed: bool) -> None:
    table = vectors.tables()[f"vec.{name}"]
    assert ",".join(column.name for column in table.key_columns) == key
    assert table.handle_is_key == fixed


def test_a_partitioned_table_lives_under_its_partitions_ids() -> None:
    assert vectors.tables()["vec.part"].physical_ids == (130, 135, 137)
