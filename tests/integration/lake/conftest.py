"""Databases, an upstream with a history, and its captures."""

import itertools
import os
import time
from collections.abc import Iterator

import pytest
from pyspark_tidemark.flight import Changefeed
from pyspark_tidemark.options import parse

from tests.integration.spark.captures import Captures
from tests.integration.spark.upstream import Upstream
from tests.postgres import PostgreSql, running_postgres

SEED, TRANSACTIONS = 20260102, 100
_names = itertools.count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgreSql]:
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    """One Spark for all lake formats."""
    from pyspark_tidemark.jars import JARS, default_directory, present
    from pyspark_tidemark.lake.session import open_session

    os.environ["TZ"] = "UTC"  # collect() gives timestamps in the local zone
    time.tzset()
    jars = ",".join(str(jar) for lake in JARS for jar in present(default_directory(), lake))
    directory = tmp_path_factory.mktemp("spark")
    extra = {"spark.jars": jars}
    session = open_session(master="local[2]", driver_memory="1g", directory=directory, lake="delta", extra=extra)
    yield session
    session.stop()


@pytest.fixture
def upstream() -> Upstream:
    return Upstream(SEED, transactions=TRANSACTIONS)


@pytest.fixture
def captures(upstream: Upstream) -> Iterator[Captures]:
    with Captures(upstream) as server:
        yield server


@pytest.fixture
def changefeed(captures: Captures) -> Changefeed:
    return Changefeed(parse({"endpoint": captures.uri, "changefeed": "bank", "cuts": "true", "ack": "false"}))


@pytest.fixture(params=["postgresql", "mysql"])
def database(request, postgres, mariadb) -> str:
    """The URI of an empty database."""
    if request.param == "postgresql":
        return postgres.create(f"lake{next(_names)}")
    for name in ("bank", "bank2"):
        mariadb.execute(f"DROP DATABASE IF EXISTS {name}")
    return f"{mariadb.uri}/{mariadb.database('lake')}"
