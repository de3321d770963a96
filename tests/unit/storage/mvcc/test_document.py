"""The store's small documents: what was written is read, and anything else is a clear error."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from storage.model.errors import CorruptError
from storage.mvcc.record import encode_document, reading_document


@given(
    st.dictionaries(
        st.text(min_size=1).filter(lambda name: name not in {"format", "known"}), st.integers()
    )
)
@example({"version": 0})
def test_a_document_is_read_as_it_was_written(fields: dict[str, int]) -> None:
    with reading_document(encode_document(3, **fields), 3, "it") as document:
        assert document == {"format": 3, **fields}


def test_another_format_is_named() -> None:
    known = reading_document(encode_document(2), 3, "it")
    with pytest.raises(CorruptError, match="it has format 2; this program knows 3"), known:
        raise AssertionError("not reached")


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[]", b"{}", b"5", b'{"format": 3}', b'{"format": 3, "n": "x"}']
)
def test_damage_is_a_clear_error(data: bytes) -> None:
    with (
        pytest.raises(CorruptError, match="it is damaged"),
        reading_document(data, 3, "it") as document,
    ):
        int(document["n"])
