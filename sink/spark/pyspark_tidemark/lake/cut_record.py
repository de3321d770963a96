"""Cuts as the manifest keeps them: records, their JSON lines,
and what they say about a table at a commit_ts. Pure.

Format: docs/format/lake-manifest.md. Members that a record does not have are left out, so that the
lines of older and newer jobs read the same.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pyspark_tidemark.errors import SourceError

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class TableCut:
    """One table in a cut: changes applied, and the version (Delta),
    snapshot (Iceberg) or cut that holds them.
    """

    table: str
    rows: int
    version: int
    checksum: str | None = None
    """Of the changes in this cut (`lake.checksum`);
    None in a record that only carries the version on.
    """
    replaced: int | None = None
    """Keys that the cut inserts and that the table had already: their rows were replaced;
    None for none.
    """

    def to_document(self) -> dict[str, Any]:
        """Members for JSON."""
        return {
            name: value for name, value in dataclasses.asdict(self).items() if value is not None
        }


@dataclasses.dataclass(frozen=True)
class CutRecord:
    """One committed cut `(start_ts, end_ts]`."""

    changefeed: str
    start_ts: int
    end_ts: int
    batch: int
    applied_at: str
    tables: tuple[TableCut, ...]
    mode: str | None = None
    dropped: tuple[str, ...] = ()
    """Tables that end with the DDL at start_ts, and are not part of this cut or later ones."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Tables' (old, new) names, from the DDL at start_ts on."""
    skipped: tuple[tuple[int, int], ...] = ()
    """All ranges `(start_ts, end_ts]` up to this cut that were never delivered, ascending;
    see `is_skipped`.
    """

    @property
    def is_skipped(self) -> bool:
        """Whether this cut itself is such a range: it brings no changes,
        and tables are as they were before it.
        """
        return (self.start_ts, self.end_ts) in self.skipped

    def to_json(self) -> str:
        """The document, in one line."""
        fields = {
            name: value for name, value in dataclasses.asdict(self).items() if value is not None
        }
        fields["tables"] = [item.to_document() for item in self.tables]
        for name in ("dropped", "renamed", "skipped"):
            if not fields[name]:
                del fields[name]
        return json.dumps({"format": FORMAT} | fields)

    @classmethod
    def from_json(cls, text: str) -> "CutRecord":
        """Read a document.

        Raises:
            SourceError: ErrManifestCorrupt, not a document of this format.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.pop("format") != FORMAT:
                raise SourceError(
                    "ErrManifestCorrupt",
                    f"the manifest has another format than {FORMAT}: {text[:80]}",
                )
            tables = tuple(TableCut(**item) for item in fields.pop("tables"))
            dropped = tuple(fields.pop("dropped", ()))
            renamed = tuple((old, new) for old, new in fields.pop("renamed", ()))
            skipped = tuple((start_ts, end_ts) for start_ts, end_ts in fields.pop("skipped", ()))
            return cls(tables=tables, dropped=dropped, renamed=renamed, skipped=skipped, **fields)
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise SourceError(
                "ErrManifestCorrupt", f"the manifest cannot be read: {err} in {text[:80]!r}"
            ) from None


@dataclasses.dataclass(frozen=True)
class Shown:
    """What the newest cut shows of a table."""

    version: int
    since_ts: int
    """The end of the cut that brought the version; 0: that is not known."""


def records(lines: Iterable[str]) -> list[CutRecord]:
    """The records of many lines, by end_ts; a cut that stands in two files, as after a crash,
    is one.
    """
    by_ts = {
        record.end_ts: record
        for record in (CutRecord.from_json(line) for line in lines if line.strip())
    }
    return [by_ts[ts] for ts in sorted(by_ts)]


def covered(ranges: Sequence[tuple[int, int]], start_ts: int, end_ts: int) -> bool:
    """Whether ascending ranges `(start_ts, end_ts]` leave nothing out of that one."""
    for begin, end in ranges:
        if begin <= start_ts < end:
            start_ts = end
    return start_ts >= end_ts


def versions_at(cuts: Sequence[CutRecord], ts: int) -> dict[str, int]:
    """The version of each table that shows it at the newest cut with end_ts <= ts.

    Raises:
        SourceError: ErrCutNotFound, the lake begins later.
    """
    return {name: item.version for name, item in _tables_at(cuts, ts).items()}


def shown_by(cuts: Iterable[CutRecord]) -> dict[str, Shown]:
    """What the last of some cuts shows of each table; the first one must name all of them
    (`rolled`), or be the lake's first.
    """
    tables: dict[str, Shown] = {}
    for cut in cuts:
        tables = after_statements(tables, cut.dropped, cut.renamed)
        for item in cut.tables:
            if item.table not in tables or tables[item.table].version != item.version:
                # Without a checksum an earlier cut has brought it.
                since_ts = 0 if item.checksum is None else cut.end_ts
                tables[item.table] = Shown(item.version, since_ts)
    return tables


def after_statements(
    tables: Mapping[str, Shown], dropped: Iterable[str], renamed: Iterable[tuple[str, str]]
) -> dict[str, Shown]:
    """The tables under the names that they have above a barrier."""
    left = {name: shown for name, shown in tables.items() if name not in {*dropped}}
    for old, new in renamed:
        if old in left:
            left[new] = left.pop(old)
    return left


def renamed_since(cuts: Sequence[CutRecord], name: str, ts: int) -> str:
    """The name that the table `name` of the newest cut with end_ts <= `ts` has now.

    Raises:
        SourceError: ErrCutExpired, another table was given that name, after this one had been
            dropped.
    """
    for cut in cuts:
        for old, new in cut.renamed if cut.end_ts > ts else ():
            if old == name:
                name = new
            elif new == name:
                raise SourceError(
                    "ErrCutExpired",
                    f"{old} took the place of {name} above {cut.start_ts}; choose a ts above that",
                )
    return name


def rolled(before: Sequence[CutRecord], cuts: Sequence[CutRecord]) -> list[CutRecord]:
    """`cuts`, of which the first also names the tables that only `before` knows,
    with their version and no rows.
    """
    shown = _tables_at([*before, cuts[0]], cuts[0].end_ts)
    own = {item.table for item in cuts[0].tables}
    old = [
        TableCut(name, 0, item.version) for name, item in sorted(shown.items()) if name not in own
    ]
    return [dataclasses.replace(cuts[0], tables=(*cuts[0].tables, *old)), *cuts[1:]]


def _tables_at(cuts: Sequence[CutRecord], ts: int) -> dict[str, TableCut]:
    if not cuts or cuts[0].end_ts > ts:
        begins = f"the first cut ends at {cuts[0].end_ts}" if cuts else "it has no cut yet"
        raise SourceError("ErrCutNotFound", f"the lake does not go back to {ts}: {begins}")
    tables: dict[str, TableCut] = {}
    for cut in cuts:
        if cut.end_ts > ts:
            break
        for name in cut.dropped:
            tables.pop(name, None)
        for old, new in cut.renamed:
            if old in tables:
                tables[new] = dataclasses.replace(tables.pop(old), table=new)
        tables |= {item.table: item for item in cut.tables}
    return tables
