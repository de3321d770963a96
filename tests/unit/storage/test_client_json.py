"""JSON of clients is strict where `json` is not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.client_json import read_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)  # fmt: skip


@given(VALUES, st.booleans())
def test_every_value_comes_back(value, ascii_only):
    assert read_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


def test_a_pair_of_surrogates_is_a_character():
    assert read_json(rb'{"a": "\ud83d\ude00"}') == {"a": "😀"}


@pytest.mark.parametrize(
    "body",
    [
        rb'"\udca0"',
        rb'{"\ud83d": 1}',
        b'"\xff"',
        b'"\xed\xa0\x80"',  # a surrogate in UTF-8, which has none
        b"NaN",
        b"[-Infinity]",
        b"[" * 100_000,
        b"",
        b"9" * 5000,
        b'{"a": 1, "a": 1}',
        b'[{"b": {"c": 1, "\\u0063": 2}}]',
    ],
    ids=lambda body: body[:12],
)
def test_what_is_no_json_is_a_value_error(body):
    with pytest.raises(ValueError, match=r"."):
        read_json(body)
