"""The names that a target has for the tables of a changefeed: TiCDC's table routes. Pure.

    rule   = table '=' schema '.' name     shop.*=lake.{schema}_{table}

`table` is a rule of a table filter without `!`; `{schema}` and `{table}` stand for the source's
names. The first rule that is about a table decides; a table without one keeps its names. In a
configuration file a rule is one of `[[sink.dispatchers]]`, with `matcher`, `target-schema` and
`target-table`, of which an empty one keeps the name.

A rule that ends with `{shard=COLUMN}` merges tables (`shop_*.orders=shop.orders{shard=_shard}`):
the target has one table of all of them, whose COLUMN holds the source's `schema.table`, and whose
key is COLUMN and the source's key. In a configuration file that is `shard-column`.

1. A route depends on names alone, so a renamed table may get another name in the target, too.
2. Two tables never go to one target table unless both are its shards: their rows of equal keys
   would overwrite each other. Whatever would lead to that is refused: at the creation, at a filter
   update, and at the DDL.
3. Readers know a shard by its name in the source, and the lake job merges the shards
   (`lake.shards`). Shards that could not be merged are refused at the same places.
"""

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pyspark_tidemark.column_metadata import column_ids, without_metadata
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Shard, TableMeta
from pyspark_tidemark.lake.format import IGNORE, MERGING_MODES
from pyspark_tidemark.lake.registry import FORMATS, merging_formats
from pyspark_tidemark.lake.shards import merged_table
from pyspark_tidemark.sink_uri import format_of, settings_of

from server.changefeed.filter import TableFilter, table_and_rest
from server.changefeed.table import ShardOf, SourceTable, TableRecord
from storage.model.errors import InvalidError

RULES_MAX: Final = 1024
NAME_CHARACTERS_MAX: Final = 255
SCHEMA, TABLE = "{schema}", "{table}"
_ADVICE: Final = (
    f"give each a name of its own by --route, such as '*.*=SCHEMA.{SCHEMA}_{TABLE}', or leave one "
    "out by --filter"
)
_BRACES: Final = re.compile(r"[{}]")


