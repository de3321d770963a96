"""What several rooms' tests share: one Spark, as a process has one JVM,
and its jars are those of its first session.
"""

import os
import time
from pathlib import Path
from typing import Final

import pytest

LONGEST: Final = (
    "lake/test_evolution.py",
    "lake/test_aged.py",
    "lake/test_catalogs.py",
    "mysql/test_in_use.py",
    "lake/test_iceberg.py",
    "lake/test_partitions.py",
    "lake/test_other_writers.py",
    "lake/test_barrier_deaths.py",
    "lake/test_shared_spark.py",
    "capture/test_logs.py",
    "lake/test_writing_by_tasks.py",
    "lake/test_shards.py",
    "lake/test_delta_partitions.py",
    "spark/test_lake.py",
    "lake/test_filter_update.py",
    "lake/test_delta_logs.py",
    "verify/test_verify.py",
    "capture/test_moves.py",
    "capture/test_split_tables.py",
)
"""Files that take more than a minute, the longest first."""

_INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first: in the end no worker is alone with one of them."""
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    """One Spark for all lake formats.

    It interprets its plans, by night excepted: each of thousands of short queries would compile
    code that runs once, a sixth of the CPU. Jobs that tests start as processes compile theirs.
    """
    from pyspark_tidemark.lake.session import open_session

    os.environ["TZ"] = "UTC"  # collect() gives timestamps in the local zone
    time.tzset()
    directory = tmp_path_factory.mktemp("spark")
    session = open_session(
        master="local[2]",
        driver_memory="1g",
        directory=directory,
        lake="delta",
        extra={} if "TIDEMARK_TEST_NIGHTLY" in os.environ else _INTERPRETED,
    )
    yield session
    session.stop()
