"""TableInfo documents are checked whole, and faults name the path of the bad member."""

import copy
import json
import subprocess
import sys
from typing import Any

import pytest

from server.changefeed.table import TableRecord
from server.puller.tidb.table import tidb_table
from storage.model.errors import CorruptError
from storage.tidb.ddl import Job
from storage.tidb.document import (
    NESTING_MAX,
    TableInfoError,
    check_nesting,
    read_document,
    table_document,
)
from storage.tidb.field_type import Flag, Type
from storage.tidb.schema import Column, Index, TableInfo
from storage.tidb.schema_history import SchemaHistory
from tests.fuzz.table_info import fuzz
from tests.unit.storage.tidb import vectors

TABLE = TableInfo.build(
    101,
    "t",
    [
        Column.bigint("id"),
        Column.varchar("v", 64),
        Column(name="d", type=Type.NEWDECIMAL, flen=10, decimal=2, origin_default="1.50"),
        Column(name="b", type=Type.BIT, flen=9, origin_default=b"\x01"),
        Column(name="at", type=Type.DATETIME, flen=26, decimal=6),
        Column(name="e", type=Type.ENUM, elems=("x", "y"), flen=1),
    ],
)
UNIQUE = Index(1, "u", (1,), unique=True, primary=False, public=True, whole=True)


def document(**members: Any) -> dict[str, Any]:
    return json.loads(TABLE.to_json()) | {"index_info": [index()]} | members


def index(**members: Any) -> dict[str, Any]:
    table = TableInfo(1, "t", TABLE.columns, (UNIQUE,))
    return json.loads(table.to_json())["index_info"][0] | members


