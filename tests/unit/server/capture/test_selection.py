"""A filter that takes nothing is told with the tables that there are."""

from typing import Any

import pytest

from server.capture.creation import select_tables
from server.capture.errors import ParameterError
from server.changefeed.filter import TableFilter
from server.changefeed.terms import Terms
from tests.unit.server.capture.test_names import record


class Source:
    """One that has some tables."""

    def __init__(self, names: list[str]) -> None:
        self._tables = [record(name, number=n) for n, name in enumerate(names, 7)]

    async def snapshot(self, ts: int, before: Any = ()) -> Any:
        return self._tables


async def refusal(names: list[str]) -> str:
    source: Any = Source(names)
    with pytest.raises(ParameterError) as caught:
        await select_tables(source, Terms("feed", TableFilter(["shop.ordes"])), 1)
    return caught.value.message


async def test_the_tables_that_there_are_are_named():
    said = await refusal(["orders", "customers"])
    assert said.endswith("there are shop.customers, shop.orders")


async def test_of_many_tables_some_are_named():
    said = await refusal([f"t{n:03}" for n in range(300)])
    assert said.endswith("shop.t019, and 280 more")


async def test_a_source_that_shows_nothing_is_told_with_what_finds_out_why():
    assert "tidemark cli source check" in await refusal([])
