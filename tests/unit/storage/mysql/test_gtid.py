"""Sets of GTIDs against plain sets of numbers."""

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.model.errors import InvalidError
from storage.mysql.gtid import MariaGtidSet, MysqlGtidSet

SERVERS = [uuid.UUID(int=number) for number in (1, 2, 1 << 127)]
TAGS = ("", "blue", "a_tag_that_is_as_long_as_it_can_")
Tagged = tuple[uuid.UUID, int, str]
GTIDS = st.lists(st.tuples(st.sampled_from(SERVERS), st.integers(1, 30), st.sampled_from(TAGS)))


def mysql(gtids: list[Tagged]) -> MysqlGtidSet:
    found = MysqlGtidSet()
    for server, gno, tag in gtids:
        found = found.add(server, gno, tag)
    return found


@given(GTIDS, GTIDS)
def test_a_mysql_set_holds_what_was_added_and_nothing_else(
    gtids: list[Tagged], others: list[Tagged]
) -> None:
    found = mysql(gtids)
    every = [(server, gno, tag) for server in SERVERS for gno in range(1, 31) for tag in TAGS]
    assert all(found.holds(*each) == (each in gtids) for each in every)
    assert found.contains(mysql(others)) == (set(others) <= set(gtids))
    assert MysqlGtidSet.parse(str(found)) == found
    assert MysqlGtidSet.decode(found.encode()) == found


@given(GTIDS)
def test_the_text_of_a_mysql_set_does_not_depend_on_the_order_of_adding(
    gtids: list[Tagged],
) -> None:
    assert str(mysql(gtids)) == str(mysql(gtids[::-1]))


def test_a_mysql_set_is_encoded_with_ends_behind_the_last_ones() -> None:
    found = MysqlGtidSet.parse(f"{SERVERS[0]}:1-5:7")
    assert found.encode().hex() == (
        "0100000000000000" + SERVERS[0].hex + "0200000000000000"
        "0100000000000000" + "0600000000000000" + "0700000000000000" + "0800000000000000"
    )


def test_a_mariadb_set_has_the_last_one_of_each_domain() -> None:
    found = MariaGtidSet.parse("0-1-41, 1-2-5").add(0, 3, 42).add(7, 1, 1)
    assert str(found) == "0-3-42,1-2-5,7-1-1"
    assert found.holds(0, 42)
    assert not found.holds(0, 43)
    assert found.contains(MariaGtidSet.parse("0-9-42"))
    assert not found.contains(MariaGtidSet.parse("2-1-1"))
    assert MariaGtidSet.parse("") == MariaGtidSet()


@pytest.mark.parametrize(
    "text", ["0-1", "a-b-c", "0-1-2;0-1-3", "0-1-٣", f"0-{1 << 32}-1", f"0-1-{1 << 64}"]
)
def test_other_text_is_no_mariadb_set(text: str) -> None:
    with pytest.raises(InvalidError):
        MariaGtidSet.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "x:1",
        f"{SERVERS[0]}:5-3",
        f"{SERVERS[0]}:1:+",
        f"{SERVERS[0]}:t:0",
        f"{SERVERS[0]}:1_0",
        f"{SERVERS[0]}:é:1",
        f"{SERVERS[0]}:1-{(1 << 63) - 1}",
    ],
)
def test_other_text_is_no_mysql_set(text: str) -> None:
    with pytest.raises(InvalidError):
        MysqlGtidSet.parse(text)
