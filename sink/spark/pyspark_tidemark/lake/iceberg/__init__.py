"""Iceberg tables in catalogs or directories, written through Iceberg's Java core API,
without its Spark connector.

Iceberg has no connector for Spark 4.2, but its table library needs no Spark: it runs in the
driver's JVM and is called by py4j. Parquet files are written by pyarrow, on the driver or by tasks;
one RowDelta (data files and equality deletes) makes a cut's changes of a table visible. Invariants:
1. A snapshot that applies a cut says so in its summary (`cdc.app`, `cdc.cut`), compactions carry it
   on: the current snapshot tells up to where a table is applied.
2. A commit is refused when somebody else committed since the position was read (`commits`).
3. Files are written before the commit that names them; a crash in between leaves files that no
   snapshot knows.
"""
