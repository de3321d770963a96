"""The tables of a changefeed at a place in the log, and what a DDL makes of them. Pure.

`Tables.effect` says what a statement does to tables by their names; `StatementOutcome` computes
what the touched ones are behind it, from its tree alone. Where the tree does not define a table,
the outcome says so, and why.

Invariants:
1. A table keeps its id, and so its span, through ALTER, RENAME and TRUNCATE; a new one gets an id
   that depends on its name and the commit_ts of its DDL only, so that reading the log again gives
   the same.
2. Where one statement moves a table out of the changefeed's names and another table into its place,
   as gh-ost and pt-online-schema-change end, the name keeps its id: it is the same table with other
   columns. Only gh-ost's copy is taken to have its rows.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pyspark_tidemark.redaction import sql_statement

from server.changefeed.table import SourceTable, TableRecord
from server.puller.mysql.ddl.column_types import Collations, LostError
from server.puller.mysql.ddl.definition import UNTOLD, Definition, row_key
from server.puller.mysql.ddl.faults import faults_of, old_time_fault
from server.puller.mysql.ddl.statement import Action, Kind, Statement, Verb
from server.puller.mysql.ddl.tracker import Context, Tracked, altered, copied, created
from server.puller.mysql.ddl.tree import AlterTable, CreateTable, Dml, TableName
from server.puller.mysql.session.errors import (
    DdlUnknownError,
    SavepointUnclearError,
    StatementLoggedError,
)
from server.puller.mysql.transaction.open_transaction import UnclearSavepoint
from server.puller.mysql.transaction.transactions import LoggedStatement
from storage.mysql.schema import INTEGERS, SINCE_5_6, STRINGS, Column, Table, Type
from storage.mysql.table_map import TableMap

_NEW: Final = -1
_PLAIN_NAME: Final = re.compile(r"[\w$]+")
_GHOST: Final = re.compile(r"\s*rename\s+/\*\s*gh-ost\s*\*/\s*table\b", re.I)
_UNDOES: Final = re.compile(r"\s*ROLLBACK\b.*\bTO\b", re.I | re.S)
_PURE: Final = frozenset(
    re.findall(
        r"\w+",
        """
        values value in on set and or not using key where when then else between like case if ifnull nullif
        coalesce concat now current_timestamp current_date curdate curtime unix_timestamp from_unixtime date
        time timestamp year month day date_format str_to_date date_add date_sub adddate subdate
        timestampdiff timestampadd datediff least greatest abs ceil ceiling floor round mod truncate length
        char_length lower upper lcase ucase trim ltrim rtrim left right substring substr mid lpad rpad
        replace repeat reverse instr locate position find_in_set cast convert hex unhex md5 sha1 sha2 crc32
        count sum min max avg rand uuid last_insert_id version database user char varchar signed unsigned
        decimal binary json_extract json_set json_object json_array row
        """,
    )
)
_HASH_COLUMN: Final = re.compile(r"DB_ROW_HASH_\d+")
_ID_BITS = 48
Wants = Callable[[str, str], bool]


@dataclass(slots=True)
class Effect:
    """A statement's effect: `touched` tables by their new names, with their ids, -1 for new ones.

    Of `moved` tables rows came or went without row events; `filled` ones are new, and had rows
    before: where they were not taken by the names they had then, these are the `foreign` ones.
    """

    touched: dict[TableName, int] = field(default_factory=dict)
    dropped: list[TableName] = field(default_factory=list)
    truncated: list[TableName] = field(default_factory=list)
    moved: list[TableName] = field(default_factory=list)
    filled: list[TableName] = field(default_factory=list)
    foreign: list[TableName] = field(default_factory=list)
    taken_over: set[TableName] = field(default_factory=set)
    """Names whose table another one has become, as gh-ost and pt-online-schema-change end."""
    copies: dict[TableName, TableName] = field(default_factory=dict)
    """Those of them whose other table gh-ost made as their copy, and what that was called."""
    names_before: dict[TableName, TableName] = field(default_factory=dict)
    """Old names by new ones, of tables that were renamed."""

    def __bool__(self) -> bool:
        return bool(self.touched or self.dropped or self.truncated or self.moved)

    @property
    def reloaded(self) -> set[TableName]:
        """The tables among those taken over whose other table is no copy: it has any rows."""
        return self.taken_over - self.copies.keys()


class Tables:
    """The tables of a changefeed that are in force at a place of the log."""

    def __init__(self, tables: Iterable[SourceTable]) -> None:
        self.by_name: dict[TableName, SourceTable] = {name_of(table): table for table in tables}

    def by_id(self, table_id: int) -> SourceTable | None:
        """Find a table by its id, whatever its name is now."""
        return next(
            (table for table in self.by_name.values() if table.span.table_id == table_id), None
        )

    def effect(self, statement: Statement, wants: Wants, *, by_ghost: bool = False) -> Effect:
        """Compute what a DDL does to these tables; `by_ghost`: gh-ost says that it is its own."""
        ids = {name: table.span.table_id for name, table in self.by_name.items()}
        moves = _Moves(ids, wants, by_ghost=by_ghost)
        for action in statement.actions:
            moves.apply(action)
        return moves.ended()

    def check(self, statement: Statement, sql: str, at: str, commit_ts: int) -> None:
        """Refuse a statement that may change rows of ours,
        or that is not understood and may change a table of ours.

        Raises:
            StatementLoggedError, DdlUnknownError: with the statement's beginning, where it stands
                in the log, and how the changefeed goes on after it.
        """
        mine = {table.lower() for _, table in self.by_name}
        if not mine:
            return
        text = sql.lower()
        # these are no words
        odd = {name for name in mine if not _PLAIN_NAME.fullmatch(name)}
        seen = sorted(mine & statement.words | {name for name in odd if name in text})
        if statement.kind is Kind.ROWS:
            tree = statement.tree
            if isinstance(tree, CreateTable):
                if tree.name in self.by_name:
                    raise statement_logged(
                        sql, at, commit_ts, "a temporary table has the name of a captured one"
                    )
            elif seen or changed_alone(statement) is None:
                raise statement_logged(sql, at, commit_ts, "it may change rows of captured tables")
        schemas = {schema.lower() for schema, _ in self.by_name}
        seen = sorted({*seen, *schemas & statement.words})
        if statement.kind is Kind.UNKNOWN and (seen or _UNDOES.match(sql)):
            what = f"may change {', '.join(seen) or 'rows of captured tables'}"
            raise _ddl_unknown(statement, f"{_short(sql)!r} at {at} {what}", commit_ts)

    def check_new(self, logged: LoggedStatement, wants: Wants) -> None:
        """Refuse a statement that is not understood and may make a table that the changefeed takes:
        its rows may be in no event.

        Raises:
            DdlUnknownError: as `check`.
        """
        statement, query = logged.statement, logged.query
        if statement.kind is not Kind.UNKNOWN or query.error_code:
            return
        words = re.findall(r"[\w$]+", query.sql)
        names = {(query.schema, word) for word in words} | {*itertools.pairwise(words)}
        if any(wants(*name) for name in names):
            at = f"{logged.file}:{logged.position}"
            what = f"{_short(query.sql)!r} at {at} may make a table that the changefeed takes"
            raise _ddl_unknown(statement, what, logged.commit_ts)

    def check_savepoint(self, unclear: UnclearSavepoint, *, nested: Callable[[], bool]) -> None:
        """Refuse a ROLLBACK TO that may undo rows of ours; `nested`:
        whether functions or triggers may set savepoints.

        Raises:
            SavepointUnclearError: which rows it undoes is not known.
        """
        touches = (
            bool(self.by_name)
            if unclear.tables is None
            else not unclear.tables.isdisjoint(self.by_name)
        )
        if touches and not (unclear.nests and not nested()):
            raise SavepointUnclearError(
                f"ROLLBACK TO SAVEPOINT {unclear.name!r} in the transaction at "
                f"{unclear.commit_ts} undoes rows, and {unclear.reason}: create the changefeed "
                "anew with a dump, or dump its tables after a resume with "
                "--overwrite-checkpoint-ts. Give savepoints in functions and triggers names of "
                "their own, and let the user of the source see all routines and triggers "
                "(TRIGGER on *.*, SELECT on mysql.proc)"
            )

    def apply(self, tables: Iterable[SourceTable], dropped: Iterable[TableName]) -> None:
        """A change is in force."""
        for name in dropped:
            self.by_name.pop(name, None)
        brought = {table.span.table_id: name_of(table) for table in tables}
        for name, table in list(self.by_name.items()):
            if brought.get(table.span.table_id, name) != name:
                del self.by_name[name]  # it was renamed
        self.by_name |= {name_of(table): table for table in tables}


class _Moves:
    """The ids of tables by their names, while the actions of one statement are applied in order."""

    def __init__(self, ids: dict[TableName, int], wants: Wants, *, by_ghost: bool) -> None:
        self._before = dict(ids)
        self._now = ids
        self._hidden: dict[TableName, int] = {}
        """Tables that have names the changefeed does not take."""
        self._came: dict[TableName, TableName] = {}
        """The names that tables had which the changefeed did not take."""
        self._effect = Effect()
        self._wants = wants
        self._by_ghost = by_ghost

    def apply(self, action: Action) -> None:
        name, now = action.name, self._now
        if action.verb is Verb.SCHEMA_DROPPED:
            for each in [each for each in now if each[0] == name[0]]:
                self._drop(each)
        elif action.verb is Verb.DROPPED:
            self._drop(name)
        elif action.verb is Verb.RENAMED and action.to is not None:
            self._rename(name, action.to, if_exists=action.if_exists)
        elif action.verb is Verb.TRUNCATED:
            if name in now:
                self._effect.truncated.append(name)
        elif action.verb is Verb.ROWS_MOVED:
            if name in now and name not in self._effect.moved:
                self._effect.moved.append(name)
        elif action.verb is Verb.FILLED:
            if self._wants(*name):
                self._effect.touched[name] = now.setdefault(name, _NEW)
                self._effect.filled.append(name)
        elif name in now or self._wants(*name):
            self._make(name, alters=action.verb is Verb.ALTERED)

    def _make(self, name: TableName, *, alters: bool) -> None:
        """A table is created, or altered; one that could not be replicated until now has rows."""
        if alters and self._now.get(name, _NEW) == _NEW:
            self._effect.filled.append(name)
        self._effect.touched[name] = self._now.setdefault(name, _NEW)

    def ended(self) -> Effect:
        effect, before = self._effect, self._before
        hidden = {self._name_before(table_id): name for name, table_id in self._hidden.items()}
        for name, table_id in self._now.items():
            # another table took its place
            if table_id == _NEW and name in hidden:
                effect.touched[name] = before[name]
                effect.taken_over.add(name)
                came, gone_to = self._came.get(name, name), hidden[name]
                if self._by_ghost and _is_of_ghost(name[1], came[1], gone_to[1]):
                    effect.copies[name] = came
            elif (was := self._name_before(table_id)) is not None and was != name:
                effect.names_before[name] = was
        gone = [name for name in before if name not in self._now and name not in effect.dropped]
        effect.dropped += gone
        # What the statement itself has dropped again needs neither to be read nor to be copied.
        still = {*self._now, *effect.names_before.values()}
        effect.moved = [name for name in effect.moved if name in still]
        effect.filled = [name for name in effect.filled if effect.touched.get(name) == _NEW]
        # Only a table that is new to the changefeed can lack rows from before.
        if not any(table_id == _NEW for table_id in effect.touched.values()):
            effect.foreign.clear()
        return effect

    def _drop(self, name: TableName) -> None:
        if self._now.pop(name, None) is not None:
            self._effect.touched.pop(name, None)
            if name in self._before:
                self._effect.dropped.append(name)
        self._hidden.pop(name, None)

    def _rename(self, old: TableName, new: TableName, *, if_exists: bool) -> None:
        is_known = old in self._now or old in self._hidden
        if if_exists and new in self._now and not is_known:
            # The new name was taken, so the old one was missing. Or the table was renamed between
            # the start and the look at the server's tables: then a dump reads what it held.
            return
        table_id = self._now.pop(old, None)
        self._effect.touched.pop(old, None)
        if table_id is None:
            table_id = self._hidden.pop(old, None)
        if not self._wants(*new):
            # Under a name that the filter does not take; a later action may bring it back.
            if table_id is not None:
                self._hidden[new] = table_id
            return
        if table_id is None:
            self._effect.foreign.append(old)
            self._came[new] = old
        if table_id is None or old in self._effect.filled:
            self._effect.filled.append(new)
        self._now[new] = self._effect.touched[new] = _NEW if table_id is None else table_id

    def _name_before(self, table_id: int) -> TableName | None:
        return next((name for name, each in self._before.items() if each == table_id), None)


def has_gh_ost_comment(sql: str) -> bool:
    """Whether a statement has the comment that gh-ost writes into each of its statements."""
    return bool(_GHOST.match(sql))


def _is_of_ghost(name: str, came: str, gone: str) -> bool:
    """Whether these are the names of gh-ost's tables: the one that comes is a whole copy then.

    pt-online-schema-change says nothing in its statement, so that its names may be anybody's, and
    its --where leaves rows out.
    """
    own = re.escape(name)
    return bool(re.fullmatch(f"_{own}_gho", came) and re.fullmatch(rf"_{own}_(\d+_)?del", gone))


def name_of(table: SourceTable) -> TableName:
    """Schema and table."""
    return table.record.schema_name, table.record.table_name


def changed_alone(statement: Statement) -> TableName | None:
    """The only table that a statement changes, if nothing in it calls what may change others but
    triggers.
    """
    tree = statement.tree
    if not isinstance(tree, Dml) or tree.target is None:
        return None
    return tree.target if tree.calls <= _PURE | {tree.target[1].lower()} else None


def statement_logged(sql: str, at: str, commit_ts: int, why: str) -> StatementLoggedError:
    """A statement changed rows that no event has."""
    return StatementLoggedError(
        f"the log has a change of rows as a statement ({_short(sql)!r} at {at}), so its rows are "
        f"not known, and {why}: its session had binlog_format STATEMENT or MIXED (SET SESSION, "
        "SET STATEMENT, or the server's setting). Set binlog_format=ROW on the server and in all "
        "sessions, then create the changefeed anew with a dump, or, if no captured table was "
        f"changed, resume it with --overwrite-checkpoint-ts {commit_ts}, which is after it"
    )


def _ddl_unknown(statement: Statement, what: str, commit_ts: int) -> DdlUnknownError:
    return DdlUnknownError(
        f"{what}, and is not understood ({statement.reason}): if it does not, resume the "
        f"changefeed with --overwrite-checkpoint-ts {commit_ts}, which is after it; else create it "
        "anew with a dump"
    )


def _short(sql: str) -> str:
    # Literals are values of rows, and what is shown goes to whoever sees the changefeed's state.
    return " ".join(sql_statement(sql).split())[:120]


@dataclass(frozen=True, slots=True)
class CatalogFacts:
    """The facts that a statement leaves to the server: its collations, a schema's default
    collation, and definitions for records of old versions, which lack keys or collations.
    """

    collations: Collations = field(default_factory=Collations)
    schema_collation: str = ""
    """What text columns of a new table have by default, if its statement says nothing."""
    definitions: Mapping[TableName, Definition] = field(default_factory=dict)


@dataclass(slots=True)
class DdlOutcome:
    """The tables that a statement touched, as they are after it, by their new names;
    `lost` are those that the statement alone does not define, and why.
    """

    tracked: dict[TableName, Tracked] = field(default_factory=dict)
    lost: dict[TableName, str] = field(default_factory=dict)
    faults: dict[TableName, tuple[str, ...]] = field(default_factory=dict)
    """Why lost ones cannot be replicated, as far as the statement says so."""


class StatementOutcome:
    """Computes the outcome of one statement; `tables` are the changefeed's tables before it."""

    def __init__(
        self, tables: Tables, logged: LoggedStatement, effect: Effect, facts: CatalogFacts
    ) -> None:
        self._tables = tables
        self._logged = logged
        self._effect = effect
        self._catalog_facts = facts
        collations = facts.collations.of_session(logged.query.default_collations)
        self._context = Context(collations, logged.dialect, facts.schema_collation)

    def read(self) -> DdlOutcome:
        """Compute the outcome, a touched table at a time."""
        tree = self._logged.statement.tree
        outcome = DdlOutcome()
        for name, table_id in self._effect.touched.items():
            source_table = self._tables.by_id(table_id)
            before = Table.parse(source_table.record.table_info) if source_table else None
            if before is not None and name in self._catalog_facts.definitions:
                before = completed(before, self._catalog_facts.definitions[name])
            try:
                outcome.tracked[name] = self._tracked(name, before)
            except LostError as err:
                outcome.lost[name] = str(err)
                if isinstance(tree, CreateTable) and name == tree.name:
                    outcome.faults[name] = faults_of(tree)
        return outcome

    def _tracked(self, name: TableName, before: Table | None) -> Tracked:
        tree, effect = self._logged.statement.tree, self._effect
        if name in effect.taken_over:
            raise LostError("another table has taken its place")
        if isinstance(tree, CreateTable):
            if before is not None:
                if tree.if_not_exists:
                    return Tracked(before)
                raise LostError("it was dropped without a statement in the log")
            return self._created(tree)
        if before is None:
            raise LostError("it was not followed until now")
        # ALTER … RENAME names the table as it was before, `name` as it is behind the statement.
        if isinstance(tree, AlterTable) and effect.names_before.get(name, name) == tree.name:
            tracked = altered(before, tree, self._context)
            return replace(tracked, table=replace(tracked.table, name=name[1]))
        return Tracked(replace(before, name=name[1]))

    def _created(self, tree: CreateTable) -> Tracked:
        first = first_column_id(self._tables, tree.name)
        table_id = new_id(self._logged.commit_ts, tree.name)
        source = self._tables.by_name.get(tree.like) if tree.like is not None else None
        if source is not None:
            return copied(Table.parse(source.record.table_info), tree, table_id, first)
        return created(tree, table_id, first, self._context)


