"""A few random lives of a TiDB table whose keys move;
longer by `python -m tests.fuzz.tidb.moves`.
"""

from tests.fuzz.tidb.moves import lives


def test_a_reader_has_the_rows_of_the_oracle_whatever_moves_and_dies() -> None:
    told = lives(1e9, first=1, count=6)
    assert told["kills"] >= 3
    assert told["lives"] == 6
