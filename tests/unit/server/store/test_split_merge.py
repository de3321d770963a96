"""Which neighbours merge: touching ones that stay small together, each in one merge,
the smaller into the bigger.
"""

from hypothesis import given
from hypothesis import strategies as st

from server.store.split_merge import tiny_neighbours
from storage.mvcc.region import Region


@given(
    st.lists(st.tuples(st.integers(0, 100), st.booleans()), min_size=1, max_size=12),
    st.integers(0, 120),
)
def test_pairs_touch_fit_and_are_disjoint(drawn: list[tuple[int, bool]], most: int) -> None:
    bounds = [b"", *(bytes([at]) for at in range(1, len(drawn))), b""]
    regions = [Region(at + 1, 100 + at, bounds[at], bounds[at + 1]) for at in range(len(drawn))]
    sizes = {region: size for region, (size, _) in zip(regions, drawn, strict=True)}
    calm = [region for region, (_, is_calm) in zip(regions, drawn, strict=True) if is_calm]
    pairs = tiny_neighbours(calm, sizes, most)
    used = [region for pair in pairs for region in pair]
    assert len(used) == len(set(used))
    assert set(used) <= set(calm)
    for source, target in pairs:
        assert source.touches(target)
        assert sizes[source] <= sizes[target]
        assert sizes[source] + sizes[target] <= most
    if not most:
        assert not pairs


def test_a_store_of_empty_regions_comes_down_to_one() -> None:
    regions = [Region(1, 1, b"", b"b"), Region(2, 2, b"b", b"c"), Region(3, 3, b"c", b"")]
    while len(regions) > 1:
        for source, target in tiny_neighbours(regions, dict.fromkeys(regions, 0), 10):
            regions = sorted(
                [*(one for one in regions if one not in (source, target)), target.merged(source)],
                key=lambda one: one.start_key,
            )
    assert (regions[0].start_key, regions[0].end_key) == (b"", b"")
