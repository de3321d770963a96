"""Parquet changelogs: every change of a table, one directory a cut, on this machine's file systems
or behind Hadoop's. Pure: this is only the record of the format, which daemons read without Spark.
"""

from typing import Final

from pyspark_tidemark.lake.format import APPEND, LakeFormat, own_column

PARQUET: Final = LakeFormat(
    name="parquet",
    title="Parquet",
    modes=(APPEND,),
    entry_point="pyspark_tidemark.lake.parquet.target:ParquetConnector",
    tasks_write=True,
    merges_shards=True,
    # Spark makes a column of the directories `cut=…`.
    names=own_column("cut"),
)