def changed(path: str, value: Any) -> dict[str, Any]:
    """The document with another value at a path of keys and places, joined by dots."""
    doc = copy.deepcopy(document())
    *holders, last = (int(key) if key.isdigit() else key for key in path.split("."))
    member = doc
    for key in holders:
        member = member[key]
    member[last] = value
    return doc


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("id", 0, r"\$\.id: Expected `int` >= 1"),
        ("id", 2**63, r"\$\.id: "),
        ("id", "7", r"\$\.id: Expected `int`, got `str`"),
        ("name.O", "", r"\$\.name\.O: Expected `str` of length >= 1"),
        ("name.O", "a\0b", r"\$\.name\.O: "),
        ("cols", 5, r"\$\.cols: Expected `array \| null`, got `int`"),
        ("cols.0", None, r"\$\.cols\[0\]: Expected `object`, got `null`"),
        ("cols.1.id", 1, r"\$\.cols: more than one has the id 1"),
        ("cols.1.id", 2**32, r"\$\.cols\[1\]\.id: "),
        ("cols.1.name.O", "ID", r"\$\.cols: more than one has the name 'id'"),
        ("cols.1.offset", 0, r"\$\.cols: their offsets are not the numbers from 0 to 5, each once"),
        ("cols.1.offset", -1, r"\$\.cols\[1\]\.offset: "),
        ("cols.1.offset", 7, r"\$\.cols: their offsets"),
        ("cols.1.type.Tp", 225, r"\$\.cols\[1\]\.type\.Tp: 225 is no column type"),
        ("cols.1.type.Flag", -1, r"\$\.cols\[1\]\.type\.Flag: "),
        ("cols.1.type.Flen", 2**32, r"\$\.cols\[1\]\.type\.Flen: "),
        ("cols.1.type.Charset", None, r"\$\.cols\[1\]\.type\.Charset: "),
        ("cols.1.type.Elems", [1], r"\$\.cols\[1\]\.type\.Elems\[0\]: Expected `str`"),
        ("cols.2.type.Flen", 66, r"\$\.cols\[2\]\.type: a DECIMAL of 66 digits"),
        ("cols.2.type.Flen", 0, r"\$\.cols\[2\]\.type: a DECIMAL of 0 digits"),
        ("cols.2.type.Decimal", 11, r"\$\.cols\[2\]\.type: a DECIMAL of 10 digits with 11"),
        (
            "cols.2.origin_default",
            "1.5.0",
            r"\$\.cols\[2\]\.origin_default: '1.5.0' is no value of the NEWDECIMAL",
        ),
        ("cols.0.origin_default", "9" * 40, r"\$\.cols\[0\]\.origin_default: "),
        ("cols.2.origin_default", [], r"\$\.cols\[2\]\.origin_default: Expected"),
        ("cols.3.type.Flen", 65, r"\$\.cols\[3\]\.type\.Flen: a BIT of 65 bits"),
        ("cols.3.origin_default_bit", "!", r"\$\.cols\[3\]\.origin_default_bit: "),
        (
            "cols.3.origin_default_bit",
            "QUFBQUFBQUFB",
            r"\$\.cols\[3\]\.origin_default_bit: more than 8 bytes",
        ),
        ("cols.4.type.Decimal", 7, r"\$\.cols\[4\]\.type\.Decimal: 7 digits of a second"),
        (
            "index_info.0.idx_cols.0.offset",
            6,
            r"\$\.index_info\[0\]\.idx_cols\[0\]\.offset: 6, but there are 6",
        ),
        ("index_info.0.idx_cols", [], r"\$\.index_info\[0\]\.idx_cols: "),
        ("index_info", [index(), index()], r"\$\.index_info: more than one has the id 1"),
        (
            "index_info",
            [index(is_primary=True), index(id=2, is_primary=True)],
            r"\$\.index_info: more than one index is primary",
        ),
        ("is_common_handle", True, r"\$\.is_common_handle: true beside pk_is_handle"),
        ("cols.0.type.Flag", 0, r"\$\.pk_is_handle: true, but"),
        ("cols.0.type.Tp", Type.VARCHAR, r"\$\.pk_is_handle: true, but"),
        ("cols.0.generated_expr_string", "`v`", r"\$\.pk_is_handle: true, but"),
        ("cols.0.hidden", True, r"\$\.pk_is_handle: true, but"),
        (
            "partition",
            {"enable": True, "definitions": [{"id": 7}, {"id": 7}]},
            r"\$\.partition\.definitions: more than",
        ),
        (
            "partition",
            {"enable": True, "definitions": [{}]},
            r"\$\.partition\.definitions\[0\]: .* `id`",
        ),
        ("tidemark_columns", 5, r"\$\.tidemark_columns: "),
        ("tidemark_removed", {"ts": 1}, r"\$\.tidemark_removed: .* `partition_ids`"),
    ],
)
def test_a_fault_is_named_by_its_path(path: str, value: Any, fault: str) -> None:
    with pytest.raises(TableInfoError, match=fault) as refused:
        tidb_table(TableRecord("s", changed(path, value)))
    assert refused.value.code == "ErrTableInfoInvalid"


def test_the_document_without_a_fault_is_a_table() -> None:
    assert tidb_table(TableRecord("s", document())).name == "s.t"


@vectors.needed
def test_what_a_real_tidb_writes_is_taken_and_members_that_it_adds_are_ignored() -> None:
    infos = [info for job in vectors.lines("ddl_jobs") if (info := job["binlog"].get("TableInfo"))]
    assert len(infos) > 20
    for info in infos:
        newer = copy.deepcopy(info) | {"a_member_of_2030": [{}]}
        for column in newer["cols"] or []:
            column |= {"a_member_of_2030": 1}
        assert TableInfo.parse(json.dumps(newer)) == TableInfo.parse(info)


def test_a_document_of_an_old_tidb_has_fewer_members() -> None:
    old = document()
    for member in ("is_common_handle", "partition", "view", "sequence"):
        del old[member]
    for column in old["cols"]:
        for member in ("origin_default_bit", "default_bit", "hidden", "generated_stored"):
            del column[member]
    old["cols"][3]["origin_default"] = None
    assert TableInfo.parse(old).stored_columns[0].name == "id"


