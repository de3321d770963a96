"""Each lake format is one record, and an unknown one is a named error."""

import subprocess
import sys

import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.jars import JARS
from pyspark_tidemark.lake.arguments import Arguments
from pyspark_tidemark.lake.registry import FORMATS, default_modes, find_format
from pyspark_tidemark.lake.session import open_session
from pyspark_tidemark.lake.target import LakeConnector, StoredTable, open_connector
from pyspark_tidemark.sink_uri import SinkUri

from server.verify.lake.database_lake import _READERS, DatabaseLake

DATABASES = {name for name, record in FORMATS.items() if record.is_database}


@pytest.mark.parametrize("name", FORMATS)
def test_the_implementation_that_a_record_names_is_there(name):
    implementation = FORMATS[name].implementation()
    if name in DATABASES:
        assert implementation.format == name
    elif FORMATS[name].is_topic:
        assert implementation.empties_with_cut is False
    else:
        assert issubclass(implementation, LakeConnector)


def test_each_database_can_be_verified():
    assert set(_READERS) == DATABASES


@pytest.mark.parametrize(
    "use",
    [
        find_format,
        open_connector,
        lambda name: SinkUri(name, "/lake").mode(""),
        lambda name: open_session(
            master="local", driver_memory="1g", directory=None, lake=name, extra={}
        ),
        lambda name: DatabaseLake.open(SinkUri(name, "db"), "feed", locked=False).__enter__(),
        lambda name: SinkUri.parse(f"{name}:///lake"),
    ],
)
def test_an_unknown_format_is_a_named_error(use):
    with pytest.raises(SourceError, match="ErrTargetInvalid"):
        use("nosuch")


def test_a_database_has_no_older_versions_to_read():
    with pytest.raises(SourceError, match="shows only its newest cut"):
        open_connector("mysql")


def test_a_topic_has_no_tables_to_read():
    with pytest.raises(SourceError, match=r"ErrTargetInvalid.*consume its messages"):
        open_connector("kafka")


def test_a_format_without_repair_says_so():
    class ReadOnly(LakeConnector):
        def open_target(self, arguments: Arguments, spark):
            raise NotImplementedError

        def read(self, spark, table, version):
            raise NotImplementedError

    table = StoredTable(SinkUri("nosuch", "/lake"), "feed", "shop.orders")
    with pytest.raises(SourceError, match="ErrRepairUnsupported"):
        ReadOnly().changes_after(None, table, 1)
    with pytest.raises(SourceError, match="ErrRepairUnsupported"):
        ReadOnly().repair(None, table, None)


def test_help_names_the_default_mode_of_each_format():
    assert default_modes() == "upsert; of parquet: append; of kafka: append"


def test_formats_with_jars_have_the_digest_of_each():
    assert {"delta", "iceberg", "kafka", "iceberg-s3"} <= set(JARS)
    assert all(len(digest) == 64 for jars in JARS.values() for digest in jars.digests.values())


def test_who_checks_a_uri_imports_neither_spark_nor_a_driver():
    check = (
        "import sys; from pyspark_tidemark.sink_uri import SinkUri; SinkUri.parse('delta:///lake');"
        "from pyspark_tidemark.names import check_names;"
        "print(sorted({'pyspark', 'pyarrow', 'psycopg', 'pymysql'} & set(sys.modules)))"
    )
    path = ":".join(filter(None, sys.path))
    answer = subprocess.run(
        [sys.executable, "-c", check], env={"PYTHONPATH": path}, capture_output=True, check=True
    )
    assert answer.stdout.strip() == b"[]"
