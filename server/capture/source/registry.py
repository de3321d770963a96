"""Sources by the scheme of their URI, as `server.changefeed.source` lists them.

A changefeed whose record this version cannot read gets an `UnreadableSource`: it is shown with its
error and stops no other changefeed. It can be removed; a version that can read it resumes it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, TypeAlias

from server.changefeed.source import SourceUri, find_kind, load
from server.changefeed.table import SourceTable, TableRecord
from server.puller.source import Catalog, Puller, Rows, Source, SourceContext, SourceFactory
from storage.model.errors import TidemarkError

MakeSource: TypeAlias = Callable[[str, str], Source]
"""Makes the source from a changefeed's id and its source URI; raises SourceUriError."""


def sources(context: SourceContext) -> MakeSource:
    """Makes sources for the changefeeds of this process."""
    return partial(make_source, context)


def make_source(context: SourceContext, changefeed: str, source_uri: str) -> Source:
    """The source of a changefeed.

    Raises:
        SourceUriError: the URI cannot be used.
    """
    uri = SourceUri.parse(source_uri)
    factory: SourceFactory = load(find_kind(uri.scheme).source_at)
    return factory(changefeed, uri, context)


class UnreadableSource:
    """Implements `server.puller.source.Source`; every call raises `error`."""

    keeps_history = True
    warnings: Sequence[str] = ()
    per_table = True

    def __init__(self, error: TidemarkError) -> None:
        self._error = error

    async def now(self) -> int:
        """Refused."""
        self._refuse()

    async def check_start(self, ts: int) -> None:
        """Refused."""
        del ts
        self._refuse()

    async def snapshot(self, ts: int, before: Sequence[TableRecord] = ()) -> Sequence[TableRecord]:
        """Refused."""
        del ts, before
        self._refuse()

    async def present(self, before: Sequence[TableRecord]) -> tuple[int, Sequence[TableRecord]]:
        """Refused."""
        del before
        self._refuse()

    def table(self, record: TableRecord, before: TableRecord | None = None) -> SourceTable:
        """Refused."""
        del record, before
        self._refuse()

    def pullers(
        self, tables: Sequence[SourceTable], start_ts: int, rows: Rows, catalog: Catalog
    ) -> Sequence[Puller]:
        """Refused."""
        del tables, start_ts, rows, catalog
        self._refuse()

    def schema_puller(
        self, start_ts: int, catalog: Catalog, *, dumps: bool = True
    ) -> Puller | None:
        """Refused."""
        del start_ts, catalog, dumps
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise self._error
