import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.digest import Leaves, digests, key_texts, leaf_of

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("raw", pa.binary())])
ROWS = st.dictionaries(st.integers(-(2**63), 2**63 - 1), st.tuples(st.none() | st.text(), st.none() | st.binary()))


def batch(rows, names=("id", "name", "raw")):
    documents = [{"id": key, "name": name, "raw": raw} for key, (name, raw) in rows]
    return pa.RecordBatch.from_pylist(documents, schema=SCHEMA).select(list(names))


def leaves(*batches, bits=4):
    found = Leaves(bits)
    for part in batches:
        found.add(part, ["id"])
    return found


@given(ROWS, st.integers(0, 10), st.randoms())
def test_leaves_do_not_depend_on_order_batches_or_column_order(rows, cut, chance):
    pairs = list(rows.items())
    whole = leaves(batch(pairs))
    chance.shuffle(pairs)
    parts = leaves(batch(pairs[:cut], ("raw", "id", "name")), batch(pairs[cut:]))
    assert whole.to_bytes() == parts.to_bytes()
    assert whole.rows == len(rows)


@given(ROWS, ROWS)
def test_leaves_tell_different_tables_apart(one, other):
    same = leaves(batch(one.items())).to_bytes() == leaves(batch(other.items())).to_bytes()
    assert same == (one == other)


def test_parts_are_merged_and_a_digest_stays_what_it_is():
    rows = {1: ("a", b"\0"), 2: (None, None)}
    one, other = leaves(batch(list(rows.items())[:1])), leaves(batch(list(rows.items())[1:]))
    one.merge(*other.to_bytes())
    assert one.to_bytes() == leaves(batch(rows.items())).to_bytes()
    keys = digests(key_texts(batch(rows.items()), ["id"]))
    assert [f"{key:016x}" for key in keys] == DIGESTS
    assert leaf_of(keys, 8).tolist() == [int(text[:2], 16) for text in DIGESTS]


DIGESTS = ["1ea450d66dcfc383", "3c67f82737dfaf28"]
