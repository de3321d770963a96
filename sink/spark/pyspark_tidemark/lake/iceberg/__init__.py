"""Iceberg tables in catalogs or directories, written through Iceberg's Java core API,
without its Spark connector.

Iceberg has no connector for Spark 4.2, but its table library needs no Spark: it runs in the
driver's JVM and is called by py4j. Parquet files are written by pyarrow, on the driver or by tasks;
one RowDelta (data files, and deletion vectors or equality deletes) makes a cut's changes of a table
visible. Invariants:
1. A snapshot that applies a cut says so in its summary (`cdc.app`, `cdc.cut`), compactions carry it
   on: the current snapshot says up to where a table is applied.
2. A commit is refused when somebody else committed since the position was read (`java_catalog`).
3. Files are written before the commit that names them; a crash in between leaves files that no
   snapshot knows.
4. A deletion vector names a data file that the snapshot of its commit shows: whoever commits one
   has looked at the files that the commit begins with.

From the target down: `target` (with the connector), `cut_writer` (a cut's files), `masking` (rows
that are gone), `rewriting` (files joined), `table_keys` and `shown` (which files may hold a key),
`catalog` (tables by name, commits with the fence), `java_files` and `java_catalog` (what Iceberg
calls files and catalogs), `files`, `vectors` and `snapshot` (written, and read), `storage` (disks,
HDFS and S3).
This module has the record of the format. Pure, so that daemons read it without Spark.
"""

from typing import Final

from pyspark_tidemark.lake.format import (
    APPEND,
    SOFT_DELETE,
    TRANSFORMS,
    UPSERT,
    Jars,
    LakeFormat,
    own_column,
)

_JAR: Final = "org.apache.iceberg_iceberg-spark-runtime-4.1_2.13-1.12.0.jar"
_DISK_JAR: Final = "com.globalmentor_hadoop-bare-naked-local-fs-0.1.0.jar"
_S3_JAR: Final = "org.apache.iceberg_iceberg-aws-bundle-1.12.0.jar"

ICEBERG: Final = LakeFormat(
    name="iceberg",
    title="Iceberg",
    modes=(UPSERT, APPEND, SOFT_DELETE),
    entry_point="pyspark_tidemark.lake.iceberg.target:IcebergConnector",
    tasks_write=True,
    tasks_write_remotely=True,
    partitions=TRANSFORMS,
    merges_shards=True,
    is_sorted=True,
    has_catalogs=True,
    needs_rename=True,
    # For its table library: its Spark classes are those of another Spark.
    jars=Jars(
        # The second one is a file system for disks (`java_catalog.without_processes`).
        "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0,"
        "com.globalmentor:hadoop-bare-naked-local-fs:0.1.0",
        {
            _JAR: "3123c3798af642dd537230923548e013ef41cc28b6626e5225808cf5670a0f82",
            _DISK_JAR: "e0cc30fb0531eb0b59468dc0abf5b257533d2365b5e9f45e795edd707aa78c62",
        },
    ),
    store_jars={
        "s3": Jars(
            "org.apache.iceberg:iceberg-aws-bundle:1.12.0",
            {_S3_JAR: "dd7e49ffa4ac9b215bed846581991259e3aec9bb2fa08d6cec029c46cd66d957"},
        )
    },
    names=own_column("_metadata"),
)
