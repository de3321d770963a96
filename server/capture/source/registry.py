"""Sources by the scheme of their URI, as `server.changefeed.source` lists them."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from server.changefeed.source import SourceUri, find_kind, load
from server.puller.source import Source, SourceContext, SourceFactory

MakeSource: TypeAlias = Callable[[str, str], Source]
"""Of a changefeed's id and its source URI; raises SourceUriError."""


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
