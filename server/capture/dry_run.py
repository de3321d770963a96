"""What `changefeed create --dry-run` is answered: what would become of each table, and which rule
says so. Pure.
"""

from collections.abc import Iterator, Mapping

from tidemarkpb.v1 import changefeed_pb2 as pb

from server.capture.creation import Checked, NewChangefeed
from server.changefeed.event_filter import EventFilter, EventFilters
from server.changefeed.filter import TableFilter, filter_of
from server.changefeed.table import SourceTable
from sink.mounter import META_FIELDS, source_columns, whole_mounter


def check_response(checked: Checked, new: NewChangefeed) -> pb.CheckChangefeedResponse:
    """What a changefeed would replicate, with the columns that readers would see."""
    table_filter = filter_of(new.source_uri, new.rules)
    events = EventFilters(new.event_filters)
    return pb.CheckChangefeedResponse(
        start_ts=checked.start_ts,
        tables=[_eligible(table, table_filter, events) for table in checked.tables],
        ineligible=ineligible(checked.refused),
        not_taken=[
            pb.IneligibleTable(name=".".join(name), reason=_left_out_by(table_filter, name))
            for name in sorted(checked.not_taken)
        ],
    )


def ineligible(refused: Mapping[str, str]) -> list[pb.IneligibleTable]:
    """Tables that cannot be replicated, and why."""
    return [pb.IneligibleTable(name=name, reason=why) for name, why in sorted(refused.items())]


def _eligible(
    table: SourceTable, table_filter: TableFilter, events: EventFilters
) -> pb.EligibleTable:
    record = table.record
    columns = whole_mounter(table.mounter).schema.names[len(META_FIELDS) :]
    shown = source_columns(table.mounter)
    return pb.EligibleTable(
        name=table.name,
        target=table.place if table.place != table.name else "",
        table_id=table.span.table_id,
        key=table.mounter.key_columns,
        columns=_columns(table),
        rule=table_filter.deciding_rule(record.schema_name, record.table_name),
        left_out=[name for name in columns if name not in shown],
        ignored=[text for each in events.about(record) for text in _ignored(each)],
    )


def _left_out_by(table_filter: TableFilter, name: tuple[str, str]) -> str:
    rule = table_filter.deciding_rule(*name)
    if not rule:
        return "no rule of the filter is about it"
    if rule.startswith("!"):
        return f"the rule {rule} of the filter leaves it out"
    return "it is in a schema of the system"


def _columns(table: SourceTable) -> list[pb.EligibleColumn]:
    """The columns of a table as readers are shown them."""
    record = table.record
    masked = {record.renamed.get(name, name): mask for name, mask in record.masked.items()}
    source = {shown: name for name, shown in record.renamed.items()}
    return [
        pb.EligibleColumn(
            name=column.name,
            type=str(column.type),
            mask=masked.get(column.name, ""),
            source=source.get(column.name, ""),
        )
        for column in list(table.mounter.schema)[len(META_FIELDS) :]
    ]


def _ignored(each: EventFilter) -> Iterator[str]:
    """What an event filter ignores, each as it is written in a file of --config."""
    if each.ignore_event:
        yield f"ignore-event {', '.join(each.ignore_event)}"
    for name, text in each.conditions.items():
        yield f"ignore-{name.replace('_', '-')}-value-expr {text}"
    if each.ignore_update_only_columns:
        yield f"ignore-update-only-columns {', '.join(each.ignore_update_only_columns)}"
    if each.ignore_sql:
        yield f"ignore-sql {', '.join(each.ignore_sql)}"