def first_column_id(tables: Tables, name: TableName) -> int:
    """The first column id of a new table; above those of a table that it replaces."""
    replaced = tables.by_name.get(name)
    return Table.parse(replaced.record.table_info).free_column_id if replaced else 1


def completed(table: Table, definition: Definition) -> Table:
    """The table with what records of old versions lack, as far as the catalogue,
    which may be further, fits them.
    """
    indexes = table.indexes
    theirs = definition.indexes
    if (
        indexes is None
        and theirs is not None
        and row_key(table.columns, theirs) == table.primary_key
    ):
        indexes = theirs
    return replace(table, indexes=indexes, collation=table.collation or definition.collation)


def is_incomplete(record: TableRecord) -> bool:
    """Whether an old version wrote a record, with less than it takes to follow a statement."""
    return "indexes" not in record.table_info or "collation" not in record.table_info


def new_id(commit_ts: int, name: TableName) -> int:
    """The id of a table that a DDL at `commit_ts` brings; above the ids of a snapshot, which are
    small, and below 2^53.
    """
    digest = hashlib.blake2b(
        f"{commit_ts} {name[0]}\0{name[1]}".encode(), digest_size=_ID_BITS // 8
    ).digest()
    return int.from_bytes(digest, "big") | 1 << _ID_BITS


