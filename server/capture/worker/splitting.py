"""Which tables of a changefeed are split over its workers, and where (docs/design/0037).

A table with `region_threshold` regions or more has as many parts as there are workers, with about
as many regions each. It keeps them while there are as many workers, however it grows or shrinks, as
each change means that its rows are pulled again. With one worker it is put together again.
"""

import bisect
from collections.abc import Sequence
from typing import TypeAlias

import structlog

from server.capture.catalog import FeedCatalog
from server.capture.errors import TableMoveError
from server.capture.worker.placement import TablePlacement
from server.capture.worker.pool import Worker
from server.puller.source import Splittable
from sink.versions import Version
from storage.model.errors import TidemarkError
from storage.model.span import Span

Shape: TypeAlias = dict[Span, Worker]
"""The parts of a table in the order of their keys, with the worker of each."""
_log = structlog.get_logger(__name__)


class Splitting:
    """Splits and merges the tables of one run of a changefeed."""

    def __init__(
        self,
        catalog: FeedCatalog,
        placement: TablePlacement[Worker],
        source: Splittable,
        region_threshold: int,
    ) -> None:
        self.source = source
        self._catalog = catalog
        self._placement = placement
        self._region_threshold = max(region_threshold, 1)

    async def shapes(self, workers: Sequence[Worker]) -> list[tuple[Span, Shape]]:
        """Return the tables that should be split or merged among these workers; those whose regions
        the coordinator does not return stay as they are.
        """
        tables = sorted(self._catalog.tables, key=lambda table: table.span.start_key)
        begins: Sequence[bytes] = ()
        if tables and len(workers) > 1:
            last_key = max(table.span.end_key for table in tables)
            try:
                begins = await self.source.regions(tables[0].span.start_key, last_key)
            except TidemarkError as err:
                _log.warning("tables are not split for now", error=str(err))
                return []
        versions_of = {versions[0].span: versions for versions in self._catalog.versions.spans(0)}
        shapes = (
            (table.span, self._shape(versions_of.get(table.span, ()), begins, workers))
            for table in tables
        )
        return [(span, shape) for span, shape in shapes if shape]

    def whole(self, span: Span, workers: Sequence[Worker]) -> Shape | None:
        """Return the shape of a table that is not split; None: it has it already."""
        return None if self._placement.parts(span) == (span,) else self._dealt([span], workers)

    async def split(self, span: Span, workers: Sequence[Worker]) -> Shape | None:
        """Return the parts of a table for these workers, however few regions it has; None: it has
        them already.

        Raises:
            TableMoveError: it cannot be split.
            UnavailableError: the coordinator does not return its regions.
        """
        versions = next(
            (each for each in self._catalog.versions.spans(0) if each[0].span == span), ()
        )
        if not versions or not self._can_split(versions):
            raise TableMoveError(
                f"table {span.table_id} cannot be split: its record key does not hold the whole "
                "primary key, or it is partitioned, or it has event filters"
            )
        inside = await self.source.regions(span.start_key, span.end_key)
        parts = divided(span, inside, len(workers))
        if len(parts) == 1:
            raise TableMoveError(
                f"table {span.table_id} cannot be split: it takes two captures and two regions, and "
                f"there are {len(workers)} and {len(inside) + 1}"
            )
        return None if parts == self._placement.parts(span) else self._dealt(parts, workers)

    def _shape(
        self, versions: Sequence[Version], begins: Sequence[bytes], workers: Sequence[Worker]
    ) -> Shape | None:
        """Return the parts that a table of these versions should have; None: those that it has."""
        if not versions:
            return None
        span = versions[0].span
        parts = self._placement.parts(span)
        inside = begins[bisect.bisect_right(begins, span.start_key) :]
        inside = inside[: bisect.bisect_left(inside, span.end_key)] if span.end_key else inside
        regions = len(inside) + 1
        if parts == (span,):
            can_split = regions >= max(self._region_threshold, 2) and self._can_split(versions)
            count = min(regions, len(workers)) if can_split else 1
        elif self._can_split(versions):
            # Also where the regions have become fewer.
            count = min(max(regions, len(parts)), len(workers))
        else:
            count = 1
        if count == len(parts):
            return None
        return self._dealt(divided(span, inside, count), workers)

    def _can_split(self, versions: Sequence[Version]) -> bool:
        """Whether a table can be split in all its known versions."""
        return all(self.source.can_split(self._catalog.of(version)) for version in versions)

    def _dealt(self, parts: Sequence[Span], workers: Sequence[Worker]) -> Shape:
        """Each part on a worker of its own, those first that have the fewest tables."""
        # One that is there already stays with the worker that has it, if that one stays.
        kept = {part: worker for part in parts if (worker := self._placement.find(part))}
        placed = self._placement.tables()
        free = [worker for worker in workers if worker not in kept.values()]
        order = iter(sorted(free, key=lambda worker: len(placed.get(worker, ()))))
        return {part: kept.get(part) or next(order) for part in parts}


def divided(span: Span, inside: Sequence[bytes], parts: int) -> tuple[Span, ...]:
    """The span in `parts` ranges with about as many regions each; in fewer, if it has fewer
    regions, of which all but the first begin at `inside`.
    """
    parts = min(parts, len(inside) + 1)
    begins = (span.start_key, *inside)
    starts = [begins[len(begins) * number // parts] for number in range(parts)]
    ends = (*starts[1:], span.end_key)
    return tuple(Span(span.table_id, begin, end) for begin, end in zip(starts, ends, strict=True))
