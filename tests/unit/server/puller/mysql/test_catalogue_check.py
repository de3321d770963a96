"""What differs between the tables that were followed and those of the server's catalogue."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from server.puller.mysql.catalogue_check import GONE, CatalogueCheck, differing
from server.puller.mysql.session.catalogue import shows
from server.puller.mysql.session.options import MySqlOptions
from storage.mysql.schema import Column, Type

NAMES = st.sampled_from([("s", "a"), ("s", "b"), ("t", "a")])
INT, DATE = (Column(name="c", type=kind) for kind in (Type.LONG, Type.DATE))
COLUMNS = st.dictionaries(st.sampled_from(["id", "v", "w", "é"]), st.sampled_from([INT, DATE]))


def test_what_is_gone_has_come_or_has_other_columns_is_told() -> None:
    followed = {
        ("s", "gone"): {"id": INT},
        ("s", "same"): {"id": INT, "V": INT},
        ("s", "other"): {"id": INT, "v": INT, "x": INT},
    }
    found = {
        ("s", "same"): {"ID": INT, "v": INT},
        ("s", "other"): {"id": INT, "w": INT, "X": DATE},
        ("s", "new"): None,
    }
    assert differing(followed, found) == {
        ("s", "gone"): GONE,
        ("s", "other"): "column v is gone, column w has come, column x has another type",
        ("s", "new"): "it has come",
    }


def test_columns_that_were_not_read_do_not_differ() -> None:
    assert differing({("s", "t"): {"id": INT}}, {("s", "t"): None}) == {}
    assert differing({("s", "t"): None}, {("s", "t"): {"id": INT}}) == {}


@given(st.dictionaries(NAMES, COLUMNS), st.dictionaries(NAMES, COLUMNS))
def test_nothing_differs_exactly_where_both_are_the_same(
    followed: dict[tuple[str, str], dict[str, Column]],
    found: dict[tuple[str, str], dict[str, Column]],
) -> None:
    assert (differing(followed, found) == {}) == (followed == found)
    assert differing(followed, followed) == {}


def test_a_catalogue_does_not_tell_all_of_a_column() -> None:
    old, new = (Column(name="c", type=kind) for kind in (Type.DATETIME, Type.DATETIME2))
    assert shows(new, old)
    assert not shows(INT, old)
    smile, shown = (Column(name="c", type=Type.ENUM, elems=("a", elem)) for elem in ("😀", "?"))
    assert shows(shown, smile)
    assert not shows(smile, shown)
    assert not shows(Column(name="c", type=Type.ENUM, elems=("a",)), smile)


async def test_where_nobody_looks_any_more_no_difference_is_counted() -> None:
    check = CatalogueCheck("counted", MySqlOptions(addresses=(), user="u"))
    check.differences = {("s", "a"): GONE}

    def counted() -> float | None:
        return REGISTRY.get_sample_value(
            "tidemark_mysql_catalogue_differences", {"changefeed": "counted"}
        )

    with ThreadPoolExecutor(1) as executor:
        for _ in range(2):  # what was found stays with the source
            async with asyncio.TaskGroup() as tasks:
                run = tasks.create_task(check.run(lambda *_: True, executor))
                await asyncio.sleep(0)  # until it waits for its first look
                assert counted() == 1
                run.cancel()
            assert counted() is None
