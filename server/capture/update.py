"""What `changefeed update` changes of a changefeed that exists.

All but a new table filter is in force at once. A filter comes in force at a ts of its own, as a
schema change does: `FilterPlan.ts` is the source's present, and the plan holds the tables that come
there. The changefeed runs up to there with the
tables that both filters take. When everything up to there is at the target, the change is written:
readers see tables that come and tables that go, and what the new ones hold is dumped.

Tables that go are no longer read from the moment of the update: one of them may be what keeps the
changefeed from going on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pyspark_tidemark.flight import FILTER_UPDATE

from server.capture.catalog import terms_of
from server.capture.creation import eligible
from server.capture.errors import ParameterError
from server.capture.feed import Feed
from server.changefeed.filter import TableFilter, filter_of
from server.changefeed.history import History, SchemaChange, by_id
from server.changefeed.info import ChangefeedInfo, FilterUpdate, check_sink_uri
from server.changefeed.table import TableRecord
from storage.model.ts import MAX_TS

_RULES_SHOWN: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangefeedUpdate:
    """What is to be changed; what is left out stays as it was."""

    sink_uri: str = ""
    """The same place, with another login or other options."""
    on_unclear_ddl: str = ""
    """Of a mysql:// source."""
    audit_s: int | None = None
    rules: Sequence[str] = ()
    """The new table filter."""
    dumps: bool = True
    """Whether what new tables hold is copied."""

    def check(self) -> None:
        """Refuse what cannot be used, whatever the changefeed.

        Raises:
            ParameterError: nothing is to be changed.
            SinkUriError, FilterRuleError: it is not valid.
        """
        if not (self.sink_uri or self.on_unclear_ddl or self.rules or self.audit_s is not None):
            raise ParameterError(
                "nothing is to be updated: give --filter, --sink-uri, --on-unclear-ddl or --audit"
            )
        if self.sink_uri:
            check_sink_uri(self.sink_uri)
        TableFilter(self.rules)


@dataclass(frozen=True, slots=True)
class FilterPlan:
    """What a new filter changes at `ts`."""

    ts: int
    rules: tuple[str, ...]
    coming: tuple[TableRecord, ...]
    """Tables that it takes, and that the changefeed does not have."""
    going: tuple[str, ...]
    """Names of tables that it does not take any more."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Tables that it takes, and that cannot be replicated: why, by name; left out."""


async def plan_filter(feed: Feed, rules: Sequence[str]) -> FilterPlan:
    """What `rules` would change now; nothing is kept.

    Raises:
        FilterRuleError, ParameterError: the rules cannot be read, or take no table.
        TableIneligibleError, ColumnRuleError, EventFilterError: as at a creation.
        UnavailableError: the source does not answer, or its tables are being changed.
    """
    info = replace(feed.info, rules=tuple(rules), filter_update=None)
    terms = terms_of(info, info.rules)
    here = _in_force(feed.catalog.history)
    ts, records = await feed.source.present([each.whole for each in here.values()])
    taken = [each for each in records if terms.filter.takes(each.schema_name, each.table_name)]
    staying = here.keys() - _going(here.values(), info)
    # Tables that were given by --tables need not be in the source.
    selection = eligible(feed.source, taken, terms) if taken or not staying else None
    coming = () if selection is None else selection.tables
    return FilterPlan(
        ts,
        info.rules,
        tuple(each for each in coming if each.name not in staying),
        tuple(sorted(here.keys() - staying)),
        {} if selection is None else selection.refused,
    )


def waiting_for(info: ChangefeedInfo, plan: FilterPlan, *, dumps: bool) -> FilterUpdate:
    """What a changefeed waits for until a plan is in force."""
    # Of two updates in a row the first never came in force: its tables are those of before.
    before = info.rules if info.filter_update is None else info.filter_update.before
    return FilterUpdate(before, plan.ts, dumps=dumps)


def filter_change(
    info: ChangefeedInfo, history: History, coming: Sequence[TableRecord]
) -> SchemaChange:
    """The schema change that brings the new filter in force, where `coming` were found to come."""
    update = info.filter_update
    assert update is not None, "a filter is coming in force"
    here = _in_force(history)
    going = _going(here.values(), info)
    rules = " ".join(info.rules)
    shown = rules if len(rules) <= _RULES_SHOWN else f"{rules[:_RULES_SHOWN]} …"
    return SchemaChange(
        update.ts,
        f"{FILTER_UPDATE} {shown.replace('*/', '* /')} */",
        by_id(each for each in coming if each.name not in here.keys() - going),
        tuple(sorted(going)),
    )


def _in_force(history: History) -> dict[str, TableRecord]:
    return {name: record for name, (_, record) in history.at(MAX_TS).items()}


def _going(tables: Iterable[TableRecord], info: ChangefeedInfo) -> set[str]:
    """Those that the filter of `info.rules` does not take, by name."""
    rules = filter_of(info.source_uri, info.rules)
    return {each.name for each in tables if not rules.takes(each.schema_name, each.table_name)}
