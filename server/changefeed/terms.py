"""What a changefeed takes of its source: which tables, and of each one its columns, masks, event
filters and its name in the target.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark_tidemark.lake.registry import FORMATS
from pyspark_tidemark.sink_uri import format_of

from server.changefeed.columns import ALL_COLUMNS, ColumnRules
from server.changefeed.event_filter import NO_EVENT_FILTERS, EventFilters
from server.changefeed.filter import AllFilters, Filter, filter_of
from server.changefeed.identity import check_still_hidden
from server.changefeed.info import ChangefeedInfo, TableTerms
from server.changefeed.masks import NO_MASKS, MaskRules
from server.changefeed.routes import NO_ROUTES, RouteRules
from server.changefeed.table import SourceTable, TableRecord


@dataclass(frozen=True, slots=True)
class Terms:
    """What a changefeed takes."""

    changefeed: str
    filter: Filter
    ignore_ineligible: bool = False
    columns: ColumnRules = ALL_COLUMNS
    target: str = ""
    """The format of its target, whose rules for names tables must keep."""
    events: EventFilters = NO_EVENT_FILTERS
    masks: MaskRules = NO_MASKS
    routes: RouteRules = NO_ROUTES
    columns_change: bool = False
    """Others were in force: what columns were taken is of no account."""
    masks_change: bool = False

    @property
    def tells_statements(self) -> bool:
        """Whether its target passes on the text of DDL statements, to who may carry them out."""
        lake = FORMATS.get(self.target)
        return lake is not None and lake.is_topic

    def takes(self, record: TableRecord) -> bool:
        """Whether the filter does."""
        return self.filter.takes(record.schema_name, record.table_name)

    def of(self, table: SourceTable, before: SourceTable | None = None) -> TableRecord:
        """The record of a whole table, with what is taken of it; `before` is the same table as it
        is in force.

        Raises:
            ColumnRuleError, MaskError, RouteRuleError: a rule cannot be followed.
            TableIneligibleError: what was hidden would be shown.
        """
        taken = self.columns.of(table, None if self.columns_change else before)
        taken = self.masks.of(taken, table, None if self.masks_change else before)
        if not (self.columns_change or self.masks_change):
            check_still_hidden(table, taken, before)
        return self.routes.of(self.events.of(taken))


def terms_of(info: ChangefeedInfo, rules: Sequence[str], before: TableTerms | None = None) -> Terms:
    """The terms of a changefeed's record with the table filter `rules`. While a filter update is
    pending, they take the tables that are replicated until it is in force. `before` are the terms
    in force so far.
    """
    before = before or info.terms
    tables: Filter = filter_of(info.source_uri, rules)
    # A record that cannot be read comes without rules: those in it are not read here, either.
    if rules and (update := info.filter_update) is not None:
        tables = (
            all_filters(info) if update.excludes else filter_of(info.source_uri, update.before[0])
        )
    return Terms(
        info.id,
        tables,
        info.ignore_ineligible,
        ColumnRules(info.columns, info.zero_dates),
        format_of(info.sink_uri),
        EventFilters(info.event_filters),
        MaskRules(info.masks, info.salt),
        RouteRules(info.routes),
        columns_change=info.columns != before.columns,
        masks_change=(info.masks, info.salt_check) != (before.masks, before.salt_check),
    )


def all_filters(info: ChangefeedInfo) -> AllFilters:
    """A filter that takes what every filter of a pending filter update takes."""
    assert info.filter_update is not None, "it is given another one"
    every = (*info.filter_update.before, info.rules)
    return AllFilters([filter_of(info.source_uri, rules) for rules in every])
