"""The maintenance of Delta tables: one that fails stops neither the cuts nor other tables'."""

from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.delta.maintenance import Maintenance
from pyspark_tidemark.lake.target import Health

EVERY = 8


FAILURES = [
    OSError("the disk is away"),
    SourceError("ErrLakeDamaged", "a file is no whole Parquet file"),
    pa.ArrowInvalid("a page cannot be decoded"),
]


class Tables:
    """Tables without files; those of the name `bad` cannot be read."""

    def __init__(self, failure):
        self.asked = []
        self.away = "bad"
        self._failure = failure

    def listing(self, name):
        self.asked.append(name)
        if name == self.away:
            raise self._failure
        return SimpleNamespace(files={})


@pytest.fixture(params=FAILURES, ids=lambda failure: type(failure).__name__)
def tables(request):
    return Tables(request.param)


def test_a_table_whose_compaction_fails_comes_again_behind_the_others(tables):
    """It ended the job, and did so again after as many commits."""
    maintenance = Maintenance(tables, EVERY)
    for count, name in ((EVERY + 1, "bad"), (EVERY, "good")):
        for _ in range(count):
            maintenance.committed(name, 1, grown=True)
    assert maintenance.run(None) is None
    assert maintenance.run(None) == Health()
    assert tables.asked[:2] == ["bad", "good"]
    del tables.asked[:]
    assert maintenance.run(None) is None
    assert tables.asked == []
    for _ in range(EVERY // 4):
        maintenance.committed("bad", 1, grown=True)
    tables.away = ""
    assert maintenance.run(None) == Health()


def test_commits_of_earlier_lives_count(tables):
    """A job that started again more often than every so many commits never compacted."""
    version, compacted = 0, []
    for _ in range(5):
        maintenance = Maintenance(tables, EVERY)
        for _ in range(EVERY // 2):
            maintenance.committed("good", version, grown=True)
            maintenance.run(None)
            version += 1
            if tables.asked:
                compacted.append(version)
                tables.asked.clear()
    assert len(compacted) == 2


def test_a_table_is_vacuumed_once_an_hour_whenever_the_job_starts(tables, monkeypatch):
    """A job that started again more often than every hour never removed a file."""
    now, vacuumed = 1_000_000.0, []
    monkeypatch.setattr("time.time", lambda: now)
    monkeypatch.setattr(Maintenance, "vacuum", lambda _self, name, _kept: vacuumed.append(name))
    for _ in range(100):
        maintenance = Maintenance(tables, EVERY)
        for _ in range(6):
            maintenance.committed("good", 1, grown=False)
            maintenance.run(None)
            now += 61
    assert 6 <= len(vacuumed) <= 10


def test_a_table_is_vacuumed_once_an_hour_by_one_job(tables, monkeypatch):
    now, vacuumed = 1_000_000.0, []
    monkeypatch.setattr("time.time", lambda: now)
    monkeypatch.setattr(Maintenance, "vacuum", lambda _self, name, _kept: vacuumed.append(name))
    maintenance = Maintenance(tables, EVERY)
    for _ in range(6 * 10):
        maintenance.committed("good", 1, grown=False)
        maintenance.run(None)
        now += 600
    assert 9 <= len(vacuumed) <= 10
