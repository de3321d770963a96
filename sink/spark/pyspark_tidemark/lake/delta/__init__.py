"""Delta tables: one Delta commit a table and cut, fenced by the cut's end,
in each of the three modes.

Invariants:
1. A commit carries the Delta transaction (`tidemark:<changefeed>`, end_ts): Delta itself refuses it
   a second time, and a table says up to where it has been applied. The fence belongs to the
   changefeed's time, not to Spark's batch numbers, so it also holds when a checkpoint directory is
   lost.
2. A table changes from one cut to the next in one commit; no version shows half a cut.
Why not one MERGE for all: docs/design/0007-lake-apply.md.

From the target down: `target` (with the connector), `modes` (how each mode writes a cut), `tables`
(commits that carry the fence), `log` (Delta's log without Spark), `files` (what actions name),
`frames` (what Spark writes). This module has the record of the format. Pure, so that daemons read
it without Spark.
"""

from typing import Final

from pyspark_tidemark.lake.format import (
    APPEND,
    COLUMNS,
    SCD2,
    SOFT_DELETE,
    UPSERT,
    Jars,
    LakeFormat,
    own_column,
)

_DIGESTS: Final = {
    "io.delta_delta-kernel-api-4.4.0.jar": "ee9b5a14ac3b7efdff4d61a58478fe8eb0e5a3fbca43889dca7290795fe79a11",
    "io.delta_delta-kernel-defaults-4.4.0.jar": "225c975199e4718b38ee5b7e6da7f19e9585024262b2cec2656b32151a856b0b",
    "io.delta_delta-kernel-unitycatalog-4.4.0.jar": "cea22dfb4ac562b3cd27bf652697750e8336009d73fb06631363aaaad5345ffa",
    "io.delta_delta-spark_4.2_2.13-4.4.0.jar": "27d4fd8b1f879535c573ed1c718177d6a27f24d3e626ba02e216369725721ead",
    "io.delta_delta-storage-4.4.0.jar": "c46735481fa8e326b0957be02b4420cbcab4b325bb08009b7f2045a95133f1cc",
    "io.unitycatalog_unitycatalog-client-0.6.0.jar": "48257499a86b801a3e2372cec55ac226ca1c1c7eabe5c118e7302f29a1fdbc19",
    "io.unitycatalog_unitycatalog-hadoop-0.6.0.jar": "c47b63c961c87102b9e1d63809a0915ba4c86b7652f57c8d39ca3a05b441a150",
}

DELTA: Final = LakeFormat(
    name="delta",
    title="Delta",
    modes=(UPSERT, APPEND, SCD2, SOFT_DELETE),
    entry_point="pyspark_tidemark.lake.delta.target:DeltaConnector",
    tasks_write=True,
    tasks_write_remotely=True,
    partitions=COLUMNS,
    merges_shards=True,
    jars=Jars("io.delta:delta-spark_4.2_2.13:4.4.0", _DIGESTS),
    session={
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "2",
        # our ranges can be read twice and give the same
        "spark.databricks.delta.merge.materializeSource": "none",
        # new keys may come with the replaced ones
        "spark.databricks.delta.replaceWhere.constraintCheck.enabled": "false",
    },
    names=own_column("_metadata"),
)