_SHARDS: Final = re.compile(r"(.*)\{shard=([A-Za-z_][A-Za-z0-9_]*)\}\s*", re.DOTALL)
_SHARDS_ADVICE: Final = "give them the same columns, or leave one out by --filter"


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
    shard_column: str = ""
    """The column that tells shards apart, for a rule that merges tables."""


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
        if rule.shard_column:
            return record.merged(ShardOf(schema, table, rule.shard_column))
        return record.routed((schema, table))

    @property
    def merging(self) -> str:
        """The text of a rule that merges tables; empty: there is none."""
        texts = zip(self.texts, self._rules, strict=True)
        return next((text for text, rule in texts if rule.shard_column), "")

    def check(self, tables: Iterable[SourceTable]) -> None:
        """Check that each rule is the deciding one for some table of the changefeed.

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
    """Check that no two tables have the same name in the target; `advice` is the way out for the
    error's message.

    Raises:
        TableRouteConflictError: two have.
    """
    seen: dict[str, SourceTable] = {}
    for table in tables:
        for name in dict.fromkeys((table.target_name, table.place)):
            other = seen.setdefault(name, table)
            are_shards = None not in (table.record.shard, other.record.shard)
            if other.name == table.name or (
                are_shards and table.record.shard == other.record.shard
            ):
                continue
            raise TableRouteConflictError(
                f"{other.name} and {table.name} would both be {name} in the target, where "
                f"rows with one key are one row: {advice}"
            )


def check_mergeable(tables: Iterable[SourceTable], advice: str = _SHARDS_ADVICE) -> None:
    """Check that the shards of each target table have the same key, and columns that one table can
    hold; `advice` as in `check_conflicts`.

    Raises:
        TableRouteConflictError: some have not.
    """
    try:
        merged_shards(tables)
    except SourceError as err:
        raise TableRouteConflictError(f"{err.message}: {advice}") from None


def merged_shards(tables: Iterable[SourceTable]) -> dict[str, TableMeta]:
    """The merged tables of the target, by name, of those of `tables` that are shards.

    Raises:
        SourceError: ErrSchemaIncompatible, some cannot be merged.
    """
    groups: dict[str, list[TableMeta]] = {}
    for table in tables:
        shard = table.record.shard
        if shard is not None:
            meta = TableMeta(
                table.name,
                table.mounter.key_columns,
                without_metadata(table.mounter.schema),
                shard=Shard(shard.name, shard.column),
            )
            groups.setdefault(shard.name, []).append(meta)
    return {name: merged_table(shards) for name, shards in groups.items()}


def check_shard_changes(
    pairs: Iterable[tuple[SourceTable, SourceTable]], names: Container[str], advice: str
) -> None:
    """Check that a DDL does not change where the rows of shards are at the target. `pairs` are
    tables before and after the DDL, `names` those in force before it; `advice` as in
    `check_conflicts`.

    Raises:
        TableRouteConflictError: rows would have to go from one table of the target to another one,
            or from one column to another.
    """
    for before, table in pairs:
        old, new = before.record.shard, table.record.shard
        if old is None and new is None:
            continue
        if old != new:
            raise TableRouteConflictError(
                f"{before.name} becomes {table.name}, and its rows would go from {before.place} to "
                f"{table.place} in the target, of which one is merged of shards: {advice}"
            )
        if table.name != before.name and table.name in names:
            raise TableRouteConflictError(
                f"{before.name} becomes {table.name}, the name of another shard of {table.place} "
                f"until then: {advice}"
            )
        new_names = {number: name for name, number in column_ids(table.mounter.schema).items()}
        for name, number in column_ids(before.mounter.schema).items():
            if new_names.get(number, name) != name:
                raise TableRouteConflictError(
                    f"column {name} of {before.name}, a shard of {table.place}, becomes "
                    f"{new_names[number]}, and the rows of its other shards have another one: "
                    f"{advice}"
                )


def check_merging(rules: RouteRules, sink_uri: str) -> None:
    """Check that the sink can merge tables, if a rule asks for that.

    Raises:
        RouteRuleError: with the rule.
    """
    rule, settings = rules.merging, settings_of(sink_uri)
    if not rule:
        return
    lake = FORMATS.get(format_of(sink_uri))
    if lake is None or not lake.merges_shards:
        why = f"so far tables are merged in lakes of {merging_formats()}"
    elif settings.get("mode", lake.modes[0]) not in MERGING_MODES:
        why = f"tables are merged in the modes {', '.join(MERGING_MODES)}"
    elif settings.get("schema-evolution") == IGNORE:
        why = "columns of shards change one after the other, which schema-evolution=ignore forbids"
    else:
        return
    raise RouteRuleError(f"the route {rule!r} merges tables, and {why}")


def check_taken_over(
    coming: Iterable[TableRecord], going: Iterable[TableRecord], advice: str
) -> None:
    """Check that no coming table has the name in the target of one that goes, whose rows stay
    there; `advice` as in `check_conflicts`.

    Raises:
        TableRouteConflictError: one has.
    """
    left = {".".join(each.place): each for each in going}
    for record in coming:
        target = ".".join(record.place)
        other = left.get(target, record)
        # What a shard leaves goes with it.
        if other.name == record.name or (other.shard and other.shard == record.shard):
            continue
        raise TableRouteConflictError(
            f"{record.name} comes as {other.name} goes, and both are {target} in the target, which "
            f"has rows of the latter: {advice}"
        )


def _rule(text: str) -> _Rule:
    tables, target = (part.strip() for part in table_and_rest(text) or ("", ""))
    shards = _SHARDS.fullmatch(target)
    target, shard_column = (shards[1], shards[2]) if shards else (target, "")
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
                "can stand, and {shard=COLUMN} at the end"
            )
    return _Rule(TableFilter((tables,)), schema, table, shard_column)


def _filled(template: str, schema: str, table: str) -> str:
    values = {SCHEMA: schema, TABLE: table}
    # In one pass: a table may be called `{schema}`.
    return re.sub(r"\{(?:schema|table)\}", lambda match: values[match[0]], template)
