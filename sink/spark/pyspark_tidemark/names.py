"""Names of tables and columns that a target cannot hold,
and the options that keep them away from it. Pure.

Captures ask before they make a changefeed, lake jobs before they write: PostgreSQL cuts a long name
off without a word, and what a database refuses, it refuses at every start. The rules of each format
are in its record (`lake.format.NameRules`). What databases, Delta and Iceberg take was found by
trying it (`test_names.py` and `test_evolution.py` in tests/integration/lake), what readers of
Iceberg and Parquet have of their own by reading their code.
"""

import re
import shlex
from collections.abc import Iterable
from typing import Final

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.format import NameRules
from pyspark_tidemark.lake.registry import FORMATS

_IN_FILTERS: Final = re.compile(r"(?:[a-zA-Z0-9_$-]|[^\x00-\x7f])+")
"""Names that a table filter has without quotes."""
_IN_COLUMN_RULES: Final = re.compile(r"(?![!\s])(?:(?!->)[^,*?])+(?<!\s)")
"""Names that a rule about columns can give."""
_NEW_CHARACTERS_MAX: Final = 40
_ANY_NAME: Final = NameRules()


Table = tuple[str, str]
"""The database's name, and the table's own."""


def check_names(target: str, table: Table, columns: Iterable[str]) -> None:
    """Check that a target of the format `target` takes the names of a table and its columns.

    Raises:
        SourceError: ErrNameUnsupported, with the option of `changefeed create` that keeps the names
            away from it.
    """
    shown = ".".join(table)
    # as the target parts it, wherever the dots are
    database, _, name = shown.partition(".")
    rules = _rules(target)
    fault = rules.database(database) or rules.identifier(database) or rules.identifier(name)
    if fault:
        raise _unsupported(
            f"a {target} target cannot hold the table {shown}: {fault}. {leaving_out(table)}"
        )
    names = list(columns)
    faults = {
        column: fault
        for column in names
        if (fault := rules.column(column) or rules.identifier(column))
    }
    if faults:
        reasons = "; ".join(faults.values())
        way_out = renaming(table, faults, names)
        raise _unsupported(
            f"a {target} target cannot hold all columns of {shown}: {reasons}. {way_out}"
        )


def check_distinct(target: str, tables: Iterable[Table]) -> None:
    """Check that a target of the format `target` can tell tables apart by their names.

    Raises:
        SourceError: ErrNameUnsupported, as `check_names`.
    """
    seen: dict[str, str] = {}
    for table in tables if _rules(target).ignores_case else ():
        shown = ".".join(table)
        other = seen.setdefault(shown.lower(), shown)
        if other != shown:
            raise _unsupported(
                f"a {target} target takes {other} and {shown} for one name. {leaving_out(table)}"
            )


def renaming(table: Table, columns: Iterable[str], taken: Iterable[str]) -> str:
    """What to do that `columns` of a table have other names in the target,
    none of those `taken`.
    """
    used = {name.lower() for name in taken}
    new_names = [(column, _new_name(column, used)) for column in columns]
    if not all(_IN_COLUMN_RULES.fullmatch(column) for column, _ in new_names):
        return f"Rename them at the source, or leave the table out. {leaving_out(table)}"
    rule = ",".join(
        [f"{_filter_rule(table)}=*", *(f"{column}->{new}" for column, new in new_names)]
    )
    return (
        f"Create the changefeed with --columns {shlex.quote(rule)}, which gives other names in "
        "the target"
    )


def leaving_out(table: Table) -> str:
    """What to do that a changefeed does not have a table."""
    return (
        f"Create the changefeed with --filter {shlex.quote('!' + _filter_rule(table))} as its "
        "last filter"
    )


def _rules(target: str) -> NameRules:
    # Readers of their own take any name; no job writes what is no format of a lake.
    record = FORMATS.get(target)
    return _ANY_NAME if record is None else record.names


def _unsupported(message: str) -> SourceError:
    return SourceError("ErrNameUnsupported", message)


def _new_name(column: str, used: set[str]) -> str:
    """A plain name like that of `column`, which is then one of those `used`."""
    plain = re.sub(r"[^0-9A-Za-z]+", "_", column).strip("_")[:_NEW_CHARACTERS_MAX]
    base = name = f"upstream_{plain or 'column'}"
    number = 1
    while name.lower() in used:
        number += 1
        name = f"{base}_{number}"
    used.add(name.lower())
    return name


def _filter_rule(table: Table) -> str:
    """The table filter's rule for just this table."""
    return ".".join(map(_filter_part, table))


def _filter_part(name: str) -> str:
    return name if _IN_FILTERS.fullmatch(name) else '"' + name.replace('"', '""') + '"'
