"""Sources by the scheme of their URI. docs/ARCHITECTURE.md lists what else a new source needs."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, TypeAlias

from server.capture.source.pump import PumpSource
from server.capture.source.tidb import TidbSource
from server.changefeed.source_uri import SourceUri, SourceUriError
from server.puller.source import Source, SourceContext, SourceFactory

MakeSource: TypeAlias = Callable[[str, str], Source]
"""Of a changefeed's id and its source URI; raises SourceUriError."""


def _cluster(changefeed: str, uri: SourceUri, context: SourceContext) -> Source:
    del uri
    return TidbSource(context, changefeed)


def _mysql(changefeed: str, uri: SourceUri, context: SourceContext) -> Source:
    # its SQL parser takes a third of a second to import
    from server.capture.source.mysql import (
        mysql_source,
    )

    return mysql_source(changefeed, uri, context)


SOURCES: Final[Mapping[str, SourceFactory]] = {"": _cluster, "mysql": _mysql, "pump": PumpSource}
"""The empty scheme is the change feed of the cluster that the capture belongs to."""


def sources(context: SourceContext) -> MakeSource:
    """Makes sources for the changefeeds of this process."""
    return partial(make_source, context)


def make_source(context: SourceContext, changefeed: str, source_uri: str) -> Source:
    """The source of a changefeed.

    Raises:
        SourceUriError: the URI cannot be used.
    """
    uri = SourceUri.parse(source_uri)
    factory = SOURCES.get(uri.scheme)
    if factory is None:
        schemes = ", ".join(f"{scheme}://" for scheme in sorted(SOURCES) if scheme)
        raise SourceUriError(
            f"there are no {uri.scheme}:// sources; leave --source-uri out to replicate from the "
            f"cluster, or use {schemes or 'none'}"
        )
    return factory(changefeed, uri, context)
