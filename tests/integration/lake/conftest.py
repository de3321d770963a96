"""Databases, an upstream with a history, and its captures."""

import itertools
from collections.abc import Iterator

import pytest
from pyspark_tidemark.flight import Changefeed
from pyspark_tidemark.jars import default_directory, of_stores, present
from pyspark_tidemark.options import parse

from tests.integration.lake.rest_catalog import RestCatalog
from tests.integration.spark.captures import Captures
from tests.integration.spark.upstream import Upstream
from tests.kafka import Broker, is_installed, running_broker
from tests.postgres import PostgreSql, running_postgres
from tests.s3 import S3

SEED, TRANSACTIONS = 20260102, 100
_names = itertools.count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgreSql]:
    with running_postgres() as server:
        yield server


@pytest.fixture
def upstream() -> Upstream:
    return Upstream(SEED, transactions=TRANSACTIONS)


@pytest.fixture
def captures(upstream: Upstream) -> Iterator[Captures]:
    with Captures(upstream) as server:
        yield server


@pytest.fixture
def changefeed(captures: Captures) -> Changefeed:
    return Changefeed(
        parse({"endpoint": captures.uri, "changefeed": "bank", "cuts": "true", "ack": "false"})
    )


@pytest.fixture(params=["postgresql", "mysql"])
def database(request, postgres, mariadb) -> str:
    """The URI of an empty database."""
    if request.param == "postgresql":
        return postgres.create(f"lake{next(_names)}")
    for name in ("bank", "bank2"):
        mariadb.execute(f"DROP DATABASE IF EXISTS {name}")
    return f"{mariadb.uri}/{mariadb.database('lake')}"


@pytest.fixture
def s3():
    if not of_stores(default_directory(), "iceberg"):
        pytest.skip("Iceberg's jar for S3 is missing; `make jars-s3` fetches it")
    with S3().running() as server:
        yield server


@pytest.fixture(params=["disk", "s3"])
def rest(request, spark, tmp_path):
    if request.param == "s3":
        s3 = request.getfixturevalue("s3")
        catalog = RestCatalog(spark, f"s3://{s3.bucket}/warehouse", s3)
    else:
        catalog = RestCatalog(spark, str(tmp_path / "warehouse"))
    with catalog.running() as server:
        yield server


@pytest.fixture
def catalog_name(spark, rest):
    """The catalog, as Spark's settings call it."""
    name = f"lake{next(_names)}"
    settings = {"type": "rest", "uri": rest.uri, "rest.client.max-retries": "1"}
    for setting, value in settings.items():
        spark.conf.set(f"spark.sql.catalog.{name}.{setting}", value)
    # Makes it the active session, which readers use: other tests may have left another one.
    spark.createDataFrame([(1,)], "id INT")
    yield name
    for setting in (*settings, "token"):
        spark.conf.unset(f"spark.sql.catalog.{name}.{setting}")


@pytest.fixture
def root(catalog_name):
    return f"catalog://{catalog_name}/mysql"


@pytest.fixture(scope="session")
def broker(tmp_path_factory) -> Iterator[Broker]:
    if not is_installed():
        pytest.skip("there is no Kafka broker; `make kafka` fetches it")
    if not present(default_directory(), "kafka"):
        pytest.skip("Kafka's client is missing; `make jars` fetches it")
    with running_broker(tmp_path_factory.mktemp("kafka")) as server:
        yield server


@pytest.fixture
def topic(broker) -> str:
    """The name of a topic that is not there yet."""
    return f"lake{next(_names)}"
