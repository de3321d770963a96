"""Spark data source of Tidemark: `spark.readStream.format("tidemark")`,
found by Spark without a register call.

Spark imports every installed `pyspark_*` package to look for `DefaultSource`, so importing this one
opens no sockets and reads no files. It needs pyspark and pyarrow only, and knows no other package
of this repository: what both sides agree on is the Arrow Flight contract
(docs/design/0007-lake-apply.md). Daemons that take one pure module from here, such as
`sink_uri`, do not load pyspark: the data source is imported when somebody asks for it.
"""

from typing import TYPE_CHECKING, Any

from pyspark_tidemark.errors import SourceError

if TYPE_CHECKING:
    from pyspark_tidemark.source import DefaultSource

__all__ = ["DefaultSource", "SourceError"]


def __getattr__(name: str) -> Any:
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pyspark_tidemark.source import DefaultSource

    return DefaultSource
