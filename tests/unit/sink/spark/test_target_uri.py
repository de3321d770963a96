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


def test_a_database_needs_a_directory_for_sparks_own_files():
    with pytest.raises(SourceError, match=r"ErrTargetInvalid.*--checkpoint-dir"):
        Arguments.parse([*BASE, "mysql://me@db/lake"])
    found = Arguments.parse([*BASE, "mysql://me@db/lake", "--checkpoint-dir", "/x", "--mode", "scd2"])
    assert found.policy.mode == found.mode == "scd2"
