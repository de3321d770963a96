"""The tables of a changefeed through time: names, schemas and spans, and the DDLs between them.

Pure but for a lock.

Invariants:
1. A version is in force for rows with `from_ts` < commit_ts <= `to_ts`; those of one name never
   overlap, nor do those of one span. So a name may have several spans one after the other
   (TRUNCATE), and a span several names (RENAME).
2. DDLs have distinct ts, ascending; each that changes a version, or empties a table, is a barrier
   for cuts.
3. Nothing depends on when something was learned: whoever asks about a ts that is resolved always
   gets the same answer.

`Change` is what a DDL statement did as its source says it, `Ddl` the same as readers see it.
"""

import bisect
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from sink.errors import DdlOrderError
from sink.mounter import TableMounter
from sink.mounts import crosses
from sorter.errors import RangeCleanedError
from storage.model.span import Span
from storage.model.ts import MAX_TS

DDLS_MAX: Final = 1000


class Table(Protocol):
    """One table in one version, as its source reads it."""

    @property
    def name(self) -> str:
        """`schema.table`."""
        ...

    @property
    def span(self) -> Span:
        """Where its rows are."""
        ...

    @property
    def mounter(self) -> TableMounter:
        """Makes typed rows of its changes."""
        ...


class Change(Protocol):
    """One DDL statement's effect; see `server.puller.source.TableChange`."""

    @property
    def commit_ts(self) -> int:
        """Rows up to it have the old schema."""
        ...

    @property
    def query(self) -> str:
        """The statement."""
        ...

    @property
    def tables(self) -> Sequence[Table]:
        """Tables that are new, or have another schema, name or span."""
        ...

    @property
    def dropped(self) -> Sequence[str]:
        """Names without rows from now on."""
        ...

    @property
    def truncated(self) -> Sequence[str]:
        """Names whose rows are all gone."""
        ...


@dataclass(frozen=True, slots=True)
class Ddl:
    """A DDL as readers see it: `tables` have a new schema above `ts`,
    `dropped` end there; `renamed` is (old, new).
    """

    ts: int
    query: str
    tables: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    truncated: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """Every name it concerns."""
        return frozenset(
            {*self.tables, *self.dropped, *self.truncated, *(old for old, _ in self.renamed)}
        )


@dataclass(frozen=True, slots=True)
class Version:
    """A table for its rows with `from_ts` < commit_ts <= `to_ts`."""

    name: str
    span: Span
    mounter: TableMounter
    from_ts: int
    to_ts: int = MAX_TS

    def holds(self, ts: int) -> bool:
        """Whether it is in force for the rows right above `ts`."""
        return self.from_ts <= ts < self.to_ts


