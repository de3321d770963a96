"""Lakes of files: Delta, Iceberg, Parquet, read by Spark at the versions that the manifest names."""
