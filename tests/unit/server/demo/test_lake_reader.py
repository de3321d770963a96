from hypothesis import given
from hypothesis import strategies as st

from server.demo.lake_reader import _spread


@given(st.lists(st.integers(0, 1000), unique=True).map(sorted), st.integers(2, 20))
def test_the_cuts_to_read_are_few_in_order_and_have_both_ends(
    versions: list[int], most: int
) -> None:
    chosen = _spread(versions, most)

    assert len(chosen) == len(set(chosen)) == min(most, len(versions))
    assert chosen == sorted(chosen)
    assert set(chosen) <= set(versions)
    assert chosen[:1] + chosen[-1:] == versions[:1] + versions[-1:]
