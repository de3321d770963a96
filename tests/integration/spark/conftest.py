"""One upstream, one oracle server a test, and one Spark session for all of them."""

import pytest

from tests.integration.capture.processes import running_cluster
from tests.integration.spark.captures import Captures
from tests.integration.spark.upstream import Upstream

SEED = 20260101
TRANSACTIONS = 100


@pytest.fixture(scope="session")
def upstream():
    return Upstream(SEED, transactions=TRANSACTIONS)


@pytest.fixture
def captures(upstream):
    with Captures(upstream) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running
