from datetime import date
from decimal import Decimal

from pyspark_tidemark.lake.predicate import any_of, quoted


def test_values_become_literals_that_nothing_can_break_out_of():
    assert any_of("id", [1, -2]) == "`id` IN (1, -2)"
    assert any_of("k", ["it's", "back\\slash"]) == r"`k` IN ('it\'s', 'back\\slash')"
    assert any_of("u", [Decimal(2**64 - 1)]) == "`u` IN (18446744073709551615BD)"


def test_values_without_an_exact_literal_give_no_predicate():
    assert any_of("k", [date(2020, 1, 1)]) is None
    assert any_of("k", [1, None]) is None
    assert any_of("k", []) is None


def test_identifiers_are_quoted():
    assert quoted("a`b") == "`a``b`"
