"""What all tests share.

Hypothesis has no deadline per example, and does not mind how long examples take to make: a busy machine misses both.
`timeout` bounds tests.
"""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

import server as _before_grpc  # noqa: F401 - it says how gRPC forks, before a test imports gRPC
from tests.mariadb import MariaDb, running_mariadb

settings.register_profile("tidemark", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tidemark")


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDb]:
    """One server for a whole session: work in a `database()` of your own, and leave its settings alone."""
    with running_mariadb() as server:
        yield server
