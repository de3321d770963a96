"""Whether the server has the tables that its log speaks of, looked at while the log stands still.

A log can leave out a DDL, by `sql_log_bin=0`, or have one that did something else: MariaDB logs
RENAME of a temporary table as if it were the real table's. Rows that come later tell some of it; a
table that is gone, or gets no rows, nobody tells. So the tables that were followed are compared
with the catalogue, once a minute at most. A difference is a warning of the changefeed, and no more:
which rows there are at the server is told by no event, and only a person knows what was done.

A look counts only if the log ended where the puller is, before it and after it, and each table that
differs could be opened, or was told to be missing: what a DDL that is under way does to the
catalogue is nobody's difference.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import structlog

from server.puller import metrics
from server.puller.mysql.ddl.tree import TableName
from server.puller.mysql.session.catalogue import (
    read_columns,
    read_definitions,
    shows,
    table_names,
)
from server.puller.mysql.session.connection import Session, log_in
from server.puller.mysql.session.options import MySqlOptions
from server.puller.mysql.transaction.scanner import Place, log_end
from storage.model.errors import TidemarkError
from storage.mysql.schema import Column, Table

_COLUMNS_OF: Final = 500
"""Tables whose columns one look compares; the next one goes on with others."""
_SHOWN: Final = 5
GONE: Final = "it is gone"
Columns: TypeAlias = Mapping[str, Column | None]
"""By name; None: its type is not compared."""
_NO_SUCH_TABLE: Final = "(the server: 1146 "
_LOCK_WAIT_S: Final = 1

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Followed:
    """The tables as the log made them, at a place in it."""

    place: Place
    tables: Mapping[TableName, Mapping[str, Any]]
    """The documents of their records (docs/format/mysql-rows.md)."""
    passed_over: Collection[TableName]
    """Tables that the changefeed does not take though its filter does."""


def differing(
    followed: Mapping[TableName, Columns | None], catalogue: Mapping[TableName, Columns | None]
) -> dict[TableName, str]:
    """The reason for each table that differs between the log and the server, by name. Pure.

    `catalogue` has all tables that the changefeed would take. None: the columns are not compared.
    """
    reasons: dict[TableName, str] = {}
    for name, columns in followed.items():
        if name not in catalogue:
            reasons[name] = GONE
            continue
        now = catalogue[name]
        if columns is None or now is None:
            continue
        was, now = _shown(columns), _shown(now)
        both = was.keys() & now.keys()
        changes = [
            *(f"column {each} is gone" for each in sorted(was.keys() - both)),
            *(f"column {each} has come" for each in sorted(now.keys() - both)),
            *(
                f"column {each} has another type"
                for each in sorted(both)
                if not _same(was[each], now[each])
            ),
        ]
        if changes:
            reasons[name] = ", ".join(changes)
    return reasons | dict.fromkeys(catalogue.keys() - followed.keys(), "it has come")


def _same(was: Column | None, now: Column | None) -> bool:
    return was is None or now is None or shows(now, was)


def _shown(columns: Columns) -> dict[str, Column | None]:
    # Servers hide what they add themselves: MySQL's key of tables without one, if it is told to,
    # and MariaDB's hashes of long keys.
    shown = {name.lower(): column for name, column in columns.items()}
    return {name: shown[name] for name in shown.keys() - {"my_row_id", "db_row_hash_1"}}


class CatalogueCheck:
    """Compares one changefeed's tables with the server's again and again; `differences` are those
    of the last comparison.
    """

    def __init__(self, changefeed: str, options: MySqlOptions) -> None:
        self.differences: Mapping[TableName, str] = {}
        self._changefeed = changefeed
        self._options = options
        self._asked: asyncio.Future[Followed] | None = None
        self._next_table = 0

    @property
    def warnings(self) -> Sequence[str]:
        """The warnings that `changefeed query` shows."""
        if not self.differences:
            return ()
        shown = [
            f"{'.'.join(name)} ({why})" for name, why in sorted(self.differences.items())[:_SHOWN]
        ]
        more = len(self.differences) - len(shown)
        rest = f" and {more} more" if more > 0 else ""
        text = (
            "tables at the server are not what its log made of them (sql_log_bin=0, or RENAME of a "
            f"temporary table): {', '.join(shown)}{rest}. Rows in the lake may be wrong. To take "
            "the tables as they are now: pause the changefeed, resume it with "
            "--overwrite-checkpoint-ts now, then dumpstart"
        )
        return (text,)

    async def run(self, wants: Callable[[str, str], bool], executor: Executor) -> None:
        """Look every `catalogue_check_s` until cancelled; a look that fails is left out."""
        gauge = metrics.CATALOGUE_DIFFERENCES
        gauge.labels(self._changefeed).set(len(self.differences))
        try:
            await self._look_often(wants, executor)
        finally:
            # The changefeed is paused or removed, or goes on in another capture: nobody looks here
            # any more, so the last look must not keep the alert up.
            gauge.remove(self._changefeed)

    async def _look_often(self, wants: Callable[[str, str], bool], executor: Executor) -> None:
        loop = asyncio.get_running_loop()
        while self._options.catalogue_check_s:
            await asyncio.sleep(self._options.catalogue_check_s)
            self._asked = loop.create_future()
            followed = await self._asked
            try:
                differences = await loop.run_in_executor(executor, self._look, followed, wants)
            except TidemarkError as err:
                _log.debug("the catalogue cannot be compared", reason=err.message)
                continue
            if differences is not None:
                self._note(differences)

    def give(self, followed: Callable[[], Followed]) -> None:
        """Called where all that was read of the log is in force; what it gives is looked at if a
        look is due.
        """
        if self._asked is not None and not self._asked.done():
            self._asked.set_result(followed())

    def _look(
        self, followed: Followed, wants: Callable[[str, str], bool]
    ) -> Mapping[TableName, str] | None:
        """Compare the tables with the server's; None: the log went on meanwhile, so that they
        cannot be compared.
        """
        with log_in(self._options) as session:
            if log_end(session) != followed.place:
                return None
            differences = self._compared(session, followed, wants)
            return differences if log_end(session) == followed.place else None

    def _compared(
        self, session: Session, followed: Followed, wants: Callable[[str, str], bool]
    ) -> dict[TableName, str]:
        names = [name for name in table_names(session) if wants(*name)]
        still_there = sorted(followed.tables.keys() & set(names))
        first = self._next_table if self._next_table < len(still_there) else 0
        chosen = still_there[first : first + _COLUMNS_OF]
        self._next_table = first + len(chosen)
        catalogue: dict[TableName, Columns | None] = dict.fromkeys(still_there)
        for name, columns in read_columns(session, chosen).items():
            catalogue[name] = {each: column for each, column, _ in columns}
        was: dict[TableName, Columns | None] = dict.fromkeys(followed.tables)
        was |= {name: _columns(followed.tables[name]) for name in chosen}
        others = [
            name for name in names if name not in catalogue and name not in followed.passed_over
        ]
        catalogue |= dict.fromkeys(_eligible(session, others[:_COLUMNS_OF]))
        differences = differing(was, catalogue)
        # What an earlier look told of tables that this one did not read stays.
        differences |= {
            name: why
            for name, why in self.differences.items()
            if name in still_there and name not in chosen
        }
        session.execute(f"SET SESSION lock_wait_timeout={_LOCK_WAIT_S}")
        return {
            name: why
            for name, why in differences.items()
            if _is_missing(session, name) is (why == GONE)
        }

    def _note(self, differences: Mapping[TableName, str]) -> None:
        if differences and differences != self.differences:
            _log.warning(
                "tables at the server are not what its log made of them",
                changefeed=self._changefeed,
                tables={".".join(name): why for name, why in sorted(differences.items())[:_SHOWN]},
            )
        self.differences = differences
        metrics.CATALOGUE_DIFFERENCES.labels(self._changefeed).set(len(differences))


def _columns(document: Mapping[str, Any]) -> Columns:
    return {column.name: column for column in Table.parse(document).columns}


def _eligible(session: Session, names: Sequence[TableName]) -> list[TableName]:
    """Those that a changefeed can replicate: others may be left out since it was created."""
    definitions = read_definitions(session, names).values()
    return [each.name for each in definitions if each.key and not each.faults]


def _is_missing(session: Session, name: TableName) -> bool | None:
    """Whether the server says that there is no such table; None: a DDL has it, or it may not be
    opened.
    """
    quoted = ".".join(f"`{part.replace('`', '``')}`" for part in name)
    try:
        session.execute(f"SELECT 1 FROM {quoted} LIMIT 0")  # noqa: S608 - quoted
    except TidemarkError as err:
        return True if _NO_SUCH_TABLE in err.message else None
    return False
