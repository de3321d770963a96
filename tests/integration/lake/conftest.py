"""Databases, an upstream with a history, and its captures."""

import itertools
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