def record_of(definition: Definition, table_id: int) -> TableRecord:
    """The record of a table; what makes it ineligible is noted in it."""
    doc = definition.table(table_id).to_doc()
    if definition.faults:
        doc["ineligible"] = "; ".join(definition.faults)
    return TableRecord(definition.name[0], doc, definition.matched_by_names)


def definition_of_table_map(
    table_map: TableMap, definitions: Sequence[Table | Definition]
) -> Definition:
    """A definition as a TABLE_MAP event has it; where that has no primary key,
    the key is that of the `known` ones.

    Hidden columns are left out, unless one of the `known` ones has a column of that name.
    """
    names = {column.name for each in definitions for column in each.columns}
    table_map.check_full()
    columns = [replace(column, generated=UNTOLD) for column in table_map.columns]
    while columns and is_hidden(columns[-1]) and columns[-1].name not in names:
        columns.pop()
    places = {column.name: column for column in columns}
    keys = [
        table_map.primary_key,
        *(each.key if isinstance(each, Definition) else each.primary_key for each in definitions),
    ]
    usable = (
        key
        for key in keys
        if key and all(name in places and not places[name].nullable for name in key)
    )
    name = table_map.schema, table_map.table
    faults = tuple(_old_times(columns, definitions))
    return Definition(name, tuple(columns), next(usable, ()), faults=faults)


