"""The targets of the kill matrix: where the lake is, and its rows, read as any reader would.

`iceberg-rest` are Iceberg tables in S3, in a REST catalog: Nessie's, which runs only where
TIDEMARK_TEST_NESSIE names it (`tests.nessie`). `kafka` is a topic of a broker that runs only where
`make kafka` has fetched it (`tests.kafka`).
"""

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark_tidemark.lake.cut_record import CutRecord
from pyspark_tidemark.lake.databases.database import Database
from pyspark_tidemark.lake.databases.manifest import DatabaseManifest, create_tables
from pyspark_tidemark.lake.files import LocalFiles
from pyspark_tidemark.lake.iceberg.manifest import cuts_in_catalog
from pyspark_tidemark.lake.kafka.messages import Marker
from pyspark_tidemark.lake.manifest import DIRECTORY, cuts_in
from pyspark_tidemark.lake.opening import database
from pyspark_tidemark.lake.reading import as_of_cut
from pyspark_tidemark.lake.session import open_session
from pyspark_tidemark.sink_uri import SinkUri

from tests.kafka import Broker, running_broker
from tests.kafka_messages import Received, received, row_messages
from tests.mariadb import running_mariadb
from tests.nessie import running_nessie
from tests.postgres import running_postgres
from tests.s3 import S3

TARGETS = ("delta", "iceberg", "iceberg-rest", "parquet", "postgresql", "mysql", "kafka")
_ENVELOPE = ("_op", "_commit_ts", "_start_ts", "_seq")
Rows = dict[str, list[tuple[Any, ...]]]


@dataclass(frozen=True)
class Lake:
    """A target of the lake job."""

    uri: str
    broker: Broker | None = None
    """Of a topic: it may be killed, and comes back."""

    def cuts(self, changefeed: str) -> list[CutRecord]:
        """All cuts that the lake's manifest has, also while its job runs."""
        target = SinkUri.parse(self.uri)
        if target.is_database:
            found = database(target)
            with contextlib.closing(found.connect()) as connection:
                with connection.cursor() as cursor:
                    create_tables(found, cursor)
                connection.commit()
                return DatabaseManifest(found, connection, changefeed, None).cuts()
        if target.is_topic:
            return [each.cut for each in _markers(self.messages, partition=0)]
        if target.is_catalog:
            return cuts_in_catalog(_session("iceberg"), target.path, changefeed)
        return cuts_in(LocalFiles(Path(target.path) / DIRECTORY))

    def rows(self, tables: dict[str, list[str]]) -> Rows:
        """Each table's rows at the newest cut, as tuples of the given columns;
        what is there twice comes twice.
        """
        target = SinkUri.parse(self.uri)
        if target.is_database:
            return {
                name: _selected(database(target), name, columns) for name, columns in tables.items()
            }
        if target.is_topic:
            return _replayed_topic(self.messages, tables)
        spark = _session(target.format)
        found = {name: frame.toArrow() for name, frame in as_of_cut(spark, self.uri).items()}
        if target.format == "parquet":
            found = {name: _replayed(rows) for name, rows in found.items()}
        return {name: _tuples(found[name].select(columns)) for name, columns in tables.items()}

    @property
    def messages(self) -> list[Received]:
        """Of a topic: all that are committed."""
        target = SinkUri.parse(self.uri)
        return received(_session("kafka"), target.host, target.path)


@contextmanager
def opened(target: str, directory: Path) -> Iterator[Lake]:
    """A lake of that kind for the block, empty at first; databases are started for it."""
    if target == "postgresql":
        with running_postgres() as server:
            yield Lake(server.create("lake"))
    elif target == "mysql":
        with running_mariadb() as maria:
            yield Lake(f"{maria.uri}/{maria.database('lake')}")
    elif target == "kafka":
        with running_broker(directory / "kafka") as broker:
            options = "protocol=debezium-json&debezium-disable-schema=true"
            yield Lake(f"kafka://{broker.address}/lake?{options}", broker)
    elif target == "iceberg-rest":
        with S3().running() as s3, running_nessie(directory, s3) as uri:
            _write_settings(directory / "spark", {"type": "rest", "uri": uri} | s3.settings())
            yield Lake("iceberg+catalog://nessie")
    else:
        (directory / "lake").mkdir()
        yield Lake(f"{target}://{directory}/lake")


