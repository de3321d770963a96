"""What several rooms' tests share: one Spark, as a process has one JVM,
and its jars are those of its first session.
"""

import os
import time

import pytest


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    """One Spark for all lake formats."""
    from pyspark_tidemark.lake.session import open_session

    os.environ["TZ"] = "UTC"  # collect() gives timestamps in the local zone
    time.tzset()
    directory = tmp_path_factory.mktemp("spark")
    session = open_session(
        master="local[2]", driver_memory="1g", directory=directory, lake="delta", extra={}
    )
    yield session
    session.stop()
