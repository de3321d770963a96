"""Masks: what readers are shown, and what is refused as it would not be one mask of one value."""

import datetime as dt
import hashlib
import hmac
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sink.masking import HASH, LENGTH_MAX, Mask, MaskError
from sink.mounter import default_of, plain, with_default

SALT = b"0123456789abcdef"
MOMENT = dt.datetime(2024, 2, 29, 1, 2, 3)  # noqa: DTZ001 - as Arrow gives and takes them
TEXTS = st.lists(st.none() | st.text(), max_size=30)


def hashed(values: pa.Array) -> list[str | None]:
    return Mask.parse(HASH, salt=lambda: SALT).shown(values).to_pylist()


def expected(text: bytes) -> str:
    return hmac.new(SALT, text, hashlib.sha256).hexdigest()


@given(TEXTS)
def test_a_hash_is_the_hmac_of_the_texts_bytes_and_keeps_values_apart(
    texts: list[str | None],
) -> None:
    shown = hashed(pa.array(texts, pa.string()))
    assert shown == [None if text is None else expected(text.encode()) for text in texts]
    assert len(set(shown)) == len(set(texts))


@given(st.lists(st.none() | st.binary(max_size=40), max_size=30), st.integers(0, 5))
def test_a_hash_does_not_depend_on_where_batches_end(values: list[bytes | None], cut: int) -> None:
    column = pa.array(values, pa.binary())
    assert hashed(column.slice(0, cut)) + hashed(column.slice(cut)) == hashed(column)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (pa.array([-7], pa.int64()), b"-7"),
        (pa.array([Decimal(2**64 - 1)], pa.decimal128(20, 0)), b"18446744073709551615"),
        (pa.array([Decimal("-0.50")], pa.decimal128(6, 2)), b"-0.50"),
        (pa.array([dt.date(2024, 2, 29)]), b"2024-02-29"),
        (pa.array([MOMENT], pa.timestamp("us")), None),
        (pa.array([MOMENT], pa.timestamp("us", "UTC")), None),
        (pa.array([b"\xff\x00"]), b"\xff\x00"),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_what_is_hashed_of_each_type_stays_the_same_for_ever(
    values: pa.Array, text: bytes | None
) -> None:
    zone = b"Z" if values.type == pa.timestamp("us", "UTC") else b""
    assert hashed(values) == [expected(text or b"2024-02-29 01:02:03.000000" + zone)]


@given(TEXTS, st.integers(1, 50))
def test_a_truncated_text_is_its_first_characters(texts: list[str | None], length: int) -> None:
    mask = Mask.parse(f"truncate.to.{length}.chars")
    shown = mask.shown(pa.array(texts, pa.string())).to_pylist()
    assert shown == [None if text is None else text[:length] for text in texts]


@given(st.lists(st.none() | st.integers(-9, 9), max_size=30), st.integers(0, 50))
def test_a_masked_value_is_asterisks_of_whatever_type_it_was(
    values: list[int | None], length: int
) -> None:
    mask = Mask.parse(f"MASK.with.{length}.chars")
    shown = mask.shown(pa.array(values, pa.int32()))
    assert shown.type == pa.string()
    assert shown.to_pylist() == [None if value is None else "*" * length for value in values]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hash",
        "mask.hash.MD5",
        "mask.hash.SHA-1",
        "mask.with.-1.chars",
        "mask.with.2",
        "truncate.to.0.chars",
        f"truncate.to.{LENGTH_MAX + 1}.chars",
        "mask.with.9999999.chars",
    ],
)
def test_what_is_no_mask_is_refused(text: str) -> None:
    with pytest.raises(MaskError):
        Mask.parse(text)


def test_a_key_is_hashed_or_shown_as_it_is() -> None:
    Mask.parse(HASH).check("t.id", pa.int64(), is_key=True)
    for text in ("mask.with.3.chars", "truncate.to.3.chars"):
        with pytest.raises(MaskError, match=r"t\.id tells rows apart.*mask\.hash\.SHA-256"):
            Mask.parse(text).check("t.id", pa.string(), is_key=True)


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64(), pa.list_(pa.float32())])
def test_values_that_have_no_one_text_are_not_hashed(kind: pa.DataType) -> None:
    with pytest.raises(MaskError, match="no one text"):
        Mask.parse(HASH).check("t.v", kind, is_key=False)
    Mask.parse("mask.with.3.chars").check("t.v", kind, is_key=False)


def test_only_texts_are_shortened() -> None:
    with pytest.raises(MaskError, match="cannot shorten"):
        Mask.parse("truncate.to.3.chars").check("t.v", pa.binary(), is_key=False)


def test_a_hash_without_a_salt_says_what_is_missing() -> None:
    with pytest.raises(MaskError, match="--salt-file"):
        Mask.parse(HASH).shown(pa.array(["x"]))
    assert Mask.parse(HASH).shown(pa.array([None], pa.string())).to_pylist() == [None]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (5, pa.int32()),
        (Decimal("1.50"), pa.decimal128(5, 2)),
        ("é", pa.string()),
        (b"\xff", pa.binary()),
        (dt.date(2024, 1, 2), pa.date32()),
        (MOMENT.replace(microsecond=6), pa.timestamp("us")),
        (MOMENT.replace(microsecond=6), pa.timestamp("us", "UTC")),
    ],
)
def test_a_columns_default_is_read_as_the_value_that_it_was_made_of(
    value: Any, kind: pa.DataType
) -> None:
    default = default_of(with_default(pa.field("c", kind), plain(value)))
    assert default is not None
    assert default.equals(pa.array([value], kind))
    assert default_of(pa.field("c", kind)) is None
