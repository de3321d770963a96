"""An upsert by files: rows of a cut's keys masked where they are, and one new file, of each
partition one.
"""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from pyspark_tidemark.lake.delta.files import as_stored, kept_as, without, written_by_partition
from pyspark_tidemark.lake.delta.inserted import Inserted
from pyspark_tidemark.lake.delta.log import Listing
from pyspark_tidemark.lake.fold import Folded
from pyspark_tidemark.lake.keys import ColumnCache
from pyspark_tidemark.lake.schema import fitted


def masked_and_added(
    name: str,
    listing: Listing,
    folded: Folded,
    key: Sequence[str],
    searched: tuple[Inserted, ColumnCache],
) -> list[dict[str, Any]]:
    """The actions that bring the net effect of a cut to what a version shows; the table is called
    `name` in what was `searched` before: keys by file, and key columns.
    """
    inserted, key_columns = searched
    existing, new = (
        as_stored(listing.layout, rows.select(list(key))) for rows in (folded.existing, folded.new)
    )
    again = inserted.there(name, listing, new)
    keys = pa.concat_tables([existing, again])
    removals = without(listing.layout, listing.files.values(), keys, key_columns)
    live = fitted(folded.live, listing.layout.schema)
    new_files = written_by_partition(listing.layout, live)
    for action, rows in new_files:
        # The next cut that updates one of its rows need not read it.
        name_there = kept_as(listing.layout, action["add"], keys.schema)
        key_columns.put(name_there, rows.select(list(key)))
    return removals + [action for action, _ in new_files]
