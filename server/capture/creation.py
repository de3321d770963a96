"""A changefeed that is asked for: its parameters, and the record and tables they give."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark_tidemark.sink_uri import format_of

from server.capture.audit import check_audit
from server.capture.catalog.catalog import Terms
from server.capture.catalog.tables import Chosen, chosen_tables, eligible
from server.capture.errors import ParameterError, StartTsInFutureError, TargetTsError
from server.capture.runner import utc_now
from server.changefeed.columns import ColumnRules
from server.changefeed.filter import TableFilter, exact_rules, filter_of
from server.changefeed.info import ChangefeedInfo, check_id, check_sink_uri
from server.changefeed.table import SourceTable, TableRecord
from server.puller.source import Source
from storage.tidb.document import read_document
from storage.tidb.field_type import NULL_DATES


@dataclass(frozen=True, slots=True)
class Checked:
    """What a changefeed would replicate from `start_ts` on; `refused`: why not, by name."""

    start_ts: int
    tables: tuple[SourceTable, ...]
    refused: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewChangefeed:
    """`start_ts` 0: now; `target_ts` 0: no end; `tables` are (schema name,
    table_info JSON), `rules` a table filter.
    """

    id: str
    sink_uri: str
    source_uri: str = ""
    start_ts: int = 0
    target_ts: int = 0
    tables: Sequence[tuple[str, str]] = ()
    rules: Sequence[str] = ()
    columns: Sequence[str] = ()
    """Rules about columns, `server.changefeed.columns`."""
    zero_dates: str = NULL_DATES
    """How dates that no calendar has are shown, one of `SHOWN_DATES`."""
    ignore_ineligible: bool = False
    audit_s: int = 0
    """In what time the lake is compared with the source, again and again; 0: never."""

    def records(self) -> tuple[TableRecord, ...]:
        """The given tables, after a look at all that can be looked at without the source.

        Raises:
            InvalidError: a parameter cannot be used; its subclass says which.
        """
        check_id(self.id)
        check_sink_uri(self.sink_uri)
        check_audit(self.audit_s, self.sink_uri)
        TableFilter(self.rules)
        ColumnRules(self.columns, self.zero_dates)
        if not (self.tables or self.rules):
            raise ParameterError(
                "a changefeed needs tables: name them by --filter, or give their schemas by "
                "--tables"
            )
        return tuple(
            TableRecord(schema_name, read_document(text)) for schema_name, text in self.tables
        )

    async def chosen(self, source: Source, start_ts: int) -> Chosen:
        """Its tables as of `start_ts`; raises as `chosen_tables`."""
        given = self.records()
        terms = Terms(
            self.id,
            filter_of(self.source_uri, self.rules),
            self.ignore_ineligible,
            ColumnRules(self.columns, self.zero_dates),
            format_of(self.sink_uri),
        )
        if not self.rules:
            return eligible(source, given, terms)
        return await chosen_tables(source, terms, start_ts, given)

    def info(self, start_ts: int, chosen: Chosen) -> ChangefeedInfo:
        """Its record."""
        given = {table.name: (table.schema_name, table.table_name) for table in self.records()}
        taken = [given[table.name] for table in chosen.tables if table.name in given]
        return ChangefeedInfo(
            id=self.id,
            sink_uri=self.sink_uri,
            source_uri=self.source_uri,
            start_ts=start_ts,
            target_ts=self.target_ts,
            create_time=utc_now(),
            rules=(*self.rules, *exact_rules(taken)),
            columns=tuple(self.columns),
            zero_dates=self.zero_dates,
            from_snapshot=bool(self.rules),
            ignore_ineligible=self.ignore_ineligible,
            ignored=chosen.ignored,
            audit_s=self.audit_s,
        )


def check_range(start_ts: int, target_ts: int, now_ts: int) -> None:
    """Refuse what has no beginning or no length.

    Raises:
        StartTsInFutureError, TargetTsError: it cannot be replicated.
    """
    if start_ts > now_ts:
        raise StartTsInFutureError(
            f"the start {start_ts} is after the present {now_ts}; see `tidemark cli tso query`"
        )
    if target_ts and target_ts <= start_ts:
        raise TargetTsError(f"target_ts {target_ts} is not after the start {start_ts}")
