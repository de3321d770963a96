"""What --target and --mode take, and what they say to everything else."""

import traceback
from contextlib import suppress
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.arguments import Arguments
from pyspark_tidemark.lake.registry import FORMATS
from pyspark_tidemark.sink_uri import SinkUri, redacted
from pyspark_tidemark.uri_secrets import masked, read_secret

from server.changefeed.source import SourceUri, SourceUriError

DIRECTORIES = ", ".join(name for name, record in FORMATS.items() if record.is_directory)
BASE = ["--endpoint", "grpc://a:1", "--changefeed", "c", "--target"]


def test_a_database_is_named_by_host_user_and_a_file_for_its_password():
    uri = SinkUri.parse("postgresql://me@db.example/lake?password-file=/run/secret")
    assert (uri.host, uri.port, uri.user, uri.path) == ("db.example", 5432, "me", "lake")
    assert uri.option("password-file") == "/run/secret"
    assert SinkUri.parse("mysql://me@db:3307/lake").port == 3307


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
        SinkUri.parse(text)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "can"),
    [
        ("delta:///lake", True),
        ("iceberg:///lake", True),
        ("parquet:///lake", True),
        ("delta+s3a://bucket/lake", True),
        ("iceberg+catalog://prod", True),
        ("iceberg+hdfs://name/lake", True),
        ("parquet+hdfs://name/lake", False),
        ("mysql://u@h/db", False),
        ("postgresql://u@h/db", False),
        ("kafka://h:9092/t?protocol=canal-json", False),
    ],
)
def test_only_the_driver_writes_where_tasks_cannot(uri, can):
    target = SinkUri.parse(uri)
    target.check_write("auto")
    target.check_write("driver")
    if can:
        target.check_write("spark")
    else:
        with pytest.raises(SourceError, match="ErrWriteUnsupported"):
            target.check_write("spark")


def test_each_format_has_a_default_mode_and_refuses_what_it_cannot_do():
    assert {name: SinkUri(name, "/x").mode("") for name in FORMATS} == {
        **dict.fromkeys(FORMATS, "upsert"), "parquet": "append", "kafka": "append",
    }  # fmt: skip
    with pytest.raises(
        SourceError, match=r"ErrModeUnsupported.*parquet target cannot do --mode scd2.*append"
    ):
        SinkUri.parse("parquet:///x").mode("scd2")
    with pytest.raises(SourceError, match=r"ErrModeUnsupported.*not 'often'"):
        SinkUri.parse("delta:///x").mode("often")


def test_a_directory_of_another_file_system_is_named_by_format_and_scheme():
    uri = SinkUri.parse("delta+hdfs://nn:8020/lake/")
    assert (uri.format, uri.path, uri.is_remote, uri.is_database) == (
        "delta",
        "hdfs://nn:8020/lake",
        True,
        False,
    )
    assert SinkUri.parse("parquet+s3a://bucket/a/b").path == "s3a://bucket/a/b"
    assert SinkUri.parse("iceberg+viewfs:///lake").path == "viewfs:///lake"
    assert not SinkUri.parse("delta:///lake").is_remote


def test_a_catalog_is_named_as_sparks_settings_call_it():
    uri = SinkUri.parse("iceberg+catalog://prod_1/raw/mysql/")
    assert (uri.format, uri.path) == ("iceberg", "catalog://prod_1/raw/mysql")
    assert (uri.is_catalog, uri.is_remote, uri.is_lake, uri.is_database) == (
        True,
        False,
        True,
        False,
    )
    assert not SinkUri.parse("iceberg:///lake").is_catalog
    uri.check_directory()


