"""What is spilled: read back as it was, by its own process alone, and never when it was changed."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.puller.open_transactions import Format, OpenRows, OpenTransactions
from sorter import Sorter, SorterSettings
from sorter.errors import BlockCorruptError
from storage.model.event import INSERT, Position, raw_batch
from storage.model.span import Span
from storage.spill_codec import COMPRESSIONS, PLAIN, SpillCodec, SpillDamagedError

CODECS = [SpillCodec(name, encrypted=hide) for name in COMPRESSIONS for hide in (False, True)]
HIDING = [codec for codec in CODECS if codec.hides]
SPAN = Span(7, b"a", b"b")
SECRET = b"4111 1111 1111 1111"


@given(st.sampled_from(CODECS), st.binary(max_size=2000), st.integers(0, 1 << 16))
def test_what_was_encoded_comes_back(codec: SpillCodec, data: bytes, zeros: int) -> None:
    whole = data + bytes(zeros)
    assert codec.decode(codec.encode(whole)).to_pybytes() == whole


@given(st.sampled_from(HIDING), st.binary(max_size=50), st.data())
def test_a_changed_or_cut_byte_of_what_is_encrypted_is_found(codec, data, draw) -> None:
    stored = bytearray(codec.encode(data))
    place = draw.draw(st.integers(0, len(stored) - 1))
    with pytest.raises(SpillDamagedError):
        codec.decode(bytes(stored[:place]))
    stored[place] ^= draw.draw(st.integers(1, 255))
    with pytest.raises(SpillDamagedError):
        codec.decode(bytes(stored))


@given(st.binary(max_size=200))
def test_garbage_is_damage_or_bytes_but_no_other_error(garbage: bytes) -> None:
    for codec in CODECS:
        try:
            codec.decode(garbage)
        except SpillDamagedError:
            assert codec is not PLAIN


def test_another_process_cannot_read_it() -> None:
    stored = SpillCodec(encrypted=True).encode(SECRET)
    with pytest.raises(SpillDamagedError, match="seal of this process"):
        SpillCodec(encrypted=True).decode(stored)


def test_equal_data_are_never_stored_alike_and_no_repr_shows_the_key() -> None:
    codec = SpillCodec(encrypted=True)
    assert codec.encode(SECRET) != codec.encode(SECRET)
    assert (
        codec.name_of(SECRET) == codec.name_of(SECRET) != SpillCodec(encrypted=True).name_of(SECRET)
    )
    assert repr(codec) == "SpillCodec('none', encrypted=True)"


def on_disk(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


def sorted_rows(directory: Path, codec: SpillCodec) -> Sorter:
    """A sorter that has written a thousand rows with a secret in each."""
    settings = SorterSettings(memory_bytes=1 << 20, block_bytes=1024, shards=1, codec=codec)
    sorter = Sorter(directory, settings)
    sorter.add_table(SPAN, 0)
    columns = ([0], [INSERT], [SECRET], [SECRET], [None])
    rows = raw_batch(list(range(1, 1001)), *(column * 1000 for column in columns))
    sorter.add(SPAN, rows)
    sorter.resolve(SPAN, 1000)
    return sorter


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_sorted_rows_lie_on_disk_encrypted_and_are_read_back(tmp_path: Path, codec) -> None:
    sorter = sorted_rows(tmp_path, codec)
    assert sorter.stats().blocks_written
    if codec.is_plain or codec.hides:  # LZ4 may store a text in pieces
        assert (SECRET in on_disk(tmp_path)) == codec.is_plain
    batches = list(sorter.fetch(SPAN, Position(1, 0), Position.fence(1000)))
    values = [value for batch in batches for value in batch["value"].to_pylist()]
    assert values == [SECRET] * 1000
    sorter.close()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_damaged_segment_is_a_damaged_block_whatever_it_is_encoded_by(
    tmp_path: Path, codec
) -> None:
    sorter = sorted_rows(tmp_path, codec)
    (segment,) = tmp_path.rglob("*.segment")
    whole = segment.read_bytes()
    segment.write_bytes(whole[:100] + bytes(byte ^ 1 for byte in whole[100:200]) + whole[200:])
    with pytest.raises(BlockCorruptError):
        list(sorter.fetch(SPAN, Position(1, 0), Position.fence(1000)))
    sorter.close()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_open_transactions_lie_on_disk_encrypted_and_are_read_back(tmp_path: Path, codec) -> None:
    shared = OpenTransactions(tmp_path / "open", 0, codec=codec)
    rows = OpenRows(shared, Format(bytes, bytes, len))
    entries = {(5, SECRET + b"%d" % number): SECRET * 50 for number in range(100)}
    for at, value in entries.items():
        rows.put(at, value)
    rows.spill()
    assert rows.memory == {}
    if codec.is_plain or codec.hides:  # LZ4 may store a text in pieces
        assert (SECRET in on_disk(tmp_path)) == codec.is_plain
    first = next(iter(entries))
    assert rows.get(first) == rows.pop(first) == entries.pop(first)
    assert first not in rows
    assert dict(rows.drain()) == entries
    shared.close()
