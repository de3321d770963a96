"""What differs between the tables that were followed and those of the server's catalogue."""

from hypothesis import given
from hypothesis import strategies as st

from server.puller.mysql.catalogue_check import GONE, differing

NAMES = st.sampled_from([("s", "a"), ("s", "b"), ("t", "a")])
COLUMNS = st.dictionaries(st.sampled_from(["id", "v", "w", "é"]), st.sampled_from(["int", "date"]))


def test_what_is_gone_has_come_or_has_other_columns_is_told() -> None:
    followed = {
        ("s", "gone"): {"id": 1},
        ("s", "same"): {"id": 1, "V": 2},
        ("s", "other"): {"id": 1, "v": 2, "x": 3},
    }
    found = {
        ("s", "same"): {"ID": 1, "v": 2},
        ("s", "other"): {"id": 1, "w": 2, "X": 4},
        ("s", "new"): None,
    }
    assert differing(followed, found) == {
        ("s", "gone"): GONE,
        ("s", "other"): "column v is gone, column w has come, column x has another type",
        ("s", "new"): "it has come",
    }


def test_columns_that_were_not_read_do_not_differ() -> None:
    assert differing({("s", "t"): {"id": 1}}, {("s", "t"): None}) == {}
    assert differing({("s", "t"): None}, {("s", "t"): {"id": 1}}) == {}


@given(st.dictionaries(NAMES, COLUMNS), st.dictionaries(NAMES, COLUMNS))
def test_nothing_differs_exactly_where_both_are_the_same(
    followed: dict[tuple[str, str], dict[str, str]], found: dict[tuple[str, str], dict[str, str]]
) -> None:
    assert (differing(followed, found) == {}) == (followed == found)
    assert differing(followed, followed) == {}
