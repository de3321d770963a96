"""What a DDL statement did to the tables of a changefeed: as its source says it,
and as readers see it. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sink.mounted import TableMounter
from storage.model.span import Span


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
        """What makes typed rows of its changes."""
        ...


class Change(Protocol):
    """What one DDL statement did; see `server.puller.source.TableChange`."""

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
