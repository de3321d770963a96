"""Which changefeeds get a lake job."""

from server.spark.keep import is_lake


def test_a_lake_is_known_by_its_format_wherever_it_lies():
    kept = ["delta:///lake", "delta+hdfs://nn:8020/lake", "parquet+s3a://bucket/lake", "mysql://me@db/lake"]
    assert all(is_lake(uri) for uri in kept)
    assert not any(is_lake(uri) for uri in ("kafka://broker/topic", "hdfs://nn/lake", "x+delta://a/b"))
