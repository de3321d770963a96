"""Small runs of a table become one, while others go on using the table, and those that share its lock.

The table's lock is held to choose the runs, and to put the new one in their place, and not while they are read and
written. What goes wrong with one table's runs is no matter of who adds rows of another: they stay as they are, a full
disk is tried again at the next spill, and who fetches damaged rows is told.
"""

import contextlib

from sorter.backlog import Merging
from sorter.errors import SorterDiskError, TableDamagedError
from sorter.index import Entry
from sorter.table import Table


def merge_runs(table: Table) -> None:
    """Make one run of many, as often as spills have left many; called by one thread at a time."""
    with contextlib.suppress(SorterDiskError, TableDamagedError):
        while (merging := _begun(table)) is not None:
            _end(table, merging, _written(table, merging))


def _begun(table: Table) -> Merging | None:
    with table.held() as backlog:
        return backlog.begin_merge() if backlog is not None else None


def _written(table: Table, merging: Merging) -> list[Entry]:
    try:
        return table.store.append_run(merging.index, merging.rows, min(merging.runs), merging.block_bytes)
    except TableDamagedError:
        with table.held() as backlog:
            if backlog is not None:
                backlog.give_up_merge(merging)
        raise


def _end(table: Table, merging: Merging, new: list[Entry]) -> None:
    with table.held() as backlog:
        if backlog is None:
            table.store.release(new)
        else:
            backlog.end_merge(merging, new)
