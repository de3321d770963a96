"""Where tables lie in a lake: plain names as they are, any other escaped,
each at a place of its own.
"""

import posixpath
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark_tidemark.lake.target import path_part, table_path

NAMES = (
    st.text(max_size=40)
    | st.text("./\\~%aA_ \0é\u0301:*=", max_size=12)
    | st.text(min_size=60, max_size=400)
)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("shop.orders", "shop/orders"),
        ("Shop.Order_Items2", "Shop/Order_Items2"),
        ("shop.order items", "shop/order items"),
        ("shop.a.b", "shop/a.b"),
        ("shop.表-1$", "shop/表-1$"),
        ("shop.../../evil", "shop/~2E.~2F..~2Fevil"),
        ("shop.a/b", "shop/a~2Fb"),
        ("shop.%2e", "shop/~252e"),
        ("shop.a\0b\n", "shop/a~00b~0A"),
        ("shop.t.", "shop/t~2E"),
        ("shop.~", "shop/~7E"),
        ("_tidemark_cuts.t", "~5Ftidemark_cuts/t"),
        ("shop._delta_log", "shop/~5Fdelta_log"),
        ("shop._mine", "shop/_mine"),
        ("", "~/~"),
    ],
)
def test_plain_names_stay_and_others_are_escaped(name, path):
    assert table_path("/lake", name) == f"/lake/{path}"


@given(NAMES)
@example("../../../evil")
@example("\ud800")
def test_a_name_is_one_part_that_never_leaves_the_root(name):
    part = path_part(name)
    assert part not in ("", ".", "..")
    assert not set(part) & set("/\\\0")
    assert part[0] != "."
    assert len(part.encode()) <= 200
    assert posixpath.normpath(f"/lake/{part}") == f"/lake/{part}"
    assert unicodedata.is_normalized("NFC", part)


@given(NAMES, NAMES)
@example("é", "e\u0301")
@example("a" * 300, "a" * 301)
@example("~2F", "/")
@example("~", "")
def test_two_names_have_two_places(one, other):
    assert (path_part(one) == path_part(other)) == (one == other)


@given(NAMES)
def test_a_part_says_which_name_it_is_of(name):
    part = path_part(name)
    if "~~" not in part:
        rest, read = part if part != "~" else "", bytearray()
        while rest:
            if rest[0] == "~":
                read += bytes.fromhex(rest[1:3])
                rest = rest[3:]
            else:
                read += rest[0].encode()
                rest = rest[1:]
        assert read.decode(errors="surrogatepass") == name
