"""The record of the format Iceberg. Pure."""

from typing import Final

from pyspark_tidemark.lake.format import APPEND, UPSERT, Jars, LakeFormat, own_column

_JAR: Final = "org.apache.iceberg_iceberg-spark-runtime-4.1_2.13-1.12.0.jar"

ICEBERG: Final = LakeFormat(
    name="iceberg",
    title="Iceberg",
    modes=(UPSERT, APPEND),
    entry_point="pyspark_tidemark.lake.iceberg.connector:IcebergConnector",
    has_catalogs=True,
    needs_rename=True,
    # for its table library: see `pyspark_tidemark.lake.iceberg`
    jars=Jars(
        "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0",
        {_JAR: "3123c3798af642dd537230923548e013ef41cc28b6626e5225808cf5670a0f82"},
    ),
    names=own_column("_metadata"),
)
