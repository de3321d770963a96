"""Names match as a plain matcher says, and no pattern takes long on any name."""

import re
import time
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.changefeed.filter import ANY_TEXT, FilterRuleError, Regex, TableFilter, Wildcards

LONGEST = 64


def matches(parts: tuple[str, ...], name: str) -> bool:
    @cache
    def at(part: int, character: int) -> bool:
        if part == len(parts):
            return character == len(name)
        if parts[part] == ANY_TEXT:
            return at(part + 1, character) or (character < len(name) and at(part, character + 1))
        fits = character < len(name) and re.fullmatch(
            parts[part], name[character], re.IGNORECASE | re.DOTALL
        )
        return bool(fits) and at(part + 1, character + 1)

    return at(0, 0)


@given(
    st.lists(st.sampled_from([ANY_TEXT, "a", "b", ".", "[ab]", "[^a]"])).map(tuple),
    st.text(alphabet="abA\n", max_size=12),
)
def test_wildcards_match_as_trying_everything_does(parts: tuple[str, ...], name: str) -> None:
    assert Wildcards.of(parts).matches(name) == matches(parts, name)


@pytest.mark.parametrize(
    "rule", ["/(a+)+$/.*", "/(a|aa)*b$/.*", "*a" * 200 + "b.*", "[a-b]*a?" * 100 + ".*"]
)
def test_no_rule_takes_long_on_a_long_name(rule: str) -> None:
    """Python's own engine would take years; a minute is for the busiest machine."""
    began = time.process_time()
    assert not TableFilter([rule]).takes("a" * LONGEST + "c", "t")
    assert time.process_time() - began < 60


@pytest.mark.parametrize("text", ["(?=a)", r"(a)\1", "(a{1000}){1000}", "("])
def test_what_cannot_be_bounded_is_refused_by_name(text: str) -> None:
    with pytest.raises(FilterRuleError, match="cannot be read"):
        TableFilter([f"/{text}/.x"])


def test_a_regular_expression_is_looked_for_anywhere_and_without_case() -> None:
    assert Regex.of("^Ü.+z").matches("ü\nZ!")
    assert not Regex.of("^b").matches("ab")
