"""A few fixed lives of `tests.fuzz.lakes`; its command has any number of others."""

import itertools
from collections import Counter

import pytest

from tests.fuzz import lakes
from tests.fuzz.lakes import Life, Place

pytestmark = pytest.mark.timeout(600)
_numbers = itertools.count(1)


@pytest.fixture
def place(request, tmp_path):
    kind = request.param
    if kind in lakes.FILES:
        return Place(kind, f"{kind}://{tmp_path}", request.getfixturevalue("spark"))
    if kind == "postgresql":
        return Place(kind, request.getfixturevalue("postgres").create(f"lives{next(_numbers)}"))
    mariadb = request.getfixturevalue("mariadb")
    for name in ("bank", "Größe"):
        mariadb.execute(f"DROP DATABASE IF EXISTS `{name}`")
    return Place(kind, f"{mariadb.uri}/{mariadb.database('lives')}")


@pytest.mark.parametrize(
    ("place", "mode", "seed"),
    [
        ("delta", "upsert", 1100),
        ("iceberg", "upsert", 1203),
        ("parquet", "append", 301),
        ("postgresql", "upsert", 1),
        ("postgresql", "scd2", 700),
        ("mysql", "upsert", 501),
        ("mysql", "scd2", 710),
        # a new column of the key that files are older than
        ("delta", "scd2", 1100461553),
        # a table made anew without a column of its key
        ("mysql", "scd2", 1491944298),
        # a death behind the drop of a table, with an odd name, that is made anew
        ("postgresql", "upsert", 1000003647),
        ("delta", "soft-delete", 2100),
        ("iceberg", "soft-delete", 2200),
        ("postgresql", "soft-delete", 2300),
        ("mysql", "soft-delete", 2400),
    ],
    indirect=["place"],
)
def test_a_target_equals_the_replay_whatever_happens(place, mode, seed, monkeypatch):
    monkeypatch.setattr(lakes, "STEPS", 20 if seed < 1 << 20 else 40)
    told = Counter()
    Life(seed, place, mode, told).run()
    assert told["cuts"]
    assert told["rows"]
