import struct
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import record
from storage.record import (
    DATA,
    FOOTER,
    HEADER_BYTES,
    Gap,
    Record,
    RecordCorruptError,
    RecordTooLargeError,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "value_log_record.hex"


def laid_out(payloads: list[bytes], start: int = 0) -> tuple[bytes, list[Record]]:
    data = b""
    records = []
    for payload in payloads:
        offset = start + len(data)
        data += record.encode(payload, offset) + payload
        records.append(Record(offset, HEADER_BYTES + len(payload), DATA, payload))
    return data, records


def scanned(data: bytes, start: int = 0) -> list[Record | Gap]:
    return list(record.scan(lambda offset, size: data[offset : offset + size], start, len(data)))


def test_the_layout_is_the_documented_one() -> None:
    data = record.encode(b"tide", 0x30) + b"tide"
    assert data.hex(" ") == GOLDEN.read_text().strip()
    magic, version, kind, zero, length, crc = struct.unpack_from("<IBBHII", data)
    assert (magic, version, kind, zero, length) == (0x70B1D4A7, 1, 0, 0, 4)
    assert crc == google_crc32c.value(struct.pack("<QBBHI", 0x30, 1, 0, 0, 4) + b"tide")


@given(st.binary(max_size=300), st.integers(0, 1 << 40), st.sampled_from([DATA, FOOTER]))
def test_decode_inverts_encode(payload: bytes, offset: int, kind: int) -> None:
    data = record.encode(payload, offset, kind) + payload
    assert record.decode(data, offset) == Record(offset, len(data), kind, payload)


@given(st.binary(max_size=40), st.integers(0, 1000), st.data())
def test_any_flipped_bit_is_noticed(payload: bytes, offset: int, data: st.DataObject) -> None:
    good = bytearray(record.encode(payload, offset) + payload)
    bit = data.draw(st.integers(0, len(good) * 8 - 1))
    good[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RecordCorruptError):
        record.decode(bytes(good), offset)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=6), st.integers(0, 1000), st.data())
def test_one_of_many_records_in_a_buffer_is_read_and_each_flipped_bit_of_it_noticed(
    payloads: list[bytes], start: int, data: st.DataObject
) -> None:
    buffer, records = laid_out(payloads, start)
    chosen = data.draw(st.sampled_from(records))
    at = chosen.offset - start
    assert record.payload_at(buffer, at, chosen.length, chosen.offset) == chosen.payload
    damaged = bytearray(buffer)
    bit = data.draw(st.integers(0, chosen.length * 8 - 1))
    damaged[at + bit // 8] ^= 1 << bit % 8
    with pytest.raises(RecordCorruptError):
        record.payload_at(bytes(damaged), at, chosen.length, chosen.offset)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=3), st.integers(0, 200), st.data())
def test_another_place_or_length_than_that_of_a_record_is_damage(
    payloads: list[bytes], length: int, data: st.DataObject
) -> None:
    buffer, records = laid_out(payloads)
    at = data.draw(st.integers(0, len(buffer)))
    if (at, length) not in [(each.offset, each.length) for each in records]:
        with pytest.raises(RecordCorruptError):
            record.payload_at(buffer, at, length, at)


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_a_scan_finds_all_records(payloads: list[bytes]) -> None:
    data, records = laid_out(payloads)
    assert scanned(data) == records


@given(
    st.lists(st.binary(max_size=30), min_size=1, max_size=10),
    st.binary(min_size=1, max_size=40),
    st.data(),
)
def test_a_scan_passes_over_damage_and_reports_it(
    payloads: list[bytes], junk: bytes, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(payloads)))
    head, before = laid_out(payloads[:cut])
    tail, after = laid_out(payloads[cut:], len(head) + len(junk))
    assert scanned(head + junk + tail) == [*before, Gap(len(head), len(junk)), *after]


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=10), st.integers(0, 500))
def test_a_torn_tail_is_one_gap(payloads: list[bytes], cut: int) -> None:
    data, records = laid_out(payloads)
    torn = data[: min(cut, len(data))]
    whole = [each for each in records if each.offset + each.length <= len(torn)]
    end = whole[-1].offset + whole[-1].length if whole else 0
    assert scanned(torn) == [*whole, *([Gap(end, len(torn) - end)] if len(torn) > end else [])]


def test_a_record_inside_a_damaged_payload_is_not_mistaken_for_one() -> None:
    inner, _ = laid_out([b"impostor"])
    data, _ = laid_out([b"padding!" + inner, b"last"])
    damaged = bytearray(data)
    damaged[HEADER_BYTES] ^= 0xFF
    found = scanned(bytes(damaged))
    assert [each.payload for each in found if isinstance(each, Record)] == [b"last"]


def test_records_larger_than_the_read_window_are_found_after_damage() -> None:
    payloads = [b"a" * (3 << 20), b"b" * 10, b"c" * (1 << 20)]
    data, records = laid_out(payloads)
    damaged = bytearray(data)
    damaged[100] ^= 1
    assert scanned(bytes(damaged)) == [Gap(0, records[0].length), *records[1:]]


def test_a_scan_can_start_at_any_record() -> None:
    data, records = laid_out([b"one", b"two", b"three"])
    assert scanned(data, records[1].offset) == records[1:]


def test_a_payload_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MAX_PAYLOAD_BYTES", 3)
    with pytest.raises(RecordTooLargeError, match="4 bytes; the most is 3"):
        record.encode(b"four", 0)
