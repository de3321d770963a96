"""What differs between the tables that were followed and those of the server's catalogue."""

from hypothesis import given
from hypothesis import strategies as st

from server.puller.mysql.catalogue_check import GONE, differing

NAMES = st.sampled_from([("s", "a"), ("s", "b"), ("t", "a")])
COLUMNS = st.lists(st.sampled_from(["id", "v", "w", "é"]), max_size=4, unique=True)


def test_what_is_gone_has_come_or_has_other_columns_is_told() -> None:
    followed = {("s", "gone"): ["id"], ("s", "same"): ["id", "V"], ("s", "other"): ["id", "v"]}
    found = {("s", "same"): ["ID", "v"], ("s", "other"): ["id", "w"], ("s", "new"): None}
    assert differing(followed, found) == {
        ("s", "gone"): GONE,
        ("s", "other"): "column v is gone, column w has come",
        ("s", "new"): "it has come",
    }


def test_columns_that_were_not_read_do_not_differ() -> None:
    assert differing({("s", "t"): ["id"]}, {("s", "t"): None}) == {}


@given(st.dictionaries(NAMES, COLUMNS), st.dictionaries(NAMES, COLUMNS))
def test_nothing_differs_exactly_where_both_are_the_same(
    followed: dict[tuple[str, str], list[str]], found: dict[tuple[str, str], list[str]]
) -> None:
    same = {name: set(columns) for name, columns in followed.items()} == {
        name: set(columns) for name, columns in found.items()
    }
    assert (differing(followed, found) == {}) == same
    assert differing(followed, followed) == {}
