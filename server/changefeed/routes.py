"""By which names a target has the tables of a changefeed: TiCDC's table routes. Pure.

    rule   = table '=' schema '.' name     shop.*=lake.{schema}_{table}

`table` is a rule of a table filter without `!`; `{schema}` and `{table}` stand for the source's
names. The first rule that is about a table decides; a table without one keeps its names. In a
configuration file a rule is one of `[[sink.dispatchers]]`, with `matcher`, `target-schema` and
`target-table`, of which an empty one keeps the name.

1. A route is a question of names alone, so a table that is renamed may have another name in the
   target, too.
2. Two tables never go to one: rows of one key would run into one another. Whatever would bring that
   about is refused, at the creation, by a new filter, and at the DDL.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from server.changefeed.filter import TableFilter
from server.changefeed.table import SourceTable, TableRecord
from server.changefeed.table_rule import parts_of
from storage.model.errors import InvalidError

RULES_MAX: Final = 1024
NAME_CHARACTERS_MAX: Final = 255
SCHEMA, TABLE = "{schema}", "{table}"
_ADVICE: Final = (
    f"give each a name of its own by --route, such as '*.*=SCHEMA.{SCHEMA}_{TABLE}', or leave one "
    "out by --filter"
)
_BRACES: Final = re.compile(r"[{}]")


class RouteRuleError(InvalidError):
    """A rule about names in the target cannot be used."""

    code = "ErrTableRouteInvalid"


class TableRouteConflictError(InvalidError):
    """Two tables would be one in the target; the code is TiCDC's."""

    code = "ErrTableRouteConflict"


@dataclass(frozen=True, slots=True)
class _Rule:
    tables: TableFilter
    schema: str
    name: str


@dataclass(frozen=True)
class RouteRules:
    """The rules of one changefeed."""

    texts: Sequence[str] = ()
    _rules: list[_Rule] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Read the rules.

        Raises:
            RouteRuleError, FilterRuleError: one cannot be read, or there are too many.
        """
        if len(self.texts) > RULES_MAX:
            raise RouteRuleError(f"there are at most {RULES_MAX} routes, not {len(self.texts)}")
        object.__setattr__(self, "_rules", [_rule(text) for text in self.texts])

    def of(self, record: TableRecord) -> TableRecord:
        """A table's record, with the names that it has in the target.

        Raises:
            RouteRuleError: the target could not part them.
        """
        names = (record.schema_name, record.table_name)
        rule = next((rule for rule in self._rules if rule.tables.takes(*names)), None)
        if rule is None:
            return record.routed(names)
        schema, table = (_filled(template, *names) for template in (rule.schema, rule.name))
        # What reads a name parts it at its first dot.
        if "." in schema:
            raise RouteRuleError(
                f"{record.name} would be {schema}.{table} in the target, whose schema has a dot in "
                "its name: give it another one by --route"
            )
        for name in (schema, table):
            if len(name) > NAME_CHARACTERS_MAX:
                raise RouteRuleError(
                    f"{record.name} would have a name of {len(name)} characters in the target; "
                    f"there are at most {NAME_CHARACTERS_MAX}"
                )
        return record.routed((schema, table))

    def check(self, tables: Iterable[SourceTable]) -> None:
        """See that each rule decides of a table of the changefeed.

        Raises:
            RouteRuleError: with the rule.
        """
        used = set()
        for table in tables:
            names = (table.record.schema_name, table.record.table_name)
            places = (place for place, rule in enumerate(self._rules) if rule.tables.takes(*names))
            used.add(next(places, None))
        for place, text in enumerate(self.texts):
            if place not in used:
                raise RouteRuleError(f"the route {text!r} decides of no table of the changefeed")


NO_ROUTES: Final = RouteRules()


def check_conflicts(tables: Iterable[SourceTable], advice: str = _ADVICE) -> None:
    """See that each table has a name of its own in the target; `advice` is what to do else.

    Raises:
        TableRouteConflictError: two have one.
    """
    seen: dict[str, str] = {}
    for table in tables:
        other = seen.setdefault(table.target_name, table.name)
        if other != table.name:
            raise TableRouteConflictError(
                f"{other} and {table.name} would both be {table.target_name} in the target, where "
                f"rows with one key are one row: {advice}"
            )


def check_taken_over(
    coming: Iterable[TableRecord], going: Iterable[TableRecord], advice: str
) -> None:
    """See that no table comes under the name in the target of another one that goes: that one
    leaves its rows there. `advice` is what to do else.

    Raises:
        TableRouteConflictError: one does.
    """
    left = {".".join(each.target): each.name for each in going}
    for record in coming:
        target = ".".join(record.target)
        other = left.get(target, record.name)
        if other != record.name:
            raise TableRouteConflictError(
                f"{record.name} comes as {other} goes, and both are {target} in the target, which "
                f"has rows of the latter: {advice}"
            )


def _rule(text: str) -> _Rule:
    tables, target = (part.strip() for part in parts_of(text) or ("", ""))
    schema, _, table = (part.strip() for part in target.partition("."))
    if not (tables and schema and table):
        raise RouteRuleError(
            f"the route {text!r} is not of the form SCHEMA.TABLE=TARGET_SCHEMA.TARGET_TABLE, such "
            f"as 'shop.*=lake.{SCHEMA}_{TABLE}'"
        )
    for template in (schema, table):
        if _BRACES.search(_filled(template, "", "")):
            raise RouteRuleError(
                f"the route {text!r}: {template!r} has braces, in which only {SCHEMA} and {TABLE} "
                "can stand"
            )
    return _Rule(TableFilter((tables,)), schema, table)


def _filled(template: str, schema: str, table: str) -> str:
    values = {SCHEMA: schema, TABLE: table}
    # In one pass: a table may be called `{schema}`.
    return re.sub(r"\{(?:schema|table)\}", lambda match: values[match[0]], template)
