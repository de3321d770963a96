"""Rules about masks: which column is shown how, what is refused; renames unmask nothing."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from server.capture.catalog import FeedCatalog
from server.capture.creation import eligible
from server.capture.source.mysql import mysql_table
from server.changefeed.columns import ColumnRules
from server.changefeed.event_filter import EventFilter, EventFilters
from server.changefeed.filter import TableFilter
from server.changefeed.history import History, SchemaChange
from server.changefeed.masks import RULES_MAX, MaskRules
from server.changefeed.salt import Salt
from server.changefeed.table import SourceTable, TableIneligibleError, TableRecord
from server.changefeed.terms import Terms
from server.puller.source import TableChange
from sink.masking import HASH, Mask, MaskError
from sink.mounter import WithBefore, default_of, source_columns, whole_mounter
from storage.model.errors import KeyValueError
from storage.model.event import DELETE, INSERT, RAW_SCHEMA, UPDATE
from storage.mysql.schema import Column, Table, Type

SALT = b"0123456789abcdef"
COLUMNS = (
    Column(name="id", type=Type.LONG, nullable=False, id=1),
    Column(name="email", type=Type.LONG, id=2),
    Column(name="Phone", type=Type.LONG, id=3),
)


def record(name: str = "people", columns: tuple[Column, ...] = COLUMNS) -> TableRecord:
    return TableRecord("crm", Table(7, name, columns, ("id",)).to_doc())


def rules(tmp_path: Path, *texts: str) -> MaskRules:
    path = tmp_path / "salt"
    path.write_bytes(SALT)
    return MaskRules(texts, Salt.read(str(path)))


def masked(tmp_path: Path, *texts: str, table: SourceTable | None = None) -> SourceTable:
    table = table or mysql_table(record())
    return mysql_table(rules(tmp_path, *texts).of(table.record, table))


def change(op: int, new: tuple[int, ...] | None, old: tuple[int, ...] | None = None) -> Any:
    def row(values: tuple[int, ...] | None) -> bytes | None:
        cells = [value.to_bytes(4, "little") for value in values or ()]
        return None if values is None else b"\0\0" + b"".join(cells)

    values = [[9], [8], [op], [b"k"], [row(new)], [row(old)]]
    return pa.RecordBatch.from_arrays(
        [pa.array(each, field.type) for each, field in zip(values, RAW_SCHEMA, strict=True)],
        schema=RAW_SCHEMA,
    )


def shown(values: list[int]) -> list[str]:
    column = pa.array(values, pa.int32())
    texts: list[str] = Mask.parse(HASH, salt=lambda: SALT).shown(column).to_pylist()
    return texts


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], {}),
        ([f"crm.people=email:{HASH}"], {"email": HASH}),
        (["crm.*=EMAIL: mask.hash.sha-256 , phone:mask.with.4.chars"], None),
        ([f"crm.*=email:{HASH}", "*.people=ph*:mask.with.4.chars"], None),
        (["shop.*=email:mask.with.1.chars"], {}),
        ([f'"crm"."people"=id:{HASH}'], {"id": HASH}),
    ],
)
def test_all_rules_about_a_table_count(
    tmp_path: Path, texts: list[str], expected: dict[str, str] | None
) -> None:
    both = {"email": HASH, "Phone": "mask.with.4.chars"}
    assert masked(tmp_path, *texts).record.masked == (both if expected is None else expected)


@pytest.mark.parametrize(
    "text",
    ["crm.people", "crm.people=", "crm.people=email", "!crm.*=email:mask.with.1.chars", "a.b=:x"],
)
def test_rules_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(MaskError, match="mask rule"):
        MaskRules([text])


def test_too_many_rules_are_refused() -> None:
    with pytest.raises(MaskError, match="at most"):
        MaskRules(["a.b=c:mask.with.1.chars"] * (RULES_MAX + 1))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"crm.typo=email:{HASH}", "about no table"),
        (f"crm.*=emial:{HASH}", "has a column 'emial'; there are Phone, email, id"),
    ],
)
def test_a_rule_that_would_keep_nothing_in_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(MaskError, match=said):
        rules(tmp_path, text).check([mysql_table(record())])
    other = mysql_table(record("bare", COLUMNS[:1]))
    rules(tmp_path, f"crm.*=email:{HASH}").check([other, mysql_table(record())])


def test_a_column_has_one_mask_and_a_key_one_that_keeps_its_rows_apart(tmp_path: Path) -> None:
    with pytest.raises(MaskError, match=r"crm\.people: the column email has 2 masks"):
        masked(tmp_path, f"crm.*=email:{HASH}", "crm.people=e*:mask.with.2.chars")
    with pytest.raises(MaskError, match=r"crm\.people: the column id tells rows apart"):
        masked(tmp_path, "crm.*=*:mask.with.2.chars")


def test_rows_deletes_and_before_images_are_shown_alike(tmp_path: Path) -> None:
    table = masked(tmp_path, f"crm.*=id:{HASH},email:{HASH},phone:mask.with.3.chars")
    one, two, five = shown([1, 2, 5])
    assert table.mounter.key_columns == ("id",)
    [inserted] = table.mounter.mount(change(INSERT, (1, 2, 3))).to_pylist()
    assert [inserted[name] for name in ("id", "email", "Phone")] == [one, two, "***"]
    [deleted] = table.mounter.mount(change(DELETE, None, (1, 2, 3))).to_pylist()
    assert [deleted[name] for name in ("id", "email", "Phone")] == [one, two, "***"]
    [updated] = WithBefore(table.mounter).mount(change(UPDATE, (1, 5, 3), (1, 2, 3))).to_pylist()
    assert (updated["email"], updated["_before"]["email"]) == (five, two)


def test_an_error_about_a_key_does_not_tell_what_is_masked_of_it(tmp_path: Path) -> None:
    born = Column(name="born", type=Type.DATE, nullable=False, id=2)
    whole = mysql_table(
        TableRecord("crm", Table(7, "p", (COLUMNS[0], born), ("id", "born")).to_doc())
    )
    row = b"\0\0" + (4711).to_bytes(4, "little") + bytes(3)
    raw = change(INSERT, ()).set_column(4, RAW_SCHEMA.field("value"), pa.array([row], pa.binary()))
    with pytest.raises(KeyValueError, match="4711"):
        whole.mounter.mount(raw)
    table = masked(tmp_path, f"crm.*=id:{HASH}", table=whole)
    with pytest.raises(KeyValueError, match=r"a row of crm\.p has a value") as error:
        table.mounter.mount(raw)
    assert "4711" not in error.value.message


def test_masks_follow_a_selection_and_other_names(tmp_path: Path) -> None:
    whole = mysql_table(record())
    selected = ColumnRules(["crm.*=email,id->key"]).of(whole)
    found = mysql_table(rules(tmp_path, f"crm.*=id:{HASH},phone:{HASH}").of(selected, whole))
    assert found.mounter.schema.names[4:] == ["key", "email"]
    assert found.mounter.key_columns == ("key",)
    assert found.mounter.schema.field("key").type == pa.string()
    assert source_columns(found.mounter) == {"id", "email"}
    assert whole_mounter(found.mounter).schema == whole.mounter.schema
    assert found.record.whole == record()


def test_conditions_of_event_filters_are_about_the_values_themselves(tmp_path: Path) -> None:
    filters = EventFilters([EventFilter(("crm.*",), ignore_insert_value_expr="email = 2")])
    terms = Terms(
        "c", TableFilter(["*.*"]), events=filters, masks=rules(tmp_path, f"*.*=email:{HASH}")
    )
    mounter: Any = mysql_table(terms.of(mysql_table(record()))).mounter
    for email, count in ((2, 0), (3, 1)):
        raw = change(INSERT, (1, email, 3))
        assert mounter.kept(raw, mounter.mount(raw)).num_rows == count


def test_a_columns_default_is_masked_once_and_needs_no_salt_later(tmp_path: Path) -> None:
    added = replace(COLUMNS[1], initial_default=5)
    whole = mysql_table(record(columns=(COLUMNS[0], added)))
    default = default_of(whole.mounter.schema.field("email"))
    assert default is not None, "the source tells a default"
    table = masked(tmp_path, f"crm.*=email:{HASH}", table=whole)
    (tmp_path / "salt").unlink()
    found = default_of(mysql_table(table.record).mounter.schema.field("email"))
    assert found is not None
    assert found.to_pylist() == shown([5])


def catalog(terms: Terms) -> FeedCatalog:
    source: Any = SimpleNamespace(table=lambda record, _before=None: mysql_table(record))
    started = SchemaChange(1, tables=(terms.of(mysql_table(record())),))

    async def save(_: SchemaChange) -> None: ...

    return FeedCatalog(terms, source, History([started]), 1, save)


async def test_a_column_keeps_its_mask_when_it_or_its_table_is_renamed(tmp_path: Path) -> None:
    feed = catalog(
        Terms("c", TableFilter(["*.*"]), masks=rules(tmp_path, f"crm.people=email:{HASH}"))
    )
    renamed = (COLUMNS[0], replace(COLUMNS[1], name="mail"), COLUMNS[2])
    first = feed.table(record("persons", renamed))
    assert first is not None
    assert first.record.masked == {"mail": HASH}
    await feed.change(TableChange(2, "RENAME", (first,), dropped=("crm.people",)))
    again = (*renamed, Column(name="email", type=Type.LONG, id=4))
    second = feed.table(record("people", again))
    assert second is not None
    assert second.record.masked == {"mail": HASH, "email": HASH}
    other = feed.table(TableRecord("crm", {**record("other").table_info, "id": 8}))
    assert other is not None
    assert not other.record.masked


async def test_dates_that_are_shown_as_texts_are_hashed_as_these(tmp_path: Path) -> None:
    born = Column(name="born", type=Type.DATETIME2, id=2, initial_default="2020-01-02T03:04:05")
    columns = ColumnRules(zero_dates="text")
    terms = Terms(
        "c", TableFilter(["*.*"]), columns=columns, masks=rules(tmp_path, f"*.*=born:{HASH}")
    )
    source: Any = SimpleNamespace(table=lambda record, _before=None: mysql_table(record))
    [chosen] = eligible(source, [record(columns=(COLUMNS[0], born))], terms).tables
    field = mysql_table(chosen).mounter.schema.field("born")
    [default] = default_of(field).to_pylist()
    text = pa.array(["2020-01-02 03:04:05"])
    assert default == Mask.parse(HASH, salt=lambda: SALT).shown(text)[0].as_py()

    async def save(_: SchemaChange) -> None: ...

    feed = FeedCatalog(terms, source, History([SchemaChange(1, tables=(chosen,))]), 1, save)
    added = Column(name="n", type=Type.LONG, id=3)
    after = feed.table(record(columns=(COLUMNS[0], born, added)))
    assert after is not None
    assert after.mounter.schema.field("born").equals(field, check_metadata=True)


async def test_a_ddl_that_no_mask_can_follow_stops_the_changefeed_by_name(tmp_path: Path) -> None:
    texts = (f"crm.*=email:{HASH},phone:mask.with.3.chars",)
    feed = catalog(Terms("c", TableFilter(["*.*"]), masks=rules(tmp_path, *texts)))
    retyped = (
        COLUMNS[0],
        replace(COLUMNS[1], type=Type.VARCHAR, meta=80, collation=45),
        COLUMNS[2],
    )
    with pytest.raises(TableIneligibleError, match=r"email was int32 and is string.*Undo the DDL"):
        feed.table(record(columns=retyped))
    wider = (COLUMNS[0], replace(COLUMNS[1], type=Type.LONGLONG), COLUMNS[2])
    assert feed.table(record(columns=wider)) is not None, "whole numbers keep their digits"
    key = TableRecord("crm", Table(7, "people", COLUMNS, ("id", "Phone")).to_doc())
    with pytest.raises(TableIneligibleError, match="Phone tells rows apart"):
        feed.table(key)
