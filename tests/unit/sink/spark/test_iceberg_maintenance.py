"""When the maintenance of Iceberg tables works: after some commits, and not at once again after it
has failed.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from pyspark_tidemark.lake.iceberg import maintenance
from pyspark_tidemark.lake.iceberg.maintenance import Maintenance
from pyspark_tidemark.lake.target import Health

EVERY = 3


class Catalog:
    """Every table is there."""

    def load(self, name):
        return name

    existing = load

    def knows_vectors(self, table):
        return True

    def commits(self, table):
        return table

    def has_equality_deletes(self, table):
        return table > 1


class Works(Maintenance):
    """Its work waits until it may end, and fails if it is to."""

    def __init__(self):
        super().__init__(None, Catalog(), threading.Lock(), EVERY, vectors=False)
        self.rewrites = []
        self.failure = None
        self.may_end = threading.Event()

    def rewrite(self, name):
        self.rewrites.append(name)
        assert self.may_end.wait(30)
        if self.failure is not None:
            raise self.failure

    def expire(self, name, kept):
        pass

    def health(self, name):
        return Health(1)

    def commit(self, count):
        for _ in range(count):
            self.committed("t", 1, deletes=True)

    def finished(self):
        self.may_end.set()
        self._running.outcome.exception()
        health = self.run(None)
        self.may_end.clear()
        return health


@pytest.fixture
def works(monkeypatch):
    monkeypatch.setattr(
        maintenance, "SparkThreads", lambda spark, count, name: ThreadPoolExecutor(count, name)
    )
    monkeypatch.setattr(maintenance, "_REST", 0.0)
    works = Works()
    yield works
    works.may_end.set()
    works.close()


def test_commits_during_a_rewrite_count_for_the_next_one(works):
    works.commit(EVERY)
    works.run(None)
    works.commit(EVERY - 1)
    assert works.finished() == Health(1)
    works.run(None)
    assert works.rewrites == ["t"]
    works.commit(1)
    works.run(None)
    assert works.finished() == Health(1)
    assert works.rewrites == ["t", "t"]


def test_a_rewrite_that_fails_is_due_again_but_not_at_each_cut(works, monkeypatch):
    works.commit(EVERY)
    works.run(None)
    works.failure = OSError("the disk is away")
    assert works.finished() is None
    for _ in range(5):
        assert works.run(None) is None
    assert works.rewrites == ["t"]
    works.failure, works._not_before = None, 0.0  # a minute later
    works.run(None)
    assert works.finished() == Health(1)
    assert works.rewrites == ["t", "t"]


def test_a_table_that_is_dropped_during_its_rewrite_has_no_counts(works):
    works.commit(EVERY)
    works.run(None)
    works.forget("t")
    works.failure = OSError("its files are gone")
    assert works.finished() is None
    works._not_before = 0.0
    works.run(None)
    assert works.rewrites == ["t"]


def test_a_table_whose_work_fails_does_not_keep_the_others_from_theirs(works):
    """It has the most commits, each time more."""
    works.commit(EVERY)
    works.run(None)
    works.failure = OSError("its files are away")
    assert works.finished() is None
    works.commit(EVERY)
    for _ in range(EVERY):
        works.committed("other", 1, deletes=True)
    works.failure = None
    for _ in range(2):
        works._not_before = 0.0  # a minute later
        works.run(None)
        assert works.finished() == Health(1)
    assert works.rewrites == ["t", "other", "t"]


def test_commits_and_deletes_of_earlier_lives_count(works):
    """A job that started again more often than every so many commits never joined files."""
    works.committed("t", EVERY, deletes=False)
    works.run(None)
    assert works.finished() == Health(1)
    assert works.rewrites == ["t"]
    works.committed("young", 1, deletes=False)
    works.committed("after a rewrite", EVERY + 1, deletes=True)
    works.run(None)
    assert works._running is None
