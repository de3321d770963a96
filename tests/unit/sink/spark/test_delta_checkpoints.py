"""When the logs of Delta tables get their checkpoints: one at a time, and not all the time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from py4j.protocol import Py4JError
from pyspark_tidemark.lake.delta import checkpoints
from pyspark_tidemark.lake.delta.checkpoints import CHECKPOINT_EVERY, Checkpoints


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: clock.now_s)
    threads = lambda spark, workers, name: ThreadPoolExecutor(workers, name)  # noqa: E731
    monkeypatch.setattr(checkpoints, "SparkThreads", threads)
    return clock


def commit(counted, name, versions):
    for version in versions:
        counted.committed(name, version)
    counted.settle()


def test_a_log_gets_one_after_so_many_commits(clock):
    written = []
    counted = Checkpoints(None, written.append)
    commit(counted, "t", range(CHECKPOINT_EVERY))
    assert written == []
    commit(counted, "t", range(CHECKPOINT_EVERY, 2 * CHECKPOINT_EVERY))
    assert written == ["t"]
    commit(counted, "t", [2 * CHECKPOINT_EVERY])
    assert written == ["t", "t"]


def test_a_later_life_goes_on_where_the_numbers_are(clock):
    written = []
    counted = Checkpoints(None, written.append)
    commit(counted, "t", range(7 * CHECKPOINT_EVERY - 3, 7 * CHECKPOINT_EVERY))
    assert written == []
    commit(counted, "t", [7 * CHECKPOINT_EVERY])
    assert written == ["t"]


def test_behind_one_that_took_long_there_is_a_rest_and_then_the_longest_log_is_next(clock):
    """With twenty busy tables they cost more than all cuts together."""
    written = []

    def write(name):
        written.append(name)
        clock.now_s += 2.0

    counted = Checkpoints(None, write)
    for version in range(1, CHECKPOINT_EVERY + 1):
        commit(counted, "a", [version])
    for version in range(1, CHECKPOINT_EVERY + 21):
        commit(counted, "b", [version])
    for version in range(1, CHECKPOINT_EVERY + 11):
        commit(counted, "c", [version])
    assert written == ["a"]
    clock.now_s += 2.0 * checkpoints.REST
    commit(counted, "c", [CHECKPOINT_EVERY + 11])
    assert written == ["a", "b"]
    counted.forget("c")
    clock.now_s += 2.0 * checkpoints.REST
    commit(counted, "a", [CHECKPOINT_EVERY + 1])
    assert written == ["a", "b"]


def test_only_one_is_written_at_a_time(clock):
    began, go_on, written = threading.Event(), threading.Event(), []

    def write(name):
        began.set()
        go_on.wait(60)
        written.append(name)

    counted = Checkpoints(None, write)
    counted.committed("a", CHECKPOINT_EVERY)
    assert began.wait(60)
    counted.committed("b", CHECKPOINT_EVERY)
    go_on.set()
    counted.settle()
    assert written == ["a"]
    commit(counted, "b", [CHECKPOINT_EVERY + 1])
    assert written == ["a", "b"]


def test_one_that_fails_is_no_error_and_comes_again_later(clock, caplog):
    def write(name):
        raise Py4JError("no checkpoint today")

    counted = Checkpoints(None, write)
    commit(counted, "t", [CHECKPOINT_EVERY])
    assert "no checkpoint of t for now: no checkpoint today" in caplog.text


def test_a_job_that_ends_since_spark_is_gone_asks_nothing_of_it(clock, monkeypatch):
    """What it ended by was hidden behind the failure of a thread that had nothing to do."""

    def gone():
        raise Py4JError("nobody answers")

    monkeypatch.setattr(
        checkpoints,
        "SparkThreads",
        lambda spark, workers, name: ThreadPoolExecutor(workers, name, initializer=gone),
    )
    Checkpoints(None, str).settle()


def test_a_table_that_is_made_anew_begins_to_count_anew(clock):
    written = []
    counted = Checkpoints(None, written.append)
    commit(counted, "t", range(CHECKPOINT_EVERY - 1))
    commit(counted, "t", range(5))
    assert written == []
