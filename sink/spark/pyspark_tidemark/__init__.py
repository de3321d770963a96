"""Spark data source of Tidemark: `spark.readStream.format("tidemark")`."""
