"""What kinds of sources there are: one record each, `SourceKind`, in one table, `KINDS`. Pure.

A source is made of rooms that stand above each other: its puller, its dump, its mounter, its
composition in `server.capture.source` and its upstream in `server.verify`. The record names what
the rest of the house asks for as `module:name`, like the entry points of a Python package, and
imports it when it is used: a capture without MySQL sources loads no SQL parser.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Final

from storage.model.system_schemas import OF_MYSQL, OF_TIDB

ON_UNCLEAR_DDL: Final = "on-unclear-ddl"
"""An option of source URIs that `changefeed create` and `update` have a flag for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceKind:
    """One kind of source; the fields that end with `_at` are entry points."""

    scheme: str
    """Of its URIs; empty for the change feed of the cluster that the capture belongs to."""
    source_at: str
    """Its `server.puller.source.SourceFactory`."""
    table_at: str
    """Reads a `TableRecord` as a `SourceTable`."""
    upstream_at: str
    """Its `server.verify.upstream.OpenUpstream`."""
    check_at: str = ""
    """What `cli source check` runs, as `capture.source.mysql.check_mysql`; empty: nothing."""
    dumps_by_sql: bool = False
    """Whether its dump reads by SQL, so that it takes conditions and can sum rows."""
    flags: frozenset[str] = frozenset()
    """Options of its URI that flags of the command line set."""
    system_schemas: frozenset[str] = frozenset()
    """Schemas that no changefeed takes, in lower case."""

    @property
    def shown(self) -> str:
        """As messages call it."""
        return f"{self.scheme}://" if self.scheme else "the cluster's own change feed"


def load(entry_point: str) -> Any:
    """What `module:name` names."""
    module, _, name = entry_point.partition(":")
    return getattr(importlib.import_module(module), name)


KINDS: Final = {
    kind.scheme: kind
    for kind in (
        SourceKind(
            scheme="",
            source_at="server.capture.source.tidb:tidb_source",
            table_at="server.puller.tidb.table:tidb_table",
            upstream_at="server.verify.upstream:open_store",
            system_schemas=OF_TIDB,
        ),
        SourceKind(
            scheme="pump",
            source_at="server.capture.source.pump:PumpSource",
            table_at="server.puller.tidb.table:tidb_table",
            upstream_at="server.verify.upstream:open_store",
            system_schemas=OF_TIDB,
        ),
        SourceKind(
            scheme="mysql",
            source_at="server.capture.source.mysql:mysql_source",
            table_at="server.capture.source.mysql:mysql_table",
            upstream_at="server.verify.mysql_upstream:open_mysql",
            check_at="server.capture.source.mysql:check_mysql",
            dumps_by_sql=True,
            flags=frozenset({ON_UNCLEAR_DDL}),
            system_schemas=OF_MYSQL,
        ),
    )
}