def test_no_secret_of_a_catalog_is_an_argument(capsys):
    given = [*BASE, "iceberg+catalog://prod", "--checkpoint-dir", "/x", "--conf"]
    assert Arguments.parse([*given, "spark.sql.catalog.prod.type=rest"]).conf
    for name in ("credential", "token", "s3.secret-access-key", "jdbc.password"):
        with pytest.raises(SystemExit):
            Arguments.parse([*given, f"spark.sql.catalog.prod.{name}=hush"])
        said = capsys.readouterr().err
        assert "SPARK_CONF_DIR" in said
        assert "hush" not in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("iceberg+rest://host:8181/lake", "spark.sql.catalog.NAME.type=rest"),
        ("iceberg+glue://lake", "spark.sql.catalog.NAME.type=glue"),
        ("iceberg+catalog:///lake", "iceberg+catalog://NAME"),
        ("iceberg+catalog://prod:80", "of letters, digits"),
        ("iceberg+catalog://prod/a/../b", "of letters, digits"),
        ("iceberg+catalog://prod?token=secret", "password-file"),
        ("iceberg+catalog://prod?warehouse=x", "spark.sql.catalog.NAME"),
        ("delta+catalog://prod", "catalogs are for iceberg"),
        ("delta+file:///lake", "delta:///path"),
        ("delta+s3://bucket/lake", "S3 is s3a"),
        ("delta+ftp://host/lake", "hdfs, viewfs, s3a"),
        ("orc+hdfs://nn/lake", DIRECTORIES),
        ("mysql+hdfs://nn/lake", DIRECTORIES),
        ("parquet+s3a:///lake", "needs a bucket"),
        ("iceberg+s3a://bucket/lake", "renaming"),
        ("delta+s3a://key:secret@bucket/lake", "spark.hadoop.fs"),
        ("delta+hdfs://nn/lake?user=me", "spark.hadoop.fs"),
    ],
)
def test_what_no_lake_can_be_kept_in_is_refused_with_what_to_write_instead(text, said):
    with pytest.raises(SourceError, match="ErrTargetInvalid") as caught:
        SinkUri.parse(text)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "target", ["mysql://me@db/lake", "delta+hdfs://nn/lake", "iceberg+catalog://prod"]
)
def test_sparks_own_files_need_a_directory_where_the_target_is_none_of_this_machine(target):
    with pytest.raises(SourceError, match=r"ErrTargetInvalid.*--checkpoint-dir"):
        Arguments.parse([*BASE, target])


def test_a_database_can_keep_histories():
    found = Arguments.parse(
        [*BASE, "mysql://me@db/lake", "--checkpoint-dir", "/x", "--mode", "scd2"]
    )
    assert found.policy.mode == found.mode == "scd2"