@functools.cache
def _session(lake: str) -> SparkSession:
    """The readers' session, open until the process ends."""
    directory = Path(tempfile.mkdtemp(prefix="tidemark-reader-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return open_session(
        master="local[2]", driver_memory="1g", directory=directory, lake=lake, extra={}
    )


def _write_settings(directory: Path, settings: dict[str, str]) -> None:
    """Spark's settings of the catalog, for jobs and readers that start from now on."""
    directory.mkdir()
    lines = [f"spark.sql.catalog.nessie.{name} {value}\n" for name, value in settings.items()]
    (directory / "spark-defaults.conf").write_text("".join(lines))
    os.environ["SPARK_CONF_DIR"] = str(directory)


def _selected(found: Database, name: str, columns: list[str]) -> list[tuple[Any, ...]]:
    connection = found.connect()
    try:
        with connection.cursor() as cursor:
            wanted = ", ".join(found.quoted(column) for column in columns)
            cursor.execute(f"SELECT {wanted} FROM {found.quoted_table(name)}")
            return [tuple(row) for row in cursor.fetchall()]
    finally:
        connection.close()


def _replayed(changes: pa.Table) -> pa.Table:
    """The last change of each id, deletes left out;
    a change that is there twice fails the replay.
    """
    envelopes = changes.select(_ENVELOPE[1:]).group_by(list(_ENVELOPE[1:])).aggregate([])
    assert len(envelopes) == len(changes), (
        f"{len(changes) - len(envelopes)} changes are there twice"
    )
    ordered = changes.sort_by([("_commit_ts", "ascending"), ("_seq", "ascending")])
    numbered = ordered.append_column("_row", pa.array(range(len(ordered)), pa.int64()))
    last = ordered.take(numbered.group_by("id").aggregate([("_row", "max")])["_row_max"])
    return last.filter(pc.not_equal(last["_op"], "delete"))


def _markers(messages: Sequence[Received], partition: int) -> list[Marker]:
    return [
        each.marker for each in messages if each.partition == partition and each.marker is not None
    ]


def _replayed_topic(messages: Sequence[Received], tables: dict[str, list[str]]) -> Rows:
    """The last change of each key, deletes left out; a change that is there twice fails the replay,
    as does a partition that is not divided into the cuts that its markers tell.
    """
    rows: dict[str, dict[bytes, dict[str, Any] | None]] = {name: {} for name in tables}
    newest: dict[bytes, int] = {}
    for each in row_messages(messages):
        assert each.key is not None
        payload = each.document["payload"]
        source = payload["source"]
        # A key changes once in a transaction, as the bank's tellers write.
        assert source["commit_ts"] > newest.get(each.key, 0), f"{each} is there twice"
        newest[each.key] = source["commit_ts"]
        rows[f"{source['db']}.{source['table']}"][each.key] = payload["after"]
    for partition in {each.partition for each in messages}:
        _check_cuts(messages, partition)
    return {
        name: [
            tuple(row[column] for column in columns)
            for row in rows[name].values()
            if row is not None
        ]
        for name, columns in tables.items()
    }


def _check_cuts(messages: Sequence[Received], partition: int) -> None:
    """See that each message is in its cut, and the cuts follow each other."""
    count, end_ts = 0, None
    for each in (message for message in messages if message.partition == partition):
        if each.marker is None:
            count += 1
            continue
        cut = each.marker.cut
        assert end_ts in (None, cut.start_ts), f"{cut} follows {end_ts}"
        assert each.marker.messages[partition] == count, f"{cut} has {count} messages"
        count, end_ts = 0, cut.end_ts
    assert count == 0, f"{count} messages without a marker behind them"


def _tuples(table: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))
