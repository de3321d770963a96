from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.flight import SliceEndpoint
from pyspark_tidemark.reader import Part, packed


@given(st.lists(st.integers(0, 100)), st.integers(1, 150))
def test_packing_keeps_the_order_and_the_limit(sizes, limit):
    parts = [Part(SliceEndpoint(str(at), (), b"", 1, size), ()) for at, size in enumerate(sizes)]
    found = list(packed(parts, limit))
    assert [part for some in found for part in some] == parts
    for some in found:
        assert len(some) == 1 or sum(part.slice.size_bytes for part in some) <= limit
    for some, following in pairwise(found):
        assert sum(part.slice.size_bytes for part in some) + following[0].slice.size_bytes > limit
