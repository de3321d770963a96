"""Spark's classes of admission control; before 4.2 there are none,
and `latestOffset` is called without arguments.

The stand-ins exist so that one code imports everywhere: nothing there asks for a limit, or sets
one.
"""

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Marks a reader that can end at what is there when its query starts."""

    class ReadLimit:  # type: ignore[no-redef]
        """How much a batch may hold."""

    class ReadAllAvailable(ReadLimit):  # type: ignore[no-redef]
        """Everything."""

    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef]
        """So many rows."""

        def __init__(self, max_rows: int) -> None:
            self.max_rows = max_rows

    class ReadMaxBytes(ReadLimit):  # type: ignore[no-redef]
        """So many bytes."""

        def __init__(self, max_bytes: int) -> None:
            self.max_bytes = max_bytes


__all__ = [
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
]