def _old_times(
    columns: Sequence[Column], definitions: Sequence[Table | Definition]
) -> Iterator[str]:
    """Faults of times in an old format that have fractions of a second by the first definition that
    has the column: a TABLE_MAP does not tell how long these are.
    """
    known: dict[str, Column] = {}
    for each in definitions:
        known = {column.name: column for column in each.columns} | known
    for column in columns:
        of_today = known.get(column.name)
        if of_today is not None and of_today.meta and SINCE_5_6.get(column.type) is of_today.type:
            yield old_time_fault(column.name)


def is_hidden(column: Column) -> bool:
    """Whether it may be the hash of a unique key that is too long to be an index,
    which a MariaDB keeps in its rows.

    It has one behind the other columns for each such key, in the log, but in no SELECT and no
    catalogue.
    """
    is_number = column.type is Type.LONGLONG and column.unsigned
    return is_number and bool(_HASH_COLUMN.fullmatch(column.name))


def same_keys(one: SourceTable, other: SourceTable) -> bool:
    """Whether both versions of a table have the same columns as their key,
    with values in the same order.
    """
    mine, its = (Table.parse(each.record.table_info) for each in (one, other))
    return _ordered_by(mine) == _ordered_by(its)


def _ordered_by(table: Table) -> Sequence[tuple[str, Column | Type | int]]:
    return [
        (column.name, _order(column)) for column in map(table.columns.__getitem__, table.key_places)
    ]


def _order(column: Column) -> Column | Type | int:
    """The properties by which values of a column are ordered; of texts the collation."""
    if column.type in INTEGERS:
        return Type.LONGLONG
    return column.collation if column.type in STRINGS else column
