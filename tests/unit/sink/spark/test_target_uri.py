"""What --target and --mode take, and what they say to everything else."""

import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.arguments import Arguments
from pyspark_tidemark.lake.target import MODES_OF, TargetUri

BASE = ["--endpoint", "grpc://a:1", "--changefeed", "c", "--target"]


def test_a_database_is_named_by_host_user_and_a_file_for_its_password():
    uri = TargetUri.parse("postgresql://me@db.example/lake?password-file=/run/secret")
    assert (uri.host, uri.port, uri.user, uri.path) == ("db.example", 5432, "me", "lake")
    assert uri.option("password-file") == "/run/secret"
    assert TargetUri.parse("mysql://me@db:3307/lake").port == 3307


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://me:secret@db/lake",
        "postgresql://db/lake",
        "mysql://me@db",
        "mysql://me@db/a/b",
        "mysql://me@db/a?x=1",
    ],
)
def test_other_forms_are_refused_and_no_secret_is_repeated(text):
    with pytest.raises(SourceError, match="ErrTargetInvalid") as caught:
        TargetUri.parse(text)
    assert "secret" not in str(caught.value)


def test_each_format_has_a_default_mode_and_refuses_what_it_cannot_do():
    assert {name: TargetUri(name, "/x").mode("") for name in MODES_OF} == {
        **dict.fromkeys(MODES_OF, "upsert"), "parquet": "append",
    }  # fmt: skip
    with pytest.raises(SourceError, match=r"ErrModeUnsupported.*parquet target cannot do --mode scd2.*append"):
        TargetUri.parse("parquet:///x").mode("scd2")
    with pytest.raises(SourceError, match=r"ErrModeUnsupported.*not 'often'"):
        TargetUri.parse("delta:///x").mode("often")


def test_a_directory_of_another_file_system_is_named_by_format_and_scheme():
    uri = TargetUri.parse("delta+hdfs://nn:8020/lake/")
    assert (uri.format, uri.path, uri.is_remote, uri.is_database) == ("delta", "hdfs://nn:8020/lake", True, False)
    assert TargetUri.parse("parquet+s3a://bucket/a/b").path == "s3a://bucket/a/b"
    assert TargetUri.parse("iceberg+viewfs:///lake").path == "viewfs:///lake"
    assert not TargetUri.parse("delta:///lake").is_remote


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("delta+file:///lake", "delta:///path"),
        ("delta+s3://bucket/lake", "S3 is s3a"),
        ("delta+ftp://host/lake", "hdfs, viewfs, s3a"),
        ("orc+hdfs://nn/lake", "delta, iceberg, parquet"),
        ("mysql+hdfs://nn/lake", "delta, iceberg, parquet"),
        ("parquet+s3a:///lake", "needs a bucket"),
        ("iceberg+s3a://bucket/lake", "renaming"),
        ("delta+s3a://key:secret@bucket/lake", "spark.hadoop.fs"),
        ("delta+hdfs://nn/lake?user=me", "spark.hadoop.fs"),
    ],
)
def test_what_no_lake_can_be_kept_in_is_refused_with_what_to_write_instead(text, said):
    with pytest.raises(SourceError, match="ErrTargetInvalid") as caught:
        TargetUri.parse(text)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("target", ["mysql://me@db/lake", "delta+hdfs://nn/lake"])
def test_sparks_own_files_need_a_directory_where_the_target_is_none_of_this_machine(target):
    with pytest.raises(SourceError, match=r"ErrTargetInvalid.*--checkpoint-dir"):
        Arguments.parse([*BASE, target])


def test_a_database_can_keep_histories():
    found = Arguments.parse([*BASE, "mysql://me@db/lake", "--checkpoint-dir", "/x", "--mode", "scd2"])
    assert found.policy.mode == found.mode == "scd2"
