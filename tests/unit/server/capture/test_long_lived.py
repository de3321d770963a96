"""What very many tables are made of is out of the collector's sight, and is freed in the end."""

import asyncio
import gc
import weakref

import pytest

from server.capture import long_lived
from server.capture.long_lived import TABLES_MIN, building_tables


class Knot:
    """Refers to itself."""

    def __init__(self):
        self.knot = self


@pytest.fixture(autouse=True)
def _thawed():
    yield
    gc.callbacks[:] = [each for each in gc.callbacks if each != long_lived._collections.ended]
    gc.unfreeze()
    assert gc.isenabled()


def test_the_collector_is_off_while_they_are_made_and_does_not_look_at_them_later():
    before = gc.get_freeze_count()
    with building_tables(TABLES_MIN):
        with building_tables(TABLES_MIN):
            assert not gc.isenabled()
        assert not gc.isenabled(), "another changefeed is still being read"
        made = [Knot() for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)


def test_an_error_switches_it_on_again():
    with pytest.raises(ValueError, match="unreadable"), building_tables(TABLES_MIN):
        raise ValueError("unreadable")
    assert gc.isenabled()


def test_few_tables_change_nothing():
    before = gc.get_freeze_count()
    with building_tables(TABLES_MIN - 1):
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


def test_cycles_of_what_has_ended_are_freed():
    with building_tables(TABLES_MIN):
        knot = Knot()
    known = weakref.ref(knot)
    del knot
    gc.collect()
    assert known() is not None, "it is frozen"
    long_lived.collect_cycles()
    assert known() is None


def test_what_a_long_collection_leaves_is_not_looked_at_again(monkeypatch):
    with building_tables(TABLES_MIN):
        pass
    monkeypatch.setattr(long_lived, "_LONG_S", -1.0)
    gc.unfreeze()
    gc.collect(1)
    assert gc.get_freeze_count() == 0, "of the young ones"
    gc.collect()
    assert gc.get_freeze_count() > 0


async def test_they_are_freed_soon_after_the_end(monkeypatch):
    monkeypatch.setattr(long_lived, "_FREE_AFTER_S", 0.0)
    freed = asyncio.Event()
    monkeypatch.setattr(long_lived, "collect_cycles", freed.set)
    long_lived.dropped_tables(TABLES_MIN)
    async with asyncio.timeout(60):
        await freed.wait()
