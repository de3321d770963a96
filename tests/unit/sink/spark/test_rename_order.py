"""The steps of a RENAME of several tables: each finds its new name free,
and all are where they belong in the end.
"""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.lake.barrier import _rename_steps

NAMES = [f"s.{letter}" for letter in "abcdef"]


@given(st.permutations(NAMES), st.permutations(NAMES), st.integers(0, len(NAMES)))
def test_no_step_takes_a_name_that_another_table_still_has(olds, news, count):
    renamed = [(old, new) for old, new in zip(olds, news, strict=True) if old != new][:count]
    there = {old: old for old, _ in renamed}
    for old, new in _rename_steps(renamed, 7):
        assert new not in there
        there[new] = there.pop(old)
    assert there == {new: old for old, new in renamed}


@given(st.permutations(NAMES))
def test_a_name_between_is_needed_only_where_tables_change_places(olds):
    chain = list(itertools.pairwise(olds))
    assert sorted(_rename_steps(chain, 7)) == sorted(chain)
    assert len(_rename_steps([*chain, (olds[-1], olds[0])], 7)) == len(chain) + 2
