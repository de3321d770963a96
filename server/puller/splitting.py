"""Splitting a table among captures: where its source can split it, and its parts.

Pure but for the source's own calls.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from server.changefeed.table import SourceTable
from storage.model.span import Span


@runtime_checkable
class Splittable(Protocol):
    """A source whose tables can be split by their keys."""

    def can_split(self, table: SourceTable) -> bool:
        """Whether the rows of the table's parts, put together, are those of the whole."""
        ...

    async def regions(self, start_key: bytes, end_key: bytes) -> Sequence[bytes]:
        """Where regions begin within a range of keys, ascending: there a table is split.

        Raises:
            UnavailableError: the coordinator does not answer.
        """
        ...

    def part(self, table: SourceTable, span: Span) -> SourceTable:
        """The part of a table in a range of its keys, as a table of its own."""
        ...