class Versions:
    """One writer, any number of readers in other threads."""

    def __init__(
        self, start_ts: int, tables: Iterable[Table], schema_ts: Mapping[str, int] | None = None
    ) -> None:
        """`tables` are those in force right above `start_ts`;
        `schema_ts` by name where it is an earlier DDL's.
        """
        self.start_ts = start_ts
        self._lock = threading.Lock()
        self._by_name: dict[str, tuple[Version, ...]] = {}
        self._by_span: dict[Span, tuple[Version, ...]] = {}
        self._ddls: dict[int, Ddl] = {}
        self._ts: list[int] = []
        self._ts_of: dict[str, list[int]] = {}
        for table in tables:
            self._open(table, (schema_ts or {}).get(table.name, start_ts))

    def is_known(self, change: Change) -> bool:
        """Whether this change was taken before, or is older than all that is kept.

        Raises:
            DdlOrderError: it is another one than that of its ts, or comes after a later one.
        """
        with self._lock:
            return self._is_known(change)

    def change(self, change: Change) -> Ddl | None:
        """Take the next DDL; returns what it does, None if it is known or concerns no table of
        ours.

        Raises:
            DdlOrderError: see `is_known`; nothing was changed.
        """
        with self._lock:
            # A source reports its DDLs once more after a restart.
            if self._is_known(change):
                return None
            ddl = self._ddl(change)
            if not ddl.names:
                return None
            replaced = {
                version.name for table in change.tables if (version := self._newest(table.span))
            }
            # All are closed before any is opened: one statement may exchange the names of tables.
            for name in {*ddl.dropped, *ddl.tables, *replaced}:
                self._close(name, ddl.ts)
            for table in change.tables:
                self._open(table, ddl.ts)
            for name in ddl.names:
                self._ts_of.setdefault(name, []).append(ddl.ts)
            self._ddls[ddl.ts] = ddl
            self._ts.append(ddl.ts)
            return ddl

    def adopt(self, table: Table, from_ts: int) -> Version:
        """Take a table that is in force since `from_ts`, as when it comes from another capture;
        one that is known in its span is taken anew.
        """
        with self._lock:
            self._release(table.span)
            self._open(table, from_ts)
            return self._by_span[table.span][-1]

    def release(self, span: Span) -> None:
        """Forget the tables of a span, as when another capture has them; none is no error."""
        with self._lock:
            self._release(span)

    def at(self, ts: int) -> list[Version]:
        """The tables in force for the rows right above `ts`, in the order in which they came.

        Raises:
            RangeCleanedError: `ts` is below all that is known.
        """
        with self._lock:
            self._check_kept(ts)
            return [
                version
                for versions in self._by_name.values()
                for version in versions
                if version.holds(ts)
            ]

    def unchanged(self, known_ts: int, ts: int) -> bool:
        """Whether the same tables, with the same schemas, are in force right above both."""
        with self._lock:
            is_within = self.start_ts <= known_ts <= ts
            return is_within and bisect.bisect_right(self._ts, known_ts) == bisect.bisect_right(
                self._ts, ts
            )

    def version(self, name: str, ts: int) -> Version | None:
        """The table of that name in force right above `ts`; None: there is none then."""
        with self._lock:
            return next(
                (version for version in self._by_name.get(name, ()) if version.holds(ts)), None
            )

    def of_range(self, name: str, start_ts: int, end_ts: int) -> Version | None:
        """The table of that name in force in all of `(start_ts, end_ts]`; None:
        there is none right above `start_ts`.

        Raises:
            RangeCrossesDdlError: there is a DDL of the table inside of the range.
            RangeCleanedError: `start_ts` is below all that is known.
        """
        self.check_range(start_ts, end_ts, name)
        return self.version(name, start_ts)

    def check_range(self, start_ts: int, end_ts: int, name: str | None = None) -> None:
        """Refuse a range that a DDL of the table (None: of any) lies inside of;
        raises as `of_range`.
        """
        self._check_kept(start_ts)
        ddl_ts = self.next_change(start_ts, name)
        if ddl_ts < end_ts:
            raise crosses(name or "the changefeed", start_ts, end_ts, ddl_ts)

    def named(self, name: str) -> tuple[Version, ...]:
        """The versions of a name that are kept, ascending."""
        with self._lock:
            return self._by_name.get(name, ())

    def of_span(self, span: Span, ts: int) -> Version | None:
        """The table in force in that span right above `ts`."""
        with self._lock:
            return next(
                (version for version in self._by_span.get(span, ()) if version.holds(ts)), None
            )

    def has(self, name: str) -> bool:
        """Whether there ever was a table of that name."""
        with self._lock:
            return name in self._by_name or name in self._ts_of

    def names(self) -> list[str]:
        """All names that ever were."""
        with self._lock:
            return list(self._by_name)

    def next_change(self, ts: int, name: str | None = None) -> int:
        """The ts of the first DDL above `ts`, on that table or on any; MAX_TS: none is known."""
        with self._lock:
            ddls = self._ts if name is None else self._ts_of.get(name, [])
            at = bisect.bisect_right(ddls, ts)
            return ddls[at] if at < len(ddls) else MAX_TS

    def ddls(self, ts: int, most: int = DDLS_MAX) -> list[Ddl]:
        """The first DDLs at or above `ts`, ascending."""
        with self._lock:
            at = bisect.bisect_left(self._ts, ts)
            return [self._ddls[each] for each in self._ts[at : at + most]]

    def spans(self, ts: int) -> list[tuple[Version, ...]]:
        """For each span with rows above `ts`, its versions from there on, ascending."""
        with self._lock:
            kept = (
                tuple(each for each in versions if each.to_ts > ts)
                for versions in self._by_span.values()
            )
            return [versions for versions in kept if versions]

    def spans_of(self, ddl: Ddl) -> list[tuple[Version, ...]]:
        """The same, right below `ddl`, for the spans that it concerns."""
        with self._lock:
            touched = (version for name in ddl.names for version in self._by_name.get(name, ()))
            spans = dict.fromkeys(
                version.span for version in touched if ddl.ts in (version.from_ts, version.to_ts)
            )
            return [
                tuple(each for each in self._by_span[span] if each.to_ts >= ddl.ts)
                for span in spans
            ]

    def is_new(self, version: Version) -> bool:
        """Whether the table began with this version: right below it, as far as is known, the span
        had none.
        """
        with self._lock:
            below_ts = version.from_ts - 1
            return below_ts >= self.start_ts and not any(
                each.holds(below_ts) for each in self._by_span.get(version.span, ())
            )

    def drop_below(self, ts: int) -> bool:
        """Drop what is needed below `ts` only: nobody asks about that any more; returns whether
        there was anything.
        """
        with self._lock:
            self.start_ts = max(self.start_ts, ts)
            # A DDL at the checkpoint itself is kept: a reader that begins there has to follow it.
            passed = self._ts[: bisect.bisect_left(self._ts, self.start_ts)]
            for name in {name for each in passed for name in self._ddls.pop(each).names}:
                self._drop_versions(name)
            del self._ts[: len(passed)]
            return bool(passed)

    def _is_known(self, change: Change) -> bool:
        ts = change.commit_ts
        same = self._ddls.get(ts)
        if same is not None and same.query != change.query:
            raise DdlOrderError(
                f"two DDLs at commit_ts {ts}: {same.query!r} and {change.query!r}; this is a "
                "defect of the source"
            )
        if same is not None or ts <= self.start_ts:
            return True
        if self._ts and ts < self._ts[-1]:
            raise DdlOrderError(
                f"the DDL {change.query!r} at commit_ts {ts} comes after one at {self._ts[-1]}; "
                "this is a defect of the source"
            )
        return False

    def _ddl(self, change: Change) -> Ddl:
        before = [(self._newest(table.span), table.name) for table in change.tables]
        renamed = tuple(
            (old.name, new) for old, new in before if old is not None and old.name != new
        )
        moved = {old for old, _ in renamed}
        names = tuple(table.name for table in change.tables)
        dropped = tuple(
            name for name in change.dropped if self._is_open(name) and name not in {*moved, *names}
        )
        truncated = tuple(name for name in change.truncated if self._is_open(name) or name in names)
        return Ddl(change.commit_ts, change.query, names, dropped, truncated, renamed)

    def _newest(self, span: Span) -> Version | None:
        versions = self._by_span.get(span, ())
        return versions[-1] if versions and versions[-1].to_ts == MAX_TS else None

    def _is_open(self, name: str) -> bool:
        versions = self._by_name.get(name, ())
        return bool(versions) and versions[-1].to_ts == MAX_TS

    def _open(self, table: Table, ts: int) -> None:
        version = Version(table.name, table.span, table.mounter, ts)
        self._by_name[version.name] = (*self._by_name.get(version.name, ()), version)
        self._by_span[version.span] = (*self._by_span.get(version.span, ()), version)

    def _close(self, name: str, ts: int) -> None:
        if not self._is_open(name):
            return
        ended = replace(self._by_name[name][-1], to_ts=ts)
        self._by_name[name] = (*self._by_name[name][:-1], ended)
        self._by_span[ended.span] = (*self._by_span[ended.span][:-1], ended)

    def _release(self, span: Span) -> None:
        for name in {version.name for version in self._by_span.pop(span, ())}:
            others = tuple(each for each in self._by_name[name] if each.span != span)
            if others:
                self._by_name[name] = others
            else:
                del self._by_name[name]

    def _drop_versions(self, name: str) -> None:
        for span in {version.span for version in self._by_name.get(name, ())}:
            self._by_span[span] = self._kept(self._by_span.get(span, ()))
            if not self._by_span[span]:
                del self._by_span[span]
        self._by_name[name] = self._kept(self._by_name.get(name, ()))
        self._ts_of[name] = [ts for ts in self._ts_of[name] if ts >= self.start_ts]
        if not self._by_name[name]:
            del self._by_name[name]
        if not self._ts_of[name]:
            del self._ts_of[name]

    def _kept(self, versions: tuple[Version, ...]) -> tuple[Version, ...]:
        return tuple(version for version in versions if version.to_ts >= self.start_ts)

    def _check_kept(self, ts: int) -> None:
        if ts < self.start_ts:
            raise RangeCleanedError(
                f"the tables at {ts} are not known any more, only from {self.start_ts} on; begin "
                "at the checkpoint_ts"
            )
