"""Where a table is split: by what regions begin, without a gap, and no more than there are."""

from hypothesis import given
from hypothesis import strategies as st

from server.capture.worker.placement import TablePlacement
from server.capture.worker.splitting import divided
from storage.model.span import Span

SPAN = Span(7, b"b", b"y")
KEYS = st.lists(st.binary(min_size=1, max_size=3), unique=True, max_size=12).map(
    lambda keys: sorted(b"c" + key for key in keys)
)


@given(KEYS, st.integers(1, 6))
def test_the_parts_are_the_whole_without_a_gap_and_begin_where_regions_do(inside, parts):
    spans = divided(SPAN, inside, parts)
    assert len(spans) == min(parts, len(inside) + 1)
    assert [span.end_key for span in spans] == [*(each.start_key for each in spans[1:]), b"y"]
    assert spans[0].start_key == b"b"
    assert {span.start_key for span in spans[1:]} <= {*inside}
    counts = [sum(span.contains(key) for key in (b"b", *inside)) for span in spans]
    assert max(counts) - min(counts) <= 1


def test_a_placement_knows_the_parts_of_a_table_until_it_is_whole_again_or_gone():
    placement = TablePlacement(["a", "b"], "feed", [SPAN, Span(8, b"", b"")])
    one, two = divided(SPAN, [b"m"], 2)
    placement.reshape(SPAN, {one: "b", two: "a"})
    assert placement.parts(SPAN) == (one, two)
    assert (placement.whole(one), placement.whole(two)) == (SPAN, SPAN)
    assert (placement.worker(one), placement.worker(two)) == ("b", "a")
    assert placement.find(SPAN) is None
    placement.move([one], "a")
    placement.keep_only([SPAN])
    assert placement.parts(SPAN) == (one, two)
    assert {span for spans in placement.tables().values() for span in spans} == {one, two}
    placement.reshape(SPAN, {SPAN: "b"})
    assert placement.parts(SPAN) == (SPAN,)
    assert placement.tables()["b"] == (SPAN,)
    placement.reshape(SPAN, {one: "b", two: "a"})
    placement.keep_only([])
    assert (placement.parts(SPAN), placement.split()) == ((SPAN,), ())
    assert not any(placement.tables().values())
