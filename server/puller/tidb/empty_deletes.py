"""Deletes that found no row: a transaction of TiDB that inserts a row and deletes it again may
leave one.

A store is asked for old values, so a delete without one found nothing. Where the record key holds
the row's key, such a delete is passed on, as it does no harm. Elsewhere nobody could tell which row
it means, and it is left out: before the sorter, which keeps one of two equal changes, and a region
that is scanned again may send the delete with its row.
"""

import numpy as np
import pyarrow as pa

from server.changefeed.table import TableRecord
from server.puller import metrics
from server.puller.tidb.table import key_is_in_rows
from server.puller.tikv.puller import Sorter
from storage.model.event import DELETE
from storage.model.span import Span


def without_empty_deletes(record: TableRecord, sorter: Sorter) -> Sorter:
    """The way of a table's changes to `sorter`."""
    return _WithoutEmptyDeletes(sorter) if key_is_in_rows(record) else sorter


class _WithoutEmptyDeletes:
    def __init__(self, sorter: Sorter) -> None:
        self._sorter = sorter

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        empty = np.asarray(batch["op"]) == DELETE
        empty &= np.asarray(batch["old_value"].is_null())
        count = int(np.count_nonzero(empty))
        if count:
            metrics.EMPTY_DELETES.inc(count)
            batch = batch.filter(pa.array(~empty))
        self._sorter.add(span, batch)

    def resolve(self, span: Span, ts: int) -> None:
        self._sorter.resolve(span, ts)
