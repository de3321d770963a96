"""What several rooms' tests share: one Spark, as a process has one JVM, and its jars are those of its first session.

And patience: a test that starts daemons, or is the first to need a shared server, may wait for a busy machine.
"""

import os
import time
from pathlib import Path

import pytest

PATIENCE_S = 400


def pytest_collection_modifyitems(items):
    """No test of a real process has less time than this."""
    for item in items:
        bound = item.get_closest_marker("timeout")
        if item.path.is_relative_to(Path(__file__).parent) and (bound is None or bound.args[0] < PATIENCE_S):
            item.add_marker(pytest.mark.timeout(PATIENCE_S), append=False)


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
