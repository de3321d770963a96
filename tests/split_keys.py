"""Where the tests' clusters begin with a new region: at two tables, and inside the first."""

from typing import Final

from storage.tidb.key import record_key, table_span

SPLIT_TABLES: Final = (101, 102)
FIRST_REGIONS: Final = (
    "--split-keys",
    ",".join(
        key.hex()
        for key in (
            table_span(SPLIT_TABLES[0]).start_key,
            record_key(SPLIT_TABLES[0], 512),
            table_span(SPLIT_TABLES[1]).start_key,
        )
    ),
)
"""A flag of `tidemark store`; a later `--split-keys` takes its place."""
