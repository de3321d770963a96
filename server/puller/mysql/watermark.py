"""The watermarks in a batch of the log: the columns of each written row of the watermark table,
by name. Pure.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from storage.model.event import DELETE
from storage.mysql.arrow import arrow_columns
from storage.mysql.changes import Plan, read_changes
from storage.mysql.event import Events
from storage.mysql.rows import TableRows


def watermark_rows(events: Events, rows: TableRows) -> Iterator[tuple[Mapping[str, object], int]]:
    """Each written row and the number of its event; few, so that each event is read by itself.

    Raises:
        RowImageError, CorruptError: they cannot be read.
    """
    table = rows.table.to_table(1)
    plan = Plan.of(table)
    commit_ts = np.ones(len(events), np.uint64)
    for number in rows.numbers:
        batch = read_changes(
            events, TableRows(rows.table, np.array([number])), plan, commit_ts
        ).batch
        batch = batch.filter(np.asarray(batch.column("op")) != DELETE)
        columns = arrow_columns(table, batch.column("value"))
        for place in range(batch.num_rows):
            values = {
                column.name: array[place].as_py()
                for column, array in zip(table.columns, columns, strict=True)
            }
            yield values, int(number)
