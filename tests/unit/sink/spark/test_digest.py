import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.digest import (
    COARSE_BITS,
    RangeChecksums,
    Ranges,
    digests,
    key_texts,
    row_texts,
)

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("raw", pa.binary())])
ROWS = st.dictionaries(
    st.integers(-(2**63), 2**63 - 1), st.tuples(st.none() | st.text(), st.none() | st.binary())
)
DIGESTS = ["1ea450d66dcfc383", "3c67f82737dfaf28"]


def batch(rows, names=("id", "name", "raw")):
    documents = [{"id": key, "name": name, "raw": raw} for key, (name, raw) in rows]
    return pa.RecordBatch.from_pylist(documents, schema=SCHEMA).select(list(names))


def range_checksums(*batches, ranges=Ranges(4)):  # noqa: B008 - immutable
    found = RangeChecksums(ranges)
    for part in batches:
        found.add(part, ["id"])
    return found


@given(ROWS, st.integers(0, 10), st.randoms())
def test_range_checksums_do_not_depend_on_order_batches_or_column_order(rows, cut, chance):
    pairs = list(rows.items())
    whole = range_checksums(batch(pairs))
    chance.shuffle(pairs)
    parts = range_checksums(batch(pairs[:cut], ("raw", "id", "name")), batch(pairs[cut:]))
    assert whole.to_bytes() == parts.to_bytes()
    assert whole.rows == len(rows)


@given(ROWS, ROWS)
def test_range_checksums_tell_different_tables_apart(one, other):
    same = (
        range_checksums(batch(one.items())).to_bytes()
        == range_checksums(batch(other.items())).to_bytes()
    )
    assert same == (one == other)


@given(ROWS)
def test_range_checksums_know_how_much_text_their_rows_are(rows):
    found = range_checksums(batch(rows.items()))
    assert found.sizes.sum() == sum(
        len(text.encode()) for text in row_texts(batch(rows.items())).to_pylist()
    )


def test_parts_are_merged_and_a_digest_stays_what_it_is():
    rows = {1: ("a", b"\0"), 2: (None, None)}
    one, other = (
        range_checksums(batch(list(rows.items())[:1])),
        range_checksums(batch(list(rows.items())[1:])),
    )
    one.merge(other.to_bytes())
    assert one.to_bytes() == range_checksums(batch(rows.items())).to_bytes()
    keys = digests(key_texts(batch(rows.items()), ["id"]))
    assert [f"{key:016x}" for key in keys] == DIGESTS
    assert Ranges(8).of(keys).tolist() == [int(text[:2], 16) for text in DIGESTS]


@given(ROWS, st.integers(0, 20), st.data())
def test_ranges_that_are_divided_once_more_hold_the_same_rows(rows, bits, data):
    keys = (
        digests(key_texts(batch(rows.items()), ["id"]))
        if rows
        else digests(pa.array([], pa.string()))
    )
    coarse = Ranges().of(keys).tolist()
    known = sorted({*coarse, 0, (1 << COARSE_BITS) - 1})
    within = tuple(sorted(data.draw(st.sets(st.sampled_from(known), min_size=1))))
    fine = Ranges(bits, within)
    assert len(fine) == len(within) << bits
    for key, number, place in zip(keys.tolist(), coarse, fine.of(keys).tolist(), strict=True):
        if number not in within:
            assert place == -1
        else:
            assert within[place >> bits] == number
            assert place & (1 << bits) - 1 == key >> 64 - COARSE_BITS - bits & (1 << bits) - 1
    assert range_checksums(batch(rows.items()), ranges=fine).rows == sum(
        number in within for number in coarse
    )
