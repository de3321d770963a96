"""Schemas of databases that belong to the database itself or to a tool's bookkeeping,
so that no changefeed takes their tables. Pure.

Each dialect has its own: a schema `tidb_cdc` on a MariaDB is a user's. Names are in lower case.
"""

from typing import Final

_BOTH: Final = frozenset({"mysql", "information_schema", "performance_schema", "sys"})

WATERMARK_SCHEMA: Final = "changefeed_dump"
"""The schema in which dumps and heartbeats write their watermarks on a MySQL or MariaDB server."""

OF_MYSQL: Final = _BOTH | {WATERMARK_SCHEMA}

OF_TIDB: Final = _BOTH | {
    "metrics_schema",  # views of Prometheus and of the cluster's own checks: they have no rows
    "inspection_schema",
    "tidb_cdc",  # TiCDC's syncpoints
}
"""Source: pingcap/tiflow pkg/filter, the schemas that TiCDC never replicates."""
