"""MySQL's binary JSON: written here as the server writes it, read back as the text it prints."""

import json
import struct
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.model.errors import CorruptError
from storage.mysql.json import decode_json
from storage.tidb.json import JsonBytes

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9)
    | st.text(st.just("x"), min_size=120, max_size=140)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5)
    ),
)


def sized(data: bytes) -> bytes:
    size, out = len(data), b""
    while size > 0x7F:
        out, size = out + bytes((size & 0x7F | 0x80,)), size >> 7
    return out + bytes((size,)) + data


def encode(value: Any, *, large: bool) -> tuple[int, bytes]:
    match value:
        case None | True | False:
            return 4, bytes(([None, True, False].index(value),))
        case int():
            kinds = ((5, "<h"), (6, "<H"), (7, "<i"), (8, "<I"), (9, "<q"), (10, "<Q"))
            for kind, form in kinds:
                with suppress(struct.error):
                    return kind, struct.pack(form, value)
            raise AssertionError
        case float():
            return 11, struct.pack("<d", value)
        case str():
            return 12, sized(value.encode())
        case list():
            return 2 + large, container([], value, large=large)
        case _:
            return 0 + large, container(
                [key.encode() for key in value], list(value.values()), large=large
            )


def container(keys: list[bytes], values: list[Any], *, large: bool) -> bytes:
    form, width = ("<I", 4) if large else ("<H", 2)
    at = 2 * width + len(keys) * (width + 2) + len(values) * (1 + width)
    head, entries, tail = b"", b"", b""
    for key in keys:
        head, tail = (
            head + struct.pack(form, at + len(tail)) + struct.pack("<H", len(key)),
            tail + key,
        )
    for value in values:
        kind, content = encode(value, large=large)
        if kind in ({4, 5, 6, 7, 8} if large else {4, 5, 6}):
            entries += bytes((kind,)) + content.ljust(width, b"\0")
        else:
            entries, tail = (
                entries + bytes((kind,)) + struct.pack(form, at + len(tail)),
                tail + content,
            )
    return (
        struct.pack(form, len(values)) + struct.pack(form, at + len(tail)) + head + entries + tail
    )


@given(VALUES, st.booleans())
def test_what_a_document_means_survives(value: Any, large: bool) -> None:
    kind, content = encode(value, large=large)
    text = decode_json(bytes((kind,)) + content)
    assert json.loads(text) == value
    assert text == decode_json(bytes((kind,)) + content)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1.0"),
        (-0.0, "-0.0"),
        (1e14, "100000000000000.0"),
        (1e15, "1e15"),
        (1.5e300, "1.5e300"),
        (1e-15, "0.000000000000001"),
        (2.5e-16, "2.5e-16"),
        (123456789.125, "123456789.125"),
        (
            {"a": [1, None, {"ü": True}], "b": 'q"\n\x01'},
            '{"a": [1, null, {"ü": true}], "b": "q\\"\\n\\u0001"}',
        ),
    ],
)
def test_text_is_what_mysql_prints(value: Any, text: str) -> None:
    kind, content = encode(value, large=False)
    assert decode_json(bytes((kind,)) + content) == text


@pytest.mark.parametrize(
    ("kind", "content", "text"),
    [
        (246, b"\x05\x02" + b"\x80\x7b\x2d", "123.45"),
        (10, struct.pack("<q", ((2024 * 13 + 2) << 5 | 29) << 41), '"2024-02-29"'),
        (
            12,
            struct.pack(
                "<q", ((2024 * 13 + 2) << 22 | 29 << 17 | 12 << 12 | 34 << 6 | 56) << 24 | 7
            ),
            None,
        ),
        (11, struct.pack("<q", -((12 << 12 | 13 << 6 | 14) << 24 | 500000)), '"-12:13:14.500000"'),
        (252, b"\1\2\3", '"base64:type252:AQID"'),
    ],
)
def test_opaque_values_are_printed_by_their_type(
    kind: int, content: bytes, text: str | None
) -> None:
    data = b"\x0f" + bytes((kind,)) + sized(content)
    assert decode_json(data) == (text or '"2024-02-29 12:34:56.000007"')


def test_no_bytes_are_a_null() -> None:
    assert decode_json(b"") == "null"


@given(st.binary(max_size=60))
def test_foreign_bytes_are_read_or_refused_by_an_error_of_ours(data: bytes) -> None:
    with suppress(CorruptError):
        decode_json(data)


def array_of(offsets: list[tuple[int, int]], rest: bytes) -> bytes:
    """A large array of values of these types at these offsets."""
    entries = b"".join(struct.pack("<BI", *entry) for entry in offsets)
    return b"\3" + struct.pack("<II", len(offsets), 0) + entries + rest


def hostile_values() -> dict[str, bytes]:
    """By what each asks for, in at most 1 MiB."""
    count = 100_000
    text = sized(b"x" * 500_000)
    after = 8 + 5 * count
    keys = struct.pack("<II", count, 0)
    keys += struct.pack("<IH", 8, 0xFFFF) * count + b"\4\0\0\0\0" * count
    return {
        "one string, many times": array_of([(12, after)] * count, text),
        "one large key, many times": b"\1" + keys,
        "itself, many times": array_of([(3, 0)] * count, b""),
        "the next one, many times": nested_twice(99),
        "its own entries": array_of([(2, 8)] * count, b""),
        "more entries than bytes": b"\3" + struct.pack("<II", 0xFFFFFFFF, 0) + bytes(900_000),
        "a string beyond the end": array_of([(12, 13)], b"\xff\xff\xff\xff\x0f"),
        "backwards": array_of([(12, 0)] * count, b""),
    }


def nested_twice(depth: int) -> bytes:
    """Arrays of two entries, both of which are the next array: 2**depth values."""
    data, at = b"\3", 1
    for _ in range(depth):
        data += struct.pack("<II", 2, 0) + struct.pack("<BI", 3, 18) * 2
        at += 18
    return data + struct.pack("<II", 0, 0)


@pytest.mark.parametrize("name", hostile_values())
def test_a_damaged_value_costs_no_more_than_its_size(name: str, monkeypatch) -> None:
    data = hostile_values()[name]
    taken: list[int] = []
    take = JsonBytes.take
    monkeypatch.setattr(
        JsonBytes, "take", lambda self, size: (taken.append(size), take(self, size))[1]
    )
    with pytest.raises(CorruptError):
        decode_json(data)
    # All takes but the last were allowed, and what was read is no more than there is.
    assert sum(taken[:-1]) <= len(data)
    assert len(taken) <= len(data) // 4 + 2


def test_a_large_sound_value_is_read() -> None:
    value = {f"key {number}": [number, str(number), 0.5, None, {}] for number in range(3000)}
    kind, content = encode(value, large=True)
    assert json.loads(decode_json(bytes((kind,)) + content)) == value
