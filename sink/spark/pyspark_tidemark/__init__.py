"""Spark data source of Tidemark: `spark.readStream.format("tidemark")`, found by Spark without a register call.

Spark imports every installed `pyspark_*` package to look for `DefaultSource`, so importing this one opens no sockets
and reads no files. It needs pyspark and pyarrow only, and knows no other package of this repository: what both sides
agree on is the Arrow Flight contract (docs/design/0007-lake-apply.md).
"""

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.source import DefaultSource

__all__ = ["DefaultSource", "SourceError"]
