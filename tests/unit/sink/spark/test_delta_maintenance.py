"""The maintenance of Delta tables: one that fails stops neither the cuts nor other tables'."""

from types import SimpleNamespace

import pytest
from pyspark_tidemark.lake.delta.maintenance import Maintenance
from pyspark_tidemark.lake.target import Health

EVERY = 8


class Tables:
    """Tables without files; of one of them the disk is away."""

    def __init__(self):
        self.asked = []
        self.away = "bad"

    def listing(self, name):
        self.asked.append(name)
        if name == self.away:
            raise OSError("the disk is away")
        return SimpleNamespace(files={})


@pytest.fixture
def tables():
    return Tables()


def test_a_table_whose_compaction_fails_comes_again_behind_the_others(tables):
    """It ended the job, and did so again after as many commits."""
    maintenance = Maintenance(tables, EVERY)
    for count, name in ((EVERY + 1, "bad"), (EVERY, "good")):
        for _ in range(count):
            maintenance.committed(name, grown=True)
    assert maintenance.run(None) is None
    assert maintenance.run(None) == Health()
    assert tables.asked[:2] == ["bad", "good"]
    del tables.asked[:]
    assert maintenance.run(None) is None
    assert tables.asked == []
    for _ in range(EVERY // 4):
        maintenance.committed("bad", grown=True)
    tables.away = ""
    assert maintenance.run(None) == Health()
