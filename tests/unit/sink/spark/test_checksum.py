"""The checksum of rows depends on the rows and on nothing else."""

from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.lake import checksum as module
from pyspark_tidemark.lake.checksum import checksum

SCHEMA = pa.schema(
    [
        ("a", pa.int64()),
        ("s", pa.string()),
        ("b", pa.binary()),
        ("d", pa.decimal128(12, 2)),
        ("t", pa.timestamp("us")),
    ]
)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "a": st.integers(-(1 << 63), (1 << 63) - 1),
            "s": st.none() | st.text(max_size=5),
            "b": st.none() | st.binary(max_size=5),
            "d": st.none() | st.integers(-(10**9), 10**9).map(lambda cents: Decimal(cents) / 100),
            "t": st.none() | st.integers(0, 1 << 40),
        }
    ),
    max_size=12,
)

GOLDEN = 2271882796515027732


def of(rows):
    return checksum([pa.RecordBatch.from_pylist(rows, schema=SCHEMA)])


@given(ROWS, st.randoms(use_true_random=False), st.integers(0, 12))
def test_order_and_batches_do_not_matter(rows, chance, at):
    mixed = chance.sample(rows, len(rows))
    parts = [pa.RecordBatch.from_pylist(part, schema=SCHEMA) for part in (mixed[:at], mixed[at:])]
    whole = pa.concat_tables([pa.Table.from_batches(parts)]).slice(0, len(rows))
    assert of(rows) == checksum(parts) == checksum([whole])


@given(ROWS, st.integers(1, 100))
def test_it_is_the_same_however_many_bytes_are_looked_at_together(rows, chunk_bytes):
    whole = of(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_BYTES", chunk_bytes)
        assert of(rows) == whole


def test_wide_rows_take_little_memory_at_a_time(monkeypatch):
    sizes = []
    polynomials = module._polynomials

    def seen(texts):
        sizes.append(sum(map(len, texts.to_pylist())))
        return polynomials(texts)

    monkeypatch.setattr(module, "_polynomials", seen)
    rows = [
        {"a": number, "s": "x" * size, "b": b"", "d": None, "t": None}
        for number, size in enumerate([9, 99_999] * 9)
    ]
    assert of(rows)[0] == len(rows)
    assert max(sizes) <= module._CHUNK_BYTES < sum(sizes)


@given(ROWS, ROWS)
def test_other_rows_have_another_checksum(one, two):
    same = sorted(map(repr, one)) == sorted(map(repr, two))
    assert (of(one) == of(two)) == same


def test_null_and_empty_and_neighbouring_columns_are_told_apart():
    def pair(s, b):
        return of([{"a": 1, "s": s, "b": b, "d": None, "t": None}])

    assert (
        len({pair(None, None), pair("", None), pair(None, b""), pair("x", b""), pair("", b"x")})
        == 5
    )


@given(st.lists(st.binary(max_size=5), max_size=12), st.integers(0, 3))
def test_texts_become_polynomials_of_their_bytes(texts, skipped):
    base, values = int(module._BASE), pa.array(texts, pa.binary()).slice(skipped)
    assert module._polynomials(values).tolist() == [
        sum((byte + 1) * base**at for at, byte in enumerate(text)) % (1 << 64)
        for text in texts[skipped:]
    ]


def test_the_value_is_as_written_down():
    assert of([{"a": 1, "s": "x", "b": b"\x00", "d": Decimal("1.50"), "t": 0}]) == (1, GOLDEN)