@pytest.mark.parametrize(
    "place",
    [
        "delta:///lake",
        "parquet+s3a://bucket/lake",
        "iceberg+catalog://prod/raw",
        "postgresql://me@db:5432/lake?password-file=/x",
    ],
)
def test_a_lakes_uri_says_how_the_lake_is_kept(place):
    mode = "append"
    joint = "&" if "?" in place else "?"
    uri = SinkUri.parse(f"{place}{joint}mode={mode}&trigger=500%20milliseconds")
    assert uri.settings == {"mode": "append", "trigger": "500 milliseconds"}
    assert uri.place == SinkUri.parse(place).place
    assert str(uri.without_settings()) == place
    assert SinkUri.parse(str(uri)) == uri


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("delta:///x?mod=append", "did you mean mode?"),
        ("delta:///x?mode=often", "mode is one of upsert, append, scd2, soft-delete, not 'often'"),
        ("parquet:///x?mode=scd2", "can do append"),
        ("delta:///x?mode=append&mode=scd2", "mode is given more than once"),
        ("delta:///x?schema-evolution=maybe", "one of evolve, exception, ignore"),
        ("delta:///x?on-drop=", "one of keep, drop"),
        ("delta:///x?write=tasks", "write is one of auto, driver, spark, not 'tasks'"),
        ("postgresql://u@h/db?write=spark", "write=spark: only the driver can write"),
        ("parquet+s3a://b/x?write=spark", "write=spark: only the driver can write"),
        ("parquet+s3a://b/x?tasks-from-mib=8", "tasks-from-mib=8: only the driver can write"),
        ("delta:///x?deletion-vectors=true", "deletion-vectors is one of on, off, not 'true'"),
        ("delta:///x?keep-cuts-hours=-1", "hours, such as 48 or 0.5"),
        ("delta:///x?keep-cuts-hours=nan", "hours"),
        ("delta:///x?compact-every=1e3", "a whole number, 0 or more"),
        ("delta:///x?max-rows-per-trigger=0", "1 or more"),
        ("delta:///x?max-rows-per-trigger=99999999999", "1 or more"),
        ("delta:///x?trigger=soon", "500+milliseconds"),
        ("delta:///x?master=local", "no option 'master'"),
        ("delta:///x?conf=spark.jars", "no option 'conf'"),
        ("mysql://me@db/a?passwordfile=/x", "password-file="),
        ("flight://?mode=append", "flight:// has no options"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_when_the_changefeed_is_created(text, said):
    with pytest.raises(SourceError, match="ErrTargetInvalid") as caught:
        SinkUri.parse(text)
    assert said in str(caught.value)


SECRETS = st.text("0369éß§℀/@:?&#;=%+ '\"~\\[](){}$", min_size=12, max_size=30)
URIS = (
    "postgresql://u:{}@h/d",
    "mysql://u:{}@h:3306/d?password-file=/x",
    "mysql://:{}@h/d",
    "u:{}@h",
    "jdbc:mysql://u:{}@h/d",
    "delta+s3a://key:{}@bucket/lake",
    "delta:///lake?password={}",
    "postgresql://u@h/d?x=1&Secret={}",
    "postgresql://u@h/d;token={}",
    "s3a://b/l?fs.s3a.secret.key={}",
    "mysql://h/d#pwd={}",
    "x://u%3A{}@h",
    "http://h/?p%61ssword={}",
    "postgresql://u@h/d?pw={}",
    "wasbs://c@h/lake?sig={}",
    "private_key={}",
)


def logged(err: Exception) -> str:
    """What a message, a debugger and a log with its causes show of an error."""
    return f"{err}{err!r}{''.join(traceback.format_exception(err))}"


@given(st.sampled_from(URIS), SECRETS)
@example(URIS[0], "geheim-geheim℀")  # Python's own error has the login, where a character is odd
def test_no_secret_is_repeated_whatever_it_looks_like(form, secret):
    text = form.format(secret)
    said = masked(text) + redacted(text)
    try:
        said += repr(SinkUri.parse(text))
    except SourceError as err:
        said += logged(err)
    else:
        pytest.fail(f"{text!r} was taken")
    try:
        said += repr(SourceUri.parse(text))
    except SourceUriError as err:
        said += logged(err)
    else:
        pytest.fail(f"{text!r} was taken as a source")
    assert secret not in said
    assert quote(secret) not in said


@given(st.text(max_size=60) | st.sampled_from(URIS))
def test_any_text_is_a_sink_uri_or_a_named_error_and_can_be_shown(text):
    redacted(text), masked(text)
    with suppress(SourceError):
        uri = SinkUri.parse(text)
        assert SinkUri.parse(str(uri)) == uri
        assert redacted(text) == text


HOSTS = st.sampled_from(["h", "db-1.example", "[::1]"])
NAMES = st.text(st.sampled_from("abcXYZ019_-. é表'"), min_size=1, max_size=8).filter(
    lambda n: n == n.strip() and n.strip(".")
)


@given(
    st.one_of(
        st.builds(
            "{}:///{}/{}".format, st.sampled_from(["delta", "iceberg", "parquet"]), NAMES, NAMES
        ),
        st.builds("delta+hdfs://nn:8020/{}/{}".format, NAMES, NAMES),
        st.builds("parquet+s3a://bucket/{}/".format, NAMES),
        st.sampled_from(["iceberg+catalog://prod", "iceberg+catalog://prod/raw/my.sql/"]),
        st.builds("mysql://u@{}/{}?password-file=/{}".format, HOSTS, NAMES, NAMES),
        st.builds("postgresql://u@{}:1/{}?ca-path=/a%26b".format, HOSTS, NAMES),
        st.sampled_from(["flight://", "none:///", "blackhole:"]),
    )
)
def test_its_text_is_one_for_each_place_and_reads_back(text):
    uri = SinkUri.parse(text)
    assert SinkUri.parse(str(uri)) == uri
    assert str(SinkUri.parse(str(uri))) == str(uri)
    assert redacted(text) == text


def test_a_password_comes_from_one_line_of_a_file_or_from_a_variable_made_for_it(
    tmp_path, monkeypatch
):
    path = tmp_path / "password"
    path.write_text("gehéim\n")
    monkeypatch.setenv("TIDEMARK_SECRET_LAKE", "other")
    assert read_secret({"password-file": str(path)}) == "gehéim"
    assert read_secret({"password-env": "TIDEMARK_SECRET_LAKE"}) == "other"
    assert read_secret({}) == ""
    for content in (b"one\ntwo\n", b"x" * 5000, b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(SourceError, match="ErrCredentials") as caught:
            read_secret({"password-file": str(path)})
        assert "two" not in str(caught.value)
    with pytest.raises(SourceError, match=r"TIDEMARK_SECRET_NONE.*not set"):
        read_secret({"password-env": "TIDEMARK_SECRET_NONE"})
    with pytest.raises(SourceError, match="ErrTargetInvalid"):
        read_secret({"password-env": "HOME"})


@pytest.mark.parametrize(
    ("target", "flags", "idle_ms"),
    [
        ("delta:///x", [], None),
        ("mysql://me@db/lake", [], None),
        ("iceberg+catalog://prod", [], 10_000),
        ("delta+s3a://bucket/x", [], 10_000),
        ("delta:///x", ["--idle-cut-seconds", "60"], 60_000),
        ("iceberg+catalog://prod", ["--idle-cut-seconds", "2.5"], 2_500),
    ],
)
def test_where_each_cut_costs_requests_and_files_there_are_fewer_without_rows(
    target, flags, idle_ms
):
    found = Arguments.parse([*BASE, target, "--checkpoint-dir", "/x", *flags])
    assert found.idle_ms == idle_ms
    assert found.source_options.get("idleMs") == (str(idle_ms) if idle_ms else None)


def test_a_further_reader_says_its_name_to_the_captures():
    found = Arguments.parse([*BASE, "delta:///x", "--reader", "second"])
    assert found.source_options["reader"] == "second"
    assert "reader" not in Arguments.parse([*BASE, "delta:///x"]).source_options
