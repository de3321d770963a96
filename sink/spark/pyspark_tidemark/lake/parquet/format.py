"""The record of Parquet changelogs. Pure."""

from typing import Final

from pyspark_tidemark.lake.format import APPEND, LakeFormat, own_column

PARQUET: Final = LakeFormat(
    name="parquet",
    title="Parquet",
    modes=(APPEND,),
    entry_point="pyspark_tidemark.lake.parquet.connector:ParquetConnector",
    # the directories `cut=…` are one
    names=own_column("cut"),
)