def test_a_default_that_is_a_number_in_json_is_read_as_its_text() -> None:
    number = TableInfo.parse(changed("cols.2.origin_default", 1.5)).columns[2]
    assert number.origin_default == "1.5"


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, '{"a":' * (NESTING_MAX + 1) + "1" + "}" * 65]
)
def test_what_is_nested_too_deeply_is_refused_before_it_is_parsed(text: str) -> None:
    with pytest.raises(TableInfoError, match="nested more than 64 levels"):
        read_document(text)


def test_brackets_in_strings_are_no_nesting() -> None:
    check_nesting(json.dumps({"a": '[{"\\' * 1000, "b\\": '"[[[' * 1000}))
    deepest = '{"a":' * NESTING_MAX + "1" + "}" * NESTING_MAX
    assert read_document(deepest)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "5", '{"a": NaN}', '{"a"', '{"a": "\ud800"}', b'{"a": "\xff"}', '{"a": "\\ud800"}'],
)
def test_what_is_no_json_object_is_refused(text: str | bytes) -> None:
    with pytest.raises(TableInfoError):
        read_document(text)


def test_a_damaged_document_from_upstream_is_an_error_by_name() -> None:
    history = SchemaHistory(1, {1: "s"}, [])
    job = {
        "id": 9,
        "type": 3,
        "state": 6,
        "schema_id": 1,
        "table_id": 7,
        "binlog": {"TableInfo": {"id": 7, "name": 5}},
    }
    with pytest.raises(TableInfoError, match=r"a table without a name: \$\.name: "):
        history.apply(Job.parse(json.dumps(job)), 5)
    for text in ("[" * 100_000, '{"id": 1e999}', "{}"):
        with pytest.raises(CorruptError, match="not a DDL job"):
            Job.parse(text)


def test_a_damaged_table_that_nobody_replicates_stops_nobody() -> None:
    damaged = {"id": 7, "name": {"O": "t"}, "cols": "gone"}
    job = {
        "id": 9,
        "type": 3,
        "state": 6,
        "schema_id": 1,
        "table_id": 7,
        "binlog": {"TableInfo": damaged},
    }
    change = SchemaHistory(1, {1: "s"}, []).apply(Job.parse(json.dumps(job)), 5)
    assert change is not None
    assert [table.name for table in change.tables] == ["s.t"]
    with pytest.raises(TableInfoError, match=r"'t': .*pk_is_handle|\$\.cols"):
        table_document(damaged)


@vectors.needed
def test_mutated_documents_are_tables_or_named_errors() -> None:
    tried, refused, faults = fuzz(seconds=5.0, seed=20)
    assert not faults
    assert tried > refused > 0


def test_a_handle_needs_its_column() -> None:
    assert Flag.PRIMARY_KEY in TableInfo.parse(document()).columns[0].flags


def test_a_primary_index_that_a_ddl_is_building_anew_is_no_second_key() -> None:
    building = index(id=9, is_primary=True, state=3)
    kept = index(id=2, is_primary=True)
    for indices in [building, kept], [kept, building]:
        found = TableInfo.parse(document(pk_is_handle=False, index_info=indices))
        assert [column.name for column in found.key_columns] in ([], ["v"])
        assert (
            found.key_columns
            == TableInfo.parse(document(pk_is_handle=False, index_info=[kept])).key_columns
        )


def test_its_classes_are_prepared_while_it_is_imported():
    """At their first use they could be used by several threads, which crashed the process."""
    program = """
import sys
from storage.tidb import document

def called(frame, event, _):
    assert "msgspec" not in frame.f_code.co_filename, frame

text = b'{"id": 1, "name": {"O": "t"}, "pk_is_handle": false}'
sys.setprofile(called)
document.table_head(document.read_document(text))
document.table_document(text)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
