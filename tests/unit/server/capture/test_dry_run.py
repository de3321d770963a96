"""What a dry run tells of a configuration: which rule decides of what."""

from typing import Any

from server.capture.creation import Checked, NewChangefeed
from server.capture.dry_run import check_response
from server.capture.source.mysql import mysql_table
from server.changefeed.event_filter import EventFilter
from server.changefeed.table import TableRecord
from server.changefeed.view import explained
from server.cli.changefeed_create import _checked
from storage.mysql.schema import Column, Table, Type

NAMES = ("id", "email", "_op", "secret")


def record(name: str, number: int) -> TableRecord:
    columns = tuple(Column(name=each, type=Type.LONG, nullable=each != "id") for each in NAMES)
    return TableRecord("crm", Table(number, name, columns, ("id",)).to_doc())


class Source:
    """Three tables, as a source tells them."""

    async def snapshot(self, _ts: int, _before: Any = ()) -> list[TableRecord]:
        return [record(name, place) for place, name in enumerate(("people", "plain", "tmp_x"), 7)]

    def table(self, each: TableRecord, _before: Any = None) -> Any:
        return mysql_table(each)


async def test_each_table_says_by_which_rules_it_is_what_it_is() -> None:
    new = NewChangefeed(
        id="c",
        sink_uri="delta:///lake",
        source_uri="mysql://u@h:3306?on-unclear-ddl=stop",
        rules=["crm.*", "!crm.tmp_*"],
        columns=["crm.*=*,!secret,_op->op"],
        masks=["crm.people=email:mask.with.3.chars,_op:mask.with.1.chars"],
        routes=["crm.people=lake.{schema}_{table}"],
        event_filters=[
            EventFilter(("crm.plain",), ignore_event=("delete",), ignore_sql=("^x",)),
            EventFilter(("crm.*",), ignore_update_old_value_expr="id = 1"),
        ],
    )
    source: Any = Source()
    selection = await new.selection(source, 5)
    tables = tuple(map(mysql_table, selection.tables))
    answer = check_response(Checked(5, tables, selection.refused, selection.not_taken), new)
    document = explained(answer)
    people, plain = document["eligible_tables"]
    assert people["rule"] == plain["rule"] == "crm.*"
    assert (people["target"], plain.get("target")) == ("lake.crm_people", None)
    assert people["masks"] == {"email": "mask.with.3.chars", "op": "mask.with.1.chars"}
    assert people["columns"] == {"id": "int32", "email": "string", "op": "string"}
    assert people["renamed_from"] == {"op": "_op"}
    assert people["left_out"] == ["secret"]
    assert people["ignored"] == ["ignore-update-old-value-expr id = 1"]
    assert plain["ignored"] == ["ignore-event delete", "ignore-sql ^x", *people["ignored"]]
    reason = "the rule !crm.tmp_* of the filter leaves it out"
    assert document["not_taken"] == [{"table": "crm.tmp_x", "reason": reason}]

    shown = _checked(answer, ignore_ineligible=False, explains=True).shown
    for line in (
        "crm.people → lake.crm_people",
        "  taken by  crm.*",
        "  column    op: string, _op in the source, shown by mask.with.1.chars",
        "  left out  secret",
        "  ignored   ignore-event delete",
        f"  not taken: {reason}",
        "The changefeed would start at 5",
    ):
        assert line in shown, shown
    brief = _checked(answer, ignore_ineligible=False, explains=False)
    assert "taken by" not in brief.shown
    assert "rule" not in brief.document["eligible_tables"][0]
