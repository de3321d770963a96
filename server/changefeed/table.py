"""A table as a source knows it: its schema as the metadata keeps it, its span,
and how its rows are mounted. Pure.

A table with hashed columns reads their salt (`server.changefeed.salt`) when the first row is
mounted.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.names import check_distinct as check_distinct_names
from pyspark_tidemark.names import check_names as check_target_names
from pyspark_tidemark.names import renaming

from server.changefeed.salt import Salt
from sink.masking import Mask
from sink.mounter import META_FIELDS, SelectedMounter, TableMounter
from sink.row_filter import FilteredMounter, RowFilter
from storage.model.errors import InvalidError
from storage.model.span import Span
from storage.tidb.field_type import NULL_DATES, ZERO_DATES
from storage.tidb.schema_history import FORMER_ID

_SELECTED: Final = "tidemark_columns"
_RENAMED: Final = "tidemark_renamed"
_MASKED: Final = "tidemark_masked"
_DEFAULTS: Final = "tidemark_masked_defaults"
_SALT: Final = "tidemark_salt"
_IGNORED: Final = "tidemark_ignored"
_TARGET: Final = "tidemark_target"
_SHARD: Final = "tidemark_shard"
_TAKEN: Final = (_SELECTED, _RENAMED, _MASKED, _DEFAULTS, _SALT)
_ROUTED_SHOWN: Final = 10
_OURS: Final = frozenset(field.name for field in META_FIELDS)


class TableIneligibleError(InvalidError):
    """The table cannot be replicated; the message names it and says why."""

    code = "ErrTableIneligible"


@dataclass(frozen=True, slots=True)
class ShardOf:
    """A table of the target that several of the source are merged into; `column` tells them apart
    there, by the source's `schema.table`.
    """

    schema_name: str
    table_name: str
    column: str

    @property
    def name(self) -> str:
        """`schema.table`."""
        return f"{self.schema_name}.{self.table_name}"


@dataclass(frozen=True, slots=True)
class TableRecord:
    """One table in one version; `table_info` is a JSON document that its source reads:
    TiDB's TableInfo, or its own.
    """

    schema_name: str
    table_info: dict[str, Any]
    matched_by_names: bool = field(default=False, compare=False)
    """Whether its columns were identified with former ones by name alone, since no statement
    describes the change. Not stored: `server.changefeed.identity` reads it once.
    """

    @property
    def selected(self) -> Sequence[str] | None:
        """The columns that the changefeed takes of it; None: all.

        A member of the document that is ours.
        """
        return self.table_info.get(_SELECTED)

    @property
    def renamed(self) -> Mapping[str, str]:
        """Return the names that readers see for columns that have other names upstream.

        A member that is ours, too.
        """
        renamed: dict[str, str] = self.table_info.get(_RENAMED, {})
        return renamed

    @property
    def is_keyless(self) -> bool:
        """Whether the source says that it has no key: possible for MySQL; tables of TiDB all have
        one.
        """
        return self.table_info.get("primary_key") == []

    @property
    def whole(self) -> "TableRecord":
        """The record as the upstream has it, whatever is taken of it."""
        ours = (
            *(_SELECTED, _RENAMED, _MASKED, _DEFAULTS, _SALT, _IGNORED, _TARGET, _SHARD),
            ZERO_DATES,
        )
        info = {member: value for member, value in self.table_info.items() if member not in ours}
        return TableRecord(self.schema_name, info)

    def is_taken_as(self, other: "TableRecord", *, apart_from_events: bool = False) -> bool:
        """Whether as much is taken of this record as of another one, and shown in the same way;
        `apart_from_events`: whichever changes are ignored.
        """
        members = (*_TAKEN, *(() if apart_from_events else (_IGNORED,)))
        infos = (self.table_info, other.table_info)
        return all(infos[0].get(member) == infos[1].get(member) for member in members)

    def selecting(
        self, columns: Sequence[str], renamed: Mapping[str, str] | None = None
    ) -> "TableRecord":
        """The same record, of which only these columns and those of the key are taken, some under
        other names.
        """
        info = {member: value for member, value in self.table_info.items() if member != _RENAMED}
        info[_SELECTED] = list(columns)
        return TableRecord(self.schema_name, info | {_RENAMED: dict(renamed)} if renamed else info)

    @property
    def masked(self) -> Mapping[str, str]:
        """The masks of columns, by the source's names: texts of `sink.masking`.

        A member that is ours.
        """
        masked: dict[str, str] = self.table_info.get(_MASKED, {})
        return masked

    @property
    def masks(self) -> dict[str, Mask]:
        """The same, ready for use; raises MaskError."""
        document = self.table_info.get(_SALT)
        salt = None if document is None else Salt.parse(document).secret
        defaults = self.table_info.get(_DEFAULTS, {})
        return {
            name: Mask.parse(text, default=defaults.get(name), salt=salt)
            for name, text in self.masked.items()
        }

    def masking(self, masks: Mapping[str, Mask], salt: Salt | None) -> "TableRecord":
        """The same record, with masks for these columns."""
        ours = (_MASKED, _DEFAULTS, _SALT)
        info = {member: value for member, value in self.table_info.items() if member not in ours}
        if masks:
            info[_MASKED] = {name: mask.text for name, mask in masks.items()}
        defaults = {name: mask.default for name, mask in masks.items() if mask.default is not None}
        if defaults:
            info[_DEFAULTS] = defaults
        # A record that hashes nothing needs no salt.
        if salt is not None and any(mask.is_hash for mask in masks.values()):
            info[_SALT] = salt.to_document()
        return TableRecord(self.schema_name, info)

    @property
    def ignored(self) -> RowFilter | None:
        """The rules that leave out some of its changes, as a document of our own."""
        document = self.table_info.get(_IGNORED)
        return None if document is None else RowFilter.parse(document)

    def ignoring(self, row_filter: RowFilter) -> "TableRecord":
        """The same record, with rules that leave out some of its changes."""
        info = {**self.table_info, _IGNORED: row_filter.to_document()}
        return TableRecord(self.schema_name, info)

    @property
    def former_id(self) -> Any:
        """The id that the table had right below the DDL that brings this record; mostly its own."""
        return self.table_info.get(FORMER_ID, self.table_info.get("id"))

    @property
    def zero_dates(self) -> str | None:
        """One of `storage.tidb.field_type.SHOWN_DATES`, None for the first;
        a member of the document that is ours.
        """
        return self.table_info.get(ZERO_DATES)

    def showing(self, zero_dates: str) -> "TableRecord":
        """The same record, with impossible dates (zero dates) shown as `zero_dates` says."""
        if zero_dates == (self.zero_dates or NULL_DATES):
            return self
        return replace(self, table_info={**self.table_info, ZERO_DATES: zero_dates})

    @property
    def target(self) -> tuple[str, str]:
        """The names of schema and table by which readers know it; a member that is ours."""
        schema_name, table_name = self.table_info.get(_TARGET) or (
            self.schema_name,
            self.table_name,
        )
        return schema_name, table_name

    def routed(self, target: tuple[str, str]) -> "TableRecord":
        """The same record, with these names in the target."""
        info = self._without_route
        if target != (self.schema_name, self.table_name):
            info[_TARGET] = list(target)
        return TableRecord(self.schema_name, info)

    @property
    def shard(self) -> ShardOf | None:
        """The target's table into which it is merged with others; None: none. Readers know it by
        its own name. A member that is ours.
        """
        document = self.table_info.get(_SHARD)
        if document is None:
            return None
        schema_name, table_name = document["table"]
        return ShardOf(schema_name, table_name, document["column"])

    def merged(self, shard: ShardOf) -> "TableRecord":
        """The same record, as a shard of a table in the target."""
        document = {"table": [shard.schema_name, shard.table_name], "column": shard.column}
        return TableRecord(self.schema_name, {**self._without_route, _SHARD: document})

    @property
    def _without_route(self) -> dict[str, Any]:
        ours = (_TARGET, _SHARD)
        return {member: value for member, value in self.table_info.items() if member not in ours}

    @property
    def place(self) -> tuple[str, str]:
        """The names of schema and table in the target; of a shard those of the merged table."""
        shard = self.shard
        return self.target if shard is None else (shard.schema_name, shard.table_name)

    @property
    def table_info_json(self) -> str:
        """The document as text."""
        return json.dumps(self.table_info, separators=(",", ":"))

    @property
    def table_name(self) -> str:
        """The table's own name; TiDB writes it in its own case and in lower case.

        Raises:
            InvalidError: the document has none.
        """
        name = self.table_info.get("name")
        name = name.get("O") if isinstance(name, dict) else name
        if not isinstance(name, str):
            raise InvalidError(
                f"a table of schema {self.schema_name!r} has a table_info without a name"
            )
        return name

    @property
    def name(self) -> str:
        """`schema.table`; raises as `table_name`."""
        return f"{self.schema_name}.{self.table_name}"


@dataclass(frozen=True, slots=True)
class SourceTable:
    """One span and how its rows are mounted; `record` is what it was made of."""

    record: TableRecord
    span: Span
    mounter: TableMounter
    reread_ts: int = 0
    """The DDL behind which the source delivers all rows of this span again; 0: there is none."""

    @property
    def name(self) -> str:
        """`schema.table`."""
        return self.mounter.name

    @property
    def target_name(self) -> str:
        """The same in the target, by which readers know the table."""
        return ".".join(self.record.target)

    @property
    def place(self) -> str:
        """The name of the target's table that has its rows; of a shard the merged table's."""
        return ".".join(self.record.place)

    @property
    def has_key(self) -> bool:
        """Whether it has a key; otherwise rows cannot be told apart: only changes are known."""
        return bool(self.mounter.key_columns)


def taken(record: TableRecord, whole: TableMounter) -> TableMounter:
    """Return the mounter of the taken columns, made from the mounter of the whole table."""
    mounter: TableMounter = whole
    if record.selected is not None or record.masked:
        mounter = SelectedMounter(whole, record.selected, record.renamed, record.masks)
    row_filter = record.ignored
    return mounter if row_filter is None else FilteredMounter(mounter, row_filter)


def check_distinct(tables: Sequence[SourceTable], target: str) -> None:
    """Check that a target of the format `target` can tell the tables apart by their names.

    Raises:
        TableIneligibleError: two names are the same for it.
    """
    try:
        check_distinct_names(target, (table.record.place for table in tables))
    except SourceError as err:
        raise TableIneligibleError(err.message + _routes_hint(tables)) from None


def _routes_hint(tables: Iterable[SourceTable]) -> str:
    """Advice that is added to errors about names where they come from routes."""
    routed = sorted(each.name for each in tables if each.place != each.name)
    if not routed:
        return ""
    return f". Names are those in the target, by --route of {', '.join(routed[:_ROUTED_SHOWN])}"


def check_names(table: SourceTable, target: str) -> None:
    """Check that no two columns of a table have the same name for readers, whatever the case, and
    that a target of the format `target` can hold all of them.


    Raises:
        TableIneligibleError: with the option that gives columns other names.
    """
    where, names = (table.record.schema_name, table.record.table_name), table.mounter.schema.names
    shard = table.record.shard
    if shard is not None:
        _check_shard_column(table.name, shard, names, target)
    # Targets compare names without case. Tidemark's own columns come first and keep their names,
    # so what is reported is the table's column.
    twice = {name for name, count in Counter(map(str.lower, names)).items() if count > 1}
    own = [name for name in names[len(META_FIELDS) :] if name.lower() in twice]
    if own:
        raise TableIneligibleError(
            f"{table.name} cannot be replicated: {', '.join(own)} is what another column is "
            f"called, or one that Tidemark adds ({', '.join(sorted(_OURS))}). "
            f"{renaming(where, own[:1], names)}; or leave it out by !{own[0]}"
        )
    try:
        check_target_names(target, table.record.place, names[len(META_FIELDS) :])
    except SourceError as err:
        raise TableIneligibleError(err.message + _routes_hint([table])) from None


def _check_shard_column(name: str, shard: ShardOf, columns: Sequence[str], target: str) -> None:
    way_out = f"choose another one in {{shard={shard.column}}} of --route"
    if shard.column.lower() in map(str.lower, columns):
        raise TableIneligibleError(
            f"{name} cannot be a shard of {shard.name}, whose column {shard.column} tells shards "
            f"apart: it has a column of that name, or Tidemark adds one; {way_out}"
        )
    try:
        check_target_names(target, (shard.schema_name, shard.table_name), [shard.column])
    except SourceError:
        raise TableIneligibleError(
            f"{name} cannot be a shard of {shard.name}: a {target} target cannot hold that table "
            f"with a column {shard.column}; {way_out}, or another name of the table"
        ) from None
